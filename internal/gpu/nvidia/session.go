package nvidia

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// A Session is one NVML session. Its methods may be called from several goroutines, but Next only
// from one at a time. Whatever hangs, each of them but Close returns within seconds after the last
// call that returned.
type Session struct {
	driver *Driver
	api    *api // for calls about no GPU

	scanner *scanner  // used by the goroutine that has the turn of calls
	opened  time.Time // when the first scan was begun with, by Open; zero once there was one
	stopped bool      // used by the goroutine that has the turns of calls and events: NVML was shut down
	watch   *watch    // used by the goroutine that has the turn of events, once the session is open

	mu        sync.Mutex // guards the following three
	unwatched []inventory.LeftOut
	joining   []watched // GPUs whose events the next wait registers for
	relink    bool      // an event says that links may have changed

	// The rest belongs to the caller of Next.

	useless time.Duration // how long to rest because the last wait was of no use
	due     time.Time     // before it no wait begins
}

func newSession(d *Driver, a *api) *Session {
	waits := a.of(d.waits)
	return &Session{driver: d, api: a, watch: &watch{api: waits, pinned: d.pinned, bindings: bindings{api: waits}}}
}

// start reads what holds for the whole session, in a job. The GPUs in bound are bound to the
// driver.
func (s *Session) start(bound []binding) error {
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
	// Before anything is scanned: what happens from here on gives an event.
	s.watch.bindings.start(s.api)
	if err := s.scanner.count(); err != nil {
		return err
	}
	s.watch.set, ret = s.api.EventSetCreate()
	s.scanner.events = s.watch.set
	s.scanner.eventless = failure("nvmlEventSetCreate", ret)
	return nil
}

// firstVisits looks at each GPU for the first time and registers for its events. The caller has the
// turn of calls.
func (s *Session) firstVisits(ctx context.Context) {
	s.opened = time.Now()
	for _, sl := range s.scanner.slots {
		if err := s.visit(ctx, sl); err != nil && ctx.Err() != nil {
			break
		}
		sl.visited = sl.stall == nil
	}
	spoilt := false
	for _, sl := range s.scanner.slots {
		sl.met.Store(true) // from here on a wait on the set may be under way
		if sl.gpu.seen.UUID == "" {
			s.noEvents(sl.record.gpu, sl.reason())
			continue
		}
		err := sl.gpu.refused
		if spoilt = s.watch.admit(sl.watched(s.watch.api), err) || spoilt; err != nil && !errors.Is(err, errMIGEvents) {
			s.noEvents(sl.record.gpu, err)
		}
	}
	if !spoilt && len(s.watch.gpus) > 0 {
		return
	}
	w := *s.watch // a job that hangs keeps its copy
	w.refused = slices.Clone(w.refused)
	var without []dropped
	again := func() { without = w.arm(s.api) }
	if err := s.driver.calls.job(ctx, s.driver.node, nodePatience, again, nil); err != nil {
		s.watch.set, s.watch.gpus = nil, nil // the job may have freed the set, and may be using another
		return
	}
	*s.watch = w
	for _, d := range without {
		s.noEvents(d.index, d.reason)
	}
}

// noEvents notes that a GPU gives no events, or with a nil reason that it does.
func (s *Session) noEvents(gpu int, reason error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unwatched = slices.DeleteFunc(slices.Clone(s.unwatched), func(o inventory.LeftOut) bool { return o.Index == gpu })
	if reason != nil {
		s.unwatched = append(s.unwatched, inventory.LeftOut{Index: gpu, Reason: reason.Error()})
		slices.SortFunc(s.unwatched, func(a, b inventory.LeftOut) int { return a.Index - b.Index })
	}
}

// Unwatched lists the GPUs that give no events, and why: on these only Scan and Read tell what
// happened.
func (s *Session) Unwatched() []inventory.LeftOut {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.unwatched
}

