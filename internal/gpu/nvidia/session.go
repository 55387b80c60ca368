package nvidia

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// A Session is one NVML session. It is safe for concurrent use, except that only one goroutine may
// call Next. Even if calls hang, every method but Close returns within seconds after the last
// returned call.
type Session struct {
	driver *Driver
	api    *api // for calls about no GPU

	scanner        *scanner  // used by the goroutine with the worker calls
	firstScanStart time.Time // start of the first scan, made by Open; zero once there was a scan
	isStopped      bool      // NVML was shut down; used by the goroutine with both workers
	watch          *watch    // used by the goroutine with the worker events, after the session is open

	mu                sync.Mutex // guards the following three fields
	unwatched         []inventory.LeftOut
	registrationQueue []watchedGPU // GPUs to register for events at the next wait
	linksChanged      bool         // links may have changed, as reported by an event

	// The fields below belong to the caller of Next.

	uselessPause time.Duration // pause because the last wait was useless
	nextWait     time.Time     // earliest start of the next wait
}

func newSession(d *Driver, a *api) *Session {
	waits := a.withRecord(d.waits)
	return &Session{driver: d, api: a, watch: &watch{api: waits, pinned: d.isPinned, bindings: bindings{api: waits}}}
}

// readFacts reads the facts about the whole session, in a job. bound are the GPUs bound to the
// driver.
func (s *Session) readFacts(bound []binding) error {
	version, ret := s.api.SystemGetDriverVersion()
	if err := failure("nvmlSystemGetDriverVersion", ret); err != nil {
		return err
	}
	driver := inventory.Driver{Version: version}
	s.driver.version = version
	if cuda, ret := s.api.SystemGetCudaDriverVersion(); ret == nvml.SUCCESS {
		driver.CUDA = fmt.Sprintf("%d.%d", cuda/1000, cuda%1000/10)
	}
	s.scanner = newScanner(s.api, s.driver, driver, bound)
	// Before the first scan, so that any later change has an event.
	s.watch.bindings.start(s.api)
	if err := s.scanner.count(); err != nil {
		return err
	}
	s.watch.set, ret = s.api.EventSetCreate()
	s.scanner.events = s.watch.set
	s.scanner.noEvents = failure("nvmlEventSetCreate", ret)
	return nil
}

// firstVisits visits each GPU for the first time and registers for its events. The caller has the
// worker calls.
func (s *Session) firstVisits(ctx context.Context) {
	s.firstScanStart = time.Now()
	for _, sl := range s.scanner.slots {
		if err := s.visit(ctx, sl); err != nil && ctx.Err() != nil {
			break
		}
		sl.isVisited = sl.stall == nil
	}
	spoilt := false
	for _, sl := range s.scanner.slots {
		sl.isRegistered.Store(true) // from now on a wait may use the set
		if sl.gpu.lastSeen.UUID == "" {
			s.noEvents(sl.record.gpu, sl.reason())
			continue
		}
		err := sl.gpu.eventsError
		if spoilt = s.watch.admit(sl.watchedGPU(s.watch.api), err) || spoilt; err != nil &&
			!errors.Is(err, errMIGEvents) {
			s.noEvents(sl.record.gpu, err)
		}
	}
	if !spoilt && len(s.watch.gpus) > 0 {
		return
	}
	w := *s.watch // a hanging job keeps a separate copy
	w.refusedGPUs = slices.Clone(w.refusedGPUs)
	var without []droppedGPU
	again := func() { without = w.arm(s.api) }
	if err := s.driver.calls.job(ctx, s.driver.node, nodePatience, again, nil); err != nil {
		s.watch.set, s.watch.gpus = nil, nil // the job may have freed the set, or may use another one
		return
	}
	*s.watch = w
	for _, d := range without {
		s.noEvents(d.index, d.reason)
	}
}

