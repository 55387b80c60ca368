package monitor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/ledger"
)

// ErrQuiesced is the error of requests for the driver while the driver is released.
var ErrQuiesced = errors.New("the driver is released for maintenance: run resume first")

// Status is the state of the monitor, for display, metrics and events. Its slices are shared with
// the monitor and read-only.
type Status struct {
	// Snapshot is the published Snapshot.
	Snapshot inventory.Snapshot
	// GPUs has the faults, counted events, recoveries and last reading of each GPU, in the order of
	// the Snapshot.
	GPUs []health.GPU
	// Unwatched are the GPUs without driver events, with the reasons. Only polling finds their
	// faults.
	Unwatched []inventory.LeftOut
	// Retries are the paused GPUs: GPUs not called for a while because they are lost, hang or
	// cannot be identified.
	Retries []Retry
	// Node is the common reason of all GPUs, or empty.
	Node string
	// Err is the error of the last look, or nil. It wraps inventory's errors where possible.
	Err error
	// Looked is the end of the last successful look; zero before the first.
	Looked time.Time
	// Answers is the start of the current series of successful looks, if the last one succeeded.
	Answers time.Time
	// Quiesced is the time at which the driver was released until Resume; zero while it is in use.
	// Allocate is true if GPUs may still get new work meanwhile, and ForChange if QuiesceForChange
	// released the driver.
	Quiesced            time.Time
	Allocate, ForChange bool
}

// Status returns the current state. It fails if the monitor does not respond before ctx ends.
func (m *Monitor) Status(ctx context.Context) (Status, error) {
	var s Status
	err := m.do(ctx, func(l *loop) {
		s = Status{
			Snapshot: l.state.lastPublished, Node: l.state.nodeReason, Err: l.state.err, Looked: l.state.lastSuccess,
			Answers:  l.state.successSince,
			Quiesced: l.quiescedSince, Allocate: l.isQuiesced() && l.state.withheldSince.IsZero(),
			ForChange: l.isQuiesced() && l.isForChange,
			Unwatched: l.state.unwatched, Retries: l.state.retries(),
			GPUs: make([]health.GPU, 0, len(l.state.lastPublished.GPUs)),
		}
		for _, g := range l.state.lastPublished.GPUs {
			s.GPUs = append(s.GPUs, l.state.gpus[g.UUID])
		}
	})
	return s, err
}

// Alive fails if the Monitor's loop does not respond before ctx ends. A hanging driver does not
// block the loop.
func (m *Monitor) Alive(ctx context.Context) error { return m.do(ctx, func(*loop) {}) }

// Look runs a look and returns its Snapshot. It fails if the look fails or does not end before ctx.
func (m *Monitor) Look(ctx context.Context) (inventory.Snapshot, error) {
	err := m.runAndAwait(ctx, wantLook, func(l *loop) error {
		if l.isQuiesced() {
			return ErrQuiesced
		}
		return nil
	})
	if err != nil {
		return inventory.Snapshot{}, err
	}
	return m.snapshots.Value(), nil
}

// Processes returns the processes that compute on the given GPUs, by UUID, as far as the driver
// shows processes to this process. A GPU without this feature has none. Processes fails if the
// processes cannot be read before ctx ends.
func (m *Monitor) Processes(ctx context.Context, gpus []string) (map[string][]inventory.Process, error) {
	found := make(map[string][]inventory.Process, len(gpus))
	var failed error
	err := m.callDriver(ctx, func(ctx context.Context, s Session, _ *look) {
		for _, uuid := range gpus {
			processes, err := s.Processes(ctx, uuid)
			if err != nil && !errors.Is(err, inventory.ErrNotSupported) {
				failed = err
				return
			}
			found[uuid] = processes
		}
	})
	if err != nil {
		return nil, err
	}
	return found, failed
}