// Scan looks at the whole node. The Snapshot has Generation 0, and no health: what Read returns is
// to be judged. A GPU that was seen in this session and no longer answers is there as it was last
// seen. One that cannot be identified is in LeftOut, and so is a MIG device that cannot be read.
//
// A GPU of which a call hangs is there as it was last seen: Read tells of the call. It is asked
// again when the call has returned, after all others. A GPU that cannot be identified, or whose
// calls hung twice in a row, is asked again after Retry. So is one that is lost, but for its old
// handle: if it said so at once, each Scan asks by that.
//
// An error means that the node could not be looked at. It wraps inventory.ErrNoAnswer when a call
// about no GPU did not return in time, and inventory.ErrNewSession when GPUs were bound to the
// driver, or unbound, after Open, or when MIG instances changed of which the driver does not tell
// this process. Where another driver was installed since, the session goes on as long as it
// answers, and the Snapshot says so.
func (s *Session) Scan(ctx context.Context) (_ inventory.Snapshot, err error) {
	defer func() { err = wrap(err, "scan the node") }()
	if err := s.enter(ctx); err != nil {
		return inventory.Snapshot{}, err
	}
	defer s.driver.calls.release()
	began := time.Now()
	if !s.opened.IsZero() {
		began, s.opened = s.opened, time.Time{}
	}
	if err := s.count(ctx); err != nil {
		return inventory.Snapshot{}, err
	}
	s.mu.Lock()
	relink := s.relink
	s.relink = false
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
				return inventory.Snapshot{}, stopped(ctx)
			}
		}
	}
	s.links(ctx, began)
	return s.scanner.publish(), nil
}

// enter takes the turn of calls, unless the session is closed.
func (s *Session) enter(ctx context.Context) error {
	if err := s.driver.calls.take(ctx); err != nil {
		return err
	}
	if s.stopped {
		s.driver.calls.release()
		return errClosed
	}
	return nil
}