// noEvents records why a GPU has no events, or with a nil reason that the GPU has events.
func (s *Session) noEvents(gpu int, reason error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unwatched = slices.DeleteFunc(slices.Clone(s.unwatched), func(o inventory.LeftOut) bool { return o.Index == gpu })
	if reason != nil {
		s.unwatched = append(s.unwatched, inventory.LeftOut{Index: gpu, Reason: reason.Error()})
		order.Sort(s.unwatched, func(a, b inventory.LeftOut) int { return a.Index - b.Index })
	}
}

// Unwatched lists the GPUs without events, with the reasons: only Scan and Read show their changes.
func (s *Session) Unwatched() []inventory.LeftOut {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.unwatched
}

// Scan reads the whole node. The Snapshot has Generation 0 and no health, because Read gives the
// evidence for health. A GPU of this session that no longer answers stays as last seen. LeftOut has
// unidentified GPUs and unreadable MIG devices.
//
// A GPU with a hanging call stays as last seen, and Read reports the call. Scan calls the GPU again
// after the call has returned, and after all other GPUs. A paused GPU is called again after Retry:
// a GPU that cannot be identified, is lost, or whose calls hung twice in a row. If a GPU answered
// at once that it is lost, each Scan still calls it by the old handle.
//
// An error means that the node could not be scanned. It wraps inventory.ErrNoAnswer if a call about
// no GPU did not return in time. It wraps inventory.ErrNewSession if, since Open, GPUs were bound
// to the driver or unbound, or MIG instances hidden by the driver changed. After the installation
// of another driver, the session continues as long as it answers, and the Snapshot reports the
// mismatch.
func (s *Session) Scan(ctx context.Context) (_ inventory.Snapshot, err error) {
	defer func() { err = wrap(err, "scan the node") }()
	if err := s.enter(ctx); err != nil {
		return inventory.Snapshot{}, err
	}
	defer s.driver.calls.release()
	began := time.Now()
	if !s.firstScanStart.IsZero() {
		began, s.firstScanStart = s.firstScanStart, time.Time{}
	}
	if err := s.count(ctx); err != nil {
		return inventory.Snapshot{}, err
	}
	s.mu.Lock()
	relink := s.linksChanged
	s.linksChanged = false
	s.mu.Unlock()
	for _, sl := range s.scanner.slots {
		sl.linksDue = sl.linksDue || relink
	}
	for _, last := range []bool{false, true} {
		for _, sl := range s.scanner.slots {
			if (sl.stall != nil) != last {
				continue
			}
			if err := s.visit(ctx, sl); err != nil && ctx.Err() != nil {
				return inventory.Snapshot{}, endOfContext(ctx)
			}
		}
	}
	s.links(ctx, began)
	return s.scanner.publish(), nil
}

// enter takes the worker calls, unless the session is closed.
func (s *Session) enter(ctx context.Context) error {
	if err := s.driver.calls.take(ctx); err != nil {
		return err
	}
	if s.isStopped {
		s.driver.calls.release()
		return errClosed
	}
	return nil
}

// count counts the GPUs. The caller has the worker calls.
func (s *Session) count(ctx context.Context) error {
	var err error
	hangs := s.driver.isPinned()
	noAnswer := s.driver.calls.job(ctx, s.driver.node, nodePatience, func() {
		s.scanner.versions.OnDisk = s.driver.onDisk()
		// Otherwise the session cannot be closed, or no other can be opened.
		if !hangs && s.scanner.versions.OnDisk == "" {
			if err = s.scanner.checkBindings(); err == nil {
				err = s.scanner.checkInstances()
			}
		}
		if err == nil {
			err = s.scanner.count()
		}
	}, nil)
	if noAnswer != nil {
		return noAnswer
	}
	return err
}

// visit visits the GPU of a slot if it is due. The caller has the worker calls.
func (s *Session) visit(ctx context.Context, sl *slot) error {
	if sl.isLost() || sl.isDue() {
		if err := s.awaitRoom(ctx, sl); err != nil {
			return err
		}
	}
	switch { // the awaited job may have visited the GPU
	case sl.isLost():
		return s.runFor(ctx, sl, s.scanner.revisit)
	case sl.isDue():
		return s.runFor(ctx, sl, s.scanner.visit)
	}
	sl.isVisited = false
	return nil
}