// MemoryLimits returns the memory limits of cgroups on GPUs, in MiB, by UUID and cgroup directory;
// 0 means no limit. The result omits GPUs without limits or without an answer, and cgroups that
// have ended. MemoryLimits fails if nothing can be read before ctx ends.
func (m *Monitor) MemoryLimits(ctx context.Context, cgroups map[string][]string) (map[string]map[string]int, error) {
	limits := map[string]map[string]int{}
	err := m.callDriver(ctx, func(ctx context.Context, s Session, _ *look) {
		for uuid, folders := range cgroups {
			limits[uuid] = map[string]int{}
			for _, folder := range folders {
				mib, err := s.MemoryLimit(ctx, uuid, folder)
				if errors.Is(err, inventory.ErrNotSupported) || errors.Is(err, inventory.ErrNoAnswer) {
					break // the other cgroups would fail likewise
				}
				if err == nil {
					limits[uuid][folder] = mib
				}
			}
		}
	})
	if err != nil {
		return nil, err
	}
	return limits, nil
}

// Clean removes changes left behind by earlier work on the given GPUs, by UUID. It logs refusals of
// the driver, skips unsupported features, and fails if it cannot try before ctx ends.
func (m *Monitor) Clean(ctx context.Context, gpus []string, what []inventory.Remnant) error {
	return m.callDriver(ctx, func(ctx context.Context, s Session, l *look) {
		for _, uuid := range gpus {
			for _, remnant := range what {
				if remnant == inventory.RemnantECC {
					l.clearedGPUs = append(l.clearedGPUs, uuid)
				}
				err := s.Clean(ctx, uuid, remnant)
				if err != nil && !errors.Is(err, inventory.ErrNotSupported) {
					klog.FromContext(ctx).Info("Cannot clean up a GPU after earlier work", "gpu", uuid,
						"reason", err.Error())
				}
			}
		}
	})
}

// SetComputeMode sets the compute mode of a GPU, by UUID, and returns the previous mode. The mode
// lasts as long as the Monitor's session, because a driver without users forgets the mode. The
// error wraps inventory.ErrNotSupported for a GPU without compute modes.
func (m *Monitor) SetComputeMode(
	ctx context.Context, uuid string, mode inventory.ComputeMode,
) (inventory.ComputeMode, error) {
	var before inventory.ComputeMode
	var failed error
	err := m.callDriver(ctx, func(ctx context.Context, s Session, _ *look) {
		before, failed = s.SetComputeMode(ctx, uuid, mode)
	})
	if err != nil {
		return 0, fmt.Errorf("set the compute mode of GPU %s: %w", uuid, err)
	}
	return before, failed
}

// Partitions returns the MIG layout of a GPU, by UUID. It does not wait for the end of the look,
// which may take long because of a slow GPU. It fails if the layout cannot be read before ctx ends.
func (m *Monitor) Partitions(ctx context.Context, uuid string) (inventory.Partitions, error) {
	type answer struct {
		p   inventory.Partitions
		err error
	}
	read := make(chan answer, 1)
	waiting, end := context.WithCancel(ctx)
	defer end()
	err := m.callDriver(waiting, func(ctx context.Context, s Session, _ *look) {
		p, err := s.Partitions(ctx, uuid)
		read <- answer{p, err}
		end()
	})
	select {
	case a := <-read:
		return a.p, a.err
	default:
		return inventory.Partitions{}, fmt.Errorf("read the MIG instances of GPU %s: %w", uuid, err)
	}
}

// Repartition makes one change of the MIG layout of a GPU, by UUID. It returns the ID of a created
// instance, and 0 for other steps. Looks continue during a slow step, and the step continues after
// the end of ctx: after inventory.ErrNoAnswer or the end of ctx, the step may still happen, and
// Partitions returns the result.
func (m *Monitor) Repartition(ctx context.Context, uuid string, step inventory.MIGStep) (int, error) {
	var end func(context.Context) (int, error)
	var failed error
	err := m.callDriver(ctx, func(looking context.Context, s Session,
		_ *look) {
		end, failed = s.Repartition(looking, uuid, step)
	})
	switch {
	case err != nil:
		return 0, fmt.Errorf("%s on GPU %s: %w", step.Action, uuid, err)
	case failed != nil:
		return 0, failed
	}
	id, err := end(ctx)
	if mode, set := step.Mode(); set && errors.Is(err, inventory.ErrSessionInUse) {
		return 0, m.setMIGMode(ctx, uuid, mode)
	}
	return id, err
}