// count finds out which GPUs there are now. The caller has the turn of calls.
func (s *Session) count(ctx context.Context) error {
	var err error
	hangs := s.driver.pinned()
	noAnswer := s.driver.calls.job(ctx, s.driver.node, nodePatience, func() {
		s.scanner.now.OnDisk = s.driver.onDisk()
		if !hangs && s.scanner.now.OnDisk == "" { // else the session cannot be closed, or no other can be opened
			if err = s.scanner.rebound(); err == nil {
				err = s.scanner.redivided()
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

// visit asks the GPU of a slot, as far as it is to be asked now. The caller has the turn of calls.
func (s *Session) visit(ctx context.Context, sl *slot) error {
	if sl.lost() || sl.due() {
		if err := s.room(ctx, sl); err != nil {
			return err
		}
	}
	switch { // a job that was waited for may have visited the GPU
	case sl.lost():
		return s.on(ctx, sl, s.scanner.revisit)
	case sl.due():
		return s.on(ctx, sl, s.scanner.visit)
	}
	sl.visited = false
	return nil
}

// links asks GPUs for their links, as far as they changed. While the driver is slow each scan asks
// few GPUs, and the first one none: it is waited for. The caller has the turn of calls.
func (s *Session) links(ctx context.Context, began time.Time) {
	if first := s.scanner.last.GPUs == nil; first && time.Since(began) > linksBudget {
		return
	}
	for _, sl := range s.scanner.slots {
		// A GPU that is being asked is not waited for: the next scan does not visit it, and finds it
		// free.
		if !sl.linksDue || !sl.linkable() || s.driver.calls.busy(sl.record) {
			continue
		}
		if s.room(ctx, sl) == nil {
			peers := s.scanner.peers(sl)
			_ = s.on(ctx, sl, func(sl *slot, g *gpu) { s.scanner.readLinks(sl, g, peers) }) // the slot knows
		}
		if time.Since(began) > linksBudget {
			return
		}
	}
}

// linksBudget is how long a scan may have taken for another GPU to be asked for its links.
const linksBudget = time.Second

// room waits until the GPU of a slot is not being asked, and takes over what a job that was given
// up has learnt of it. The caller has the turn of calls.
func (s *Session) room(ctx context.Context, sl *slot) error {
	err := s.driver.calls.room(ctx, sl.record, gpuPatience)
	sl.stalled(err)
	return err
}

// on asks the GPU of a slot, for which there is room. The caller has the turn of calls.
func (s *Session) on(ctx context.Context, sl *slot, ask func(*slot, *gpu)) error {
	g := *sl.gpu
	run, late := func() { ask(sl, &g) }, func() { s.late(sl, &g) }
	if err := s.driver.calls.run(ctx, sl.record, gpuPatience, run, late); err != nil {
		sl.stalled(err)
		return err
	}
	s.commit(sl, &g)
	sl.stall, sl.hangs = nil, 0
	return nil
}

// commit takes over what was learnt of a GPU.
func (s *Session) commit(sl *slot, g *gpu) {
	identified, left := sl.gpu.seen.UUID != g.seen.UUID, sl.alone
	g.seen.Links = sl.gpu.seen.Links
	sl.linksDue = sl.linksDue || left || sl.hangs > 0 || identified || g.seen.MIG != sl.gpu.seen.MIG
	sl.gpu = g
	if g.linked {
		sl.linksDue = g.nvlink.unread
		s.scanner.linked(g)
	}
	sl.alone = g.results.contact == inventory.ContactLost ||
		g.seen.UUID == "" && g.results.contact != inventory.ContactGood
	back := left && !sl.alone // its events may have ended with it
	if sl.met.Load() && (identified || back) && g.seen.UUID != "" {
		s.mu.Lock()
		s.joining = append(s.joining, sl.watched(s.watch.api))
		s.mu.Unlock()
	}
}

// late is commit for a job that nobody waited for. The GPU is read next, and not visited.
func (s *Session) late(sl *slot, g *gpu) {
	if s.stopped {
		return
	}
	s.commit(sl, g)
	sl.visited = true
}

// Retry has the next Scan ask the GPUs that it leaves alone, and all GPUs for their links.
func (s *Session) Retry(ctx context.Context) (err error) {
	defer func() { err = wrap(err, "ask GPUs again") }()
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.driver.calls.release()
	for _, sl := range s.scanner.slots {
		sl.alone, sl.linksDue, sl.hangs = false, true, min(sl.hangs, 1)
	}
	return nil
}

// Read reads the health signals of a GPU that an earlier Scan of this session found. How the GPU
// answers is part of the Reading; an error means that it could not be asked: there is no such GPU,
// or a call about it does not return or did not in time (inventory.Stall).
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
	if !sl.alone && !sl.gpu.fresh && sl.hangs < maxHangs {
		if err := s.room(ctx, sl); err != nil {
			return inventory.Reading{}, err
		}
	}
	switch { // a job that was waited for may have read the GPU
	case sl.alone:
		return inventory.Reading{Contact: sl.gpu.results.contact, Reason: sl.gpu.results.reason}, nil
	case sl.gpu.fresh:
	case sl.hangs >= maxHangs:
		stall := *sl.stall
		stall.Over = !s.driver.calls.busy(sl.record)
		return inventory.Reading{}, &stall
	default:
		if err := s.on(ctx, sl, s.scanner.readSignals); err != nil {
			return inventory.Reading{}, err
		}
	}
	g := sl.gpu
	g.fresh = false
	r := g.reading
	if g.nvlink.active|g.nvlink.inactive != 0 {
		r.Report.NVLinks = inventory.Known(inventory.NVLinks{Active: g.nvlink.active, Inactive: g.nvlink.inactive})
	}
	return r, nil
}

// ask puts a question to the driver about a GPU that an earlier Scan of this session found.
func ask[T any](ctx context.Context, s *Session, what, uuid string, question func(device) (T, error)) (_ T, err error) {
	var value, none T
	defer func() { err = wrap(err, what+" GPU "+uuid) }()
	if err := s.enter(ctx); err != nil {
		return none, err
	}
	defer s.driver.calls.release()
	sl, err := s.scanner.find(uuid)
	if err == nil {
		err = s.driver.calls.room(ctx, sl.record, gpuPatience)
	}
	if err != nil {
		return none, err
	}
	handle := sl.gpu.device
	sl.gpu.fresh = false // what was read may change
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

// Close ends the session: NVML is shut down once no call is being made and no wait is under way.
// While one of them hangs NVML must not be shut down: then Close returns inventory.ErrNoAnswer at
// the deadline of ctx, the Driver opens no other session, and this one can still be used. Closing a
// closed session does nothing.
func (s *Session) Close(ctx context.Context) (err error) {
	defer func() { err = wrap(err, "close the NVML session") }()
	if err := s.driver.calls.drain(ctx); err != nil {
		return err
	}
	defer s.driver.calls.release()
	// Nobody may wait on the event set while it is freed.
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

// Hanging reports whether a call, or a wait for events, has not returned in time: the session
// cannot be closed now.
func (s *Session) Hanging() bool { return len(s.driver.Calls()) > 0 }

// stop ends what is waited on and shuts NVML down, in a job and while nobody waits for events.
func (s *Session) stop() error {
	if s.stopped {
		return nil
	}
	s.stopped = true
	if s.scanner != nil {
		s.scanner.freeCounts()
	}
	err := s.watch.end(s.api)
	ret := act(s.api, "nvmlShutdown", s.api.lib.Shutdown)
	s.driver.open = false
	return errors.Join(err, failure("nvmlShutdown", ret))
}