// links reads the links of GPUs after changes. With a slow driver each scan reads few GPUs, and the
// first scan none, because the start must not be delayed. The caller has the worker calls.
func (s *Session) links(ctx context.Context, began time.Time) {
	if first := s.scanner.last.GPUs == nil; first && time.Since(began) > linksBudget {
		return
	}
	for _, sl := range s.scanner.slots {
		// Do not wait for a busy GPU: the next scan does not visit it, and finds it free.
		if !sl.linksDue || !sl.linkable() || s.driver.calls.busy(sl.record) {
			continue
		}
		if s.awaitRoom(ctx, sl) == nil {
			peers := s.scanner.peers(sl)
			_ = s.runFor(ctx, sl, func(sl *slot, g *gpu) { s.scanner.readLinks(sl, g, peers) }) // recorded in the slot
		}
		if time.Since(began) > linksBudget {
			return
		}
	}
}

// linksBudget is the time in a scan after which the scan reads no more links.
const linksBudget = time.Second

// awaitRoom waits until the GPU of a slot is not in use, and stores the results of abandoned jobs.
// The caller has the worker calls.
func (s *Session) awaitRoom(ctx context.Context, sl *slot) error {
	err := s.driver.calls.awaitRoom(ctx, sl.record, gpuPatience)
	sl.recordStall(err)
	return err
}

// runFor runs ask for the GPU of a slot, after awaitRoom. The caller has the worker calls.
func (s *Session) runFor(ctx context.Context, sl *slot, ask func(*slot, *gpu)) error {
	g := *sl.gpu
	run, late := func() { ask(sl, &g) }, func() { s.commitLate(sl, &g) }
	if err := s.driver.calls.run(ctx, sl.record, gpuPatience, run, late); err != nil {
		sl.recordStall(err)
		return err
	}
	s.commit(sl, &g)
	sl.stall, sl.hangs = nil, 0
	return nil
}

// commit stores the results for a GPU.
func (s *Session) commit(sl *slot, g *gpu) {
	hasNewUUID, wasPaused := sl.gpu.lastSeen.UUID != g.lastSeen.UUID, sl.isPaused
	g.lastSeen.Links = sl.gpu.lastSeen.Links
	sl.linksDue = sl.linksDue || wasPaused || sl.hangs > 0 || hasNewUUID || g.lastSeen.MIG != sl.gpu.lastSeen.MIG
	sl.gpu = g
	if g.linksRead {
		sl.linksDue = g.nvlink.unread
		s.scanner.storeLinks(g)
	}
	sl.isPaused = g.results.contact == inventory.ContactLost ||
		g.lastSeen.UUID == "" && g.results.contact != inventory.ContactGood
	isBack := wasPaused && !sl.isPaused // the events of the GPU may also have ended
	if sl.isRegistered.Load() && (hasNewUUID || isBack) && g.lastSeen.UUID != "" {
		s.mu.Lock()
		s.registrationQueue = append(s.registrationQueue, sl.watchedGPU(s.watch.api))
		s.mu.Unlock()
	}
}

// commitLate is commit for an abandoned job. The GPU is read next, and not visited.
func (s *Session) commitLate(sl *slot, g *gpu) {
	if s.isStopped {
		return
	}
	s.commit(sl, g)
	sl.isVisited = true
}

// Retry makes the next Scan call all paused GPUs, and read the links of all GPUs.
func (s *Session) Retry(ctx context.Context) (err error) {
	defer func() { err = wrap(err, "ask GPUs again") }()
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.driver.calls.release()
	for _, sl := range s.scanner.slots {
		sl.isPaused, sl.linksDue, sl.hangs = false, true, min(sl.hangs, 1)
	}
	return nil
}