// setMIGMode sets the MIG mode of a GPU without a session. The next look opens another session. The
// session stays open while a call hangs, or if GPUs would lose settings.
func (m *Monitor) setMIGMode(ctx context.Context, uuid string, mode inventory.MIGMode) error {
	if m.options.Modes == nil {
		return inventory.ErrSessionInUse
	}
	if err := m.options.Modes.Check(); err != nil {
		return err
	}
	_, err := m.withoutSession(ctx, true, func(context.Context) error {
		klog.FromContext(ctx).Info("Released the driver for a change of a MIG mode", "gpu", uuid, "mode", mode)
		return m.options.Modes.Set(ctx, uuid, mode)
	})
	return err
}

// callDriver runs a driverCall during the next look, and waits for the end of the look.
func (m *Monitor) callDriver(ctx context.Context, run driverCall) error {
	return m.runInLook(ctx, func(l *loop, once func(func())) {
		l.driverCalls = append(l.driverCalls, func(looking context.Context, s Session, l *look) {
			once(func() { run(looking, s, l) })
		})
	})
}

// runInLook lets add register functions for the next look, wrapped by once, and waits for the end
// of the look.
func (m *Monitor) runInLook(ctx context.Context, add func(l *loop, once func(func()))) error {
	ran := false
	err := m.runAndAwait(ctx, wantLook, func(l *loop) error {
		if l.isQuiesced() {
			return ErrQuiesced
		}
		add(l, func(run func()) {
			if ctx.Err() != nil {
				return // the caller has given up
			}
			ran = true
			run()
		})
		return nil
	})
	switch {
	case err != nil:
		return err
	case ctx.Err() != nil && !ran:
		return fmt.Errorf("wait for a health check of the node: %w", ctx.Err())
	case !ran:
		return ErrQuiesced // the driver was released meanwhile
	}
	return nil
}

// Quiesce releases the driver until Resume, for a reset of GPUs or a change of the driver. The last
// Snapshot stays, marked stale. Unless allocate is true, the GPUs become Unknown and get no new
// work. A new process keeps the driver released. Quiesce fails if the driver cannot be released
// yet; the monitor retries until Resume.
func (m *Monitor) Quiesce(ctx context.Context, allocate bool) error {
	return m.quiesce(ctx, ledger.Release{Allocate: allocate})
}

// QuiesceForChange is Quiesce, without new work, by the daemon itself before it changes the driver. A
// later Quiesce takes the release over.
func (m *Monitor) QuiesceForChange(ctx context.Context) error {
	return m.quiesce(ctx, ledger.Release{ForChange: true})
}

func (m *Monitor) quiesce(ctx context.Context, release ledger.Release) error {
	outcome := make(chan error, 1)
	release.Since, release.Boot = time.Now().UTC(), m.options.BootID
	err := m.setRelease(ctx, &release, func(l *loop) {
		klog.FromContext(ctx).Info("Releasing the driver", "allocate", release.Allocate, "change", release.ForChange)
		if !l.isQuiesced() {
			l.quiescedSince = time.Now()
		}
		l.isForChange = release.ForChange
		l.state.quiesce(release.Allocate, time.Now())
		l.answerTo(waiter{outcome, wantRelease})
	})
	if err != nil {
		return err
	}
	return wait(ctx, outcome)
}

// Resume ends Quiesce: it opens a session and runs a look. After a failure the monitor retries.
func (m *Monitor) Resume(ctx context.Context) error {
	outcome := make(chan error, 1)
	err := m.setRelease(ctx, nil, func(l *loop) {
		klog.FromContext(ctx).Info("Using the driver again")
		l.quiescedSince, l.sessionReleased = time.Time{}, false
		l.answerTo(waiter{outcome, wantLook})
	})
	if err != nil {
		return err
	}
	return wait(ctx, outcome)
}

// Clear removes all faults of the GPU or MIG device with the given UUID, for a GPU also of all its
// MIG devices. It returns when the next look has found the remaining faults. It fails for an
// unknown device, or with the look.
func (m *Monitor) Clear(ctx context.Context, uuid string) error {
	return m.runAndAwait(ctx, wantAny, func(l *loop) error {
		if !l.state.clear(uuid, time.Now()) {
			return fmt.Errorf("clear faults: this node has no GPU or MIG device %q; status lists them by index and "+
				"UUID", uuid)
		}
		klog.FromContext(ctx).Info("Faults cleared by an operator", "device", uuid)
		return nil
	})
}

// Proven folds in the result of a CUDA check of the GPU or MIG device with a UUID: why CUDA does
// not work and the remedy, or an empty reason. It fails if the monitor does not respond before ctx
// ends.
func (m *Monitor) Proven(ctx context.Context, uuid, why string, remedy inventory.Remedy) error {
	return m.do(ctx, func(l *loop) {
		l.state.foldProof(uuid, why, remedy, time.Now())
		l.publish(ctx)
	})
}

// Deliver folds in an event from outside a session, such as one of the kernel log. It fails if the
// monitor does not take the event before ctx ends.
func (m *Monitor) Deliver(ctx context.Context, e inventory.Event) error {
	select {
	case m.events <- e:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("the monitor does not respond: %w", ctx.Err())
	}
}

// Apply replaces the policy.
func (m *Monitor) Apply(ctx context.Context, p health.Policy) error {
	return m.do(ctx, func(l *loop) { l.state.policy = p })
}

// runAndAwait runs a request in the loop. After a successful request it waits for the result of the
// next look.
func (m *Monitor) runAndAwait(ctx context.Context, w want, request func(*loop) error) error {
	outcome := make(chan error, 1)
	if err := m.requestOutcome(ctx, w, request, outcome); err != nil {
		return err
	}
	return wait(ctx, outcome)
}

// requestOutcome runs a request in the loop. The result is sent to outcome later.
func (m *Monitor) requestOutcome(ctx context.Context, w want, request func(*loop) error, outcome chan<- error) error {
	return m.do(ctx, func(l *loop) {
		if err := request(l); err != nil {
			outcome <- err
			return
		}
		l.answerTo(waiter{outcome, w})
	})
}

// answerTo sends the result of the next look, or of the next release of the driver, to a waiter.
func (l *loop) answerTo(w waiter) {
	if l.sessionReleased {
		w.outcome <- nil // nothing to do: no look follows
		return
	}
	l.waiters = append(l.waiters, w)
	l.nextLook = time.Now()
}

// wait waits for the result of a request.
func wait(ctx context.Context, outcome <-chan error) error {
	select {
	case err := <-outcome:
		return err
	case <-ctx.Done():
		return fmt.Errorf("wait for a health check of the node: %w", ctx.Err())
	}
}

// do runs a request in the loop and waits for its end. The loop skips a request whose ctx has
// ended.
func (m *Monitor) do(ctx context.Context, request func(*loop)) error {
	done := make(chan error, 1)
	run := func(l *loop) {
		err := ctx.Err()
		if err == nil {
			request(l)
		}
		done <- err
	}
	select {
	case m.requests <- run:
	case <-ctx.Done():
		return fmt.Errorf("the monitor does not respond: %w", ctx.Err())
	}
	if err := <-done; err != nil { // does not block: the loop never waits
		return fmt.Errorf("the monitor does not respond: %w", err)
	}
	return nil
}