// Read reads the health signals of a GPU of an earlier Scan of this session. The Reading includes
// how the GPU answers. An error means that the GPU could not be called: it does not exist, or a
// call hangs or did not return in time (inventory.Stall).
func (s *Session) Read(ctx context.Context, uuid string) (_ inventory.Reading, err error) {
	defer func() { err = wrap(err, "read GPU "+uuid) }()
	if err := s.enter(ctx); err != nil {
		return inventory.Reading{}, err
	}
	defer s.driver.calls.release()
	sl, err := s.scanner.find(uuid)
	if err != nil {
		return inventory.Reading{}, err
	}
	if !sl.isPaused && !sl.gpu.isUnreturned && sl.hangs < maxHangs {
		if err := s.awaitRoom(ctx, sl); err != nil {
			return inventory.Reading{}, err
		}
	}
	switch { // the awaited job may have read the GPU
	case sl.isPaused:
		return inventory.Reading{Contact: sl.gpu.results.contact, Reason: sl.gpu.results.reason}, nil
	case sl.gpu.isUnreturned:
	case sl.hangs >= maxHangs:
		stall := *sl.stall
		stall.Over = !s.driver.calls.busy(sl.record)
		return inventory.Reading{}, &stall
	default:
		if err := s.runFor(ctx, sl, s.scanner.readSignals); err != nil {
			return inventory.Reading{}, err
		}
	}
	g := sl.gpu
	g.isUnreturned = false
	r := g.reading
	if g.nvlink.active|g.nvlink.inactive != 0 {
		r.Report.NVLinks = inventory.Known(inventory.NVLinks{Active: g.nvlink.active, Inactive: g.nvlink.inactive})
	}
	return r, nil
}

// ask runs a query about a GPU of an earlier Scan of this session.
func ask[T any](ctx context.Context, s *Session, what, uuid string, question func(device) (T, error)) (_ T, err error) {
	var value, none T
	defer func() { err = wrap(err, what+" GPU "+uuid) }()
	if err := s.enter(ctx); err != nil {
		return none, err
	}
	defer s.driver.calls.release()
	sl, err := s.scanner.find(uuid)
	if err == nil {
		err = s.driver.calls.awaitRoom(ctx, sl.record, gpuPatience)
	}
	if err != nil {
		return none, err
	}
	handle := sl.gpu.device
	sl.gpu.isUnreturned = false // the reading is out of date
	var failed error
	if err := s.driver.calls.run(ctx, sl.record, gpuPatience, func() { value, failed = question(handle) },
		nil); err != nil {
		return none, err
	}
	if failed != nil {
		return none, failed
	}
	return value, nil
}

// Close ends the session: it shuts NVML down when no call and no wait is running. NVML must not be
// shut down while one of them hangs. Close then returns inventory.ErrNoAnswer at the deadline of
// ctx, the Driver opens no other session, and this session is still usable. Closing a closed
// session does nothing.
func (s *Session) Close(ctx context.Context) (err error) {
	defer func() { err = wrap(err, "close the NVML session") }()
	if err := s.driver.calls.drain(ctx); err != nil {
		return err
	}
	defer s.driver.calls.release()
	// No wait may use the event set while it is freed.
	if err := s.driver.events.drain(ctx); err != nil {
		return fmt.Errorf("event wait: %w", err)
	}
	defer s.driver.events.release()
	var failed error
	if err := s.driver.calls.run(ctx, s.driver.node, openPatience, func() { failed = s.stop() }, nil); err != nil {
		return err
	}
	return failed
}

// Hanging reports whether a call or a wait has not returned in time. The session can then not be
// closed.
func (s *Session) Hanging() bool { return len(s.driver.Calls()) > 0 }

// stop frees the event sets and shuts NVML down, in a job, while no wait is running.
func (s *Session) stop() error {
	if s.isStopped {
		return nil
	}
	s.isStopped = true
	if s.scanner != nil {
		s.scanner.freeCounts()
	}
	err := s.watch.end(s.api)
	ret := act(s.api, "nvmlShutdown", s.api.lib.Shutdown)
	s.driver.open = false
	return errors.Join(err, failure("nvmlShutdown", ret))
}
