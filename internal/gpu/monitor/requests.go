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

// ErrQuiesced is the error of requests that need the driver while it is released.
var ErrQuiesced = errors.New("the driver was released for maintenance: resume first")

// Status is the state of the monitor, for people, metrics and events. It shares its slices with the
// monitor: nobody may change them.
type Status struct {
	// Snapshot is the published one.
	Snapshot inventory.Snapshot
	// GPUs has, for each GPU of the Snapshot and in its order, faults, counted events, recoveries and
	// the last reading.
	GPUs []health.GPU
	// Unwatched are the GPUs that give no events, and why: what happens to them is found at the next
	// look.
	Unwatched []inventory.LeftOut
	// Retries are the GPUs that are left alone for a while because they are lost, hang or cannot be
	// identified.
	Retries []Retry
	// Node is the reason that holds for all GPUs at once; empty if there is none.
	Node string
	// Err is why the last look failed, nil if it did not. It wraps inventory's errors where those fit.
	Err error
	// Looked is when the last look that succeeded ended; zero before the first.
	Looked time.Time
	// Answers is since when looks succeed, if the last one did.
	Answers time.Time
	// Quiesced is since when the driver is released and left alone, until Resume; zero while it is
	// not. Allocate says that GPUs are given to new work meanwhile.
	Quiesced time.Time
	Allocate bool
}

// Status returns what the monitor knows now. The error says that the monitor could not be reached
// before ctx ended.
func (m *Monitor) Status(ctx context.Context) (Status, error) {
	var s Status
	err := m.do(ctx, func(l *loop) {
		s = Status{
			Snapshot: l.state.published, Node: l.state.node, Err: l.state.err, Looked: l.state.looked, Answers: l.state.answers,
			Quiesced: l.quiesced, Allocate: l.isQuiesced() && l.state.withheld.IsZero(),
			Unwatched: l.state.unwatched, Retries: l.state.retries(),
			GPUs: make([]health.GPU, 0, len(l.state.published.GPUs)),
		}
		for _, g := range l.state.published.GPUs {
			s.GPUs = append(s.GPUs, l.state.gpus[g.UUID])
		}
	})
	return s, err
}

// Alive returns an error if the Monitor's loop makes no round before ctx ends. A driver that hangs
// does not keep it from that.
func (m *Monitor) Alive(ctx context.Context) error { return m.do(ctx, func(*loop) {}) }

// Look asks for a look that begins now and returns what it found. The error says why there was none
// by the time ctx ended, or why the look failed.
func (m *Monitor) Look(ctx context.Context) (inventory.Snapshot, error) {
	err := m.await(ctx, wantLook, func(l *loop) error {
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

// Processes returns the processes that compute on the given GPUs, by the GPU's UUID, as far as the
// driver shows them to this process. A GPU that cannot tell has none. The error says why they could
// not be read by the time ctx ended.
func (m *Monitor) Processes(ctx context.Context, gpus []string) (map[string][]inventory.Process, error) {
	found := make(map[string][]inventory.Process, len(gpus))
	var failed error
	err := m.send(ctx, func(ctx context.Context, s Session, _ *look) {
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

// MemoryLimits returns how much memory of GPUs, by UUID, the processes of cgroups may use, in MiB,
// by the folder of the cgroup; 0 where that is not limited. What cannot be read is left out: a GPU
// that has no limits or does not answer, and a cgroup that has ended. The error says that nothing
// could be read by the time ctx ended.
func (m *Monitor) MemoryLimits(ctx context.Context, cgroups map[string][]string) (map[string]map[string]int, error) {
	limits := map[string]map[string]int{}
	err := m.send(ctx, func(ctx context.Context, s Session, _ *look) {
		for uuid, folders := range cgroups {
			limits[uuid] = map[string]int{}
			for _, folder := range folders {
				mib, err := s.MemoryLimit(ctx, uuid, folder)
				if errors.Is(err, inventory.ErrNotSupported) || errors.Is(err, inventory.ErrNoAnswer) {
					break // the others would not be told either
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

// Clean takes back what earlier work left behind on the given GPUs, by UUID. What the driver
// refuses is logged, and what it does not support skipped. The error says why it was not tried by
// the time ctx ended.
func (m *Monitor) Clean(ctx context.Context, gpus []string, what []inventory.Remnant) error {
	return m.send(ctx, func(ctx context.Context, s Session, l *look) {
		for _, uuid := range gpus {
			for _, remnant := range what {
				if remnant == inventory.RemnantECC {
					l.cleared = append(l.cleared, uuid)
				}
				err := s.Clean(ctx, uuid, remnant)
				if err != nil && !errors.Is(err, inventory.ErrNotSupported) {
					klog.FromContext(ctx).Info("Cannot take back what earlier work left on a GPU", "gpu", uuid, "reason", err.Error())
				}
			}
		}
	})
}

// SetComputeMode says which processes may compute on a GPU, by UUID, and returns what held before.
// The mode holds as long as the Monitor keeps its session: a driver without users forgets it. The
// error wraps inventory.ErrNotSupported where the GPU has no compute modes.
func (m *Monitor) SetComputeMode(ctx context.Context, uuid string, mode inventory.ComputeMode) (inventory.ComputeMode,
	error) {
	var before inventory.ComputeMode
	var failed error
	err := m.send(ctx, func(ctx context.Context, s Session, _ *look) {
		before, failed = s.SetComputeMode(ctx, uuid, mode)
	})
	if err != nil {
		return 0, fmt.Errorf("set the compute mode of GPU %s: %w", uuid, err)
	}
	return before, failed
}

// Partitions returns how MIG divides a GPU, by UUID, as soon as that is read. The look in which it
// is read may take longer, as another GPU is slow. The error says why it could not be read by the
// time ctx ended.
func (m *Monitor) Partitions(ctx context.Context, uuid string) (inventory.Partitions, error) {
	type answer struct {
		p   inventory.Partitions
		err error
	}
	read := make(chan answer, 1)
	waiting, end := context.WithCancel(ctx)
	defer end()
	err := m.send(waiting, func(ctx context.Context, s Session, _ *look) {
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

// Repartition makes one change of how MIG divides a GPU, by UUID. It returns the ID of the instance
// that was created, and 0 for other steps. Looks go on while the driver takes its time, and a step
// that is long goes on when ctx ends: after an error that is inventory.ErrNoAnswer or an end of ctx
// the step may still happen, and Partitions tells.
func (m *Monitor) Repartition(ctx context.Context, uuid string, step inventory.MIGStep) (int, error) {
	var end func(context.Context) (int, error)
	var failed error
	err := m.send(ctx, func(looking context.Context, s Session,
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

// setMIGMode sets the MIG mode of a GPU while there is no session. The next look opens another one.
// The session stays while a call hangs, and where GPUs would lose settings with it.
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

// send runs a driverCall during a look that begins now, and waits until the look has ended.
func (m *Monitor) send(ctx context.Context, run driverCall) error {
	return m.during(ctx, func(l *loop, once func(func())) {
		l.driverCalls = append(l.driverCalls, func(looking context.Context, s Session, l *look) {
			once(func() { run(looking, s, l) })
		})
	})
}

// during has add put something into the look that begins now, which calls once, and waits until the
// look has ended.
func (m *Monitor) during(ctx context.Context, add func(l *loop, once func(func()))) error {
	ran := false
	err := m.await(ctx, wantLook, func(l *loop) error {
		if l.isQuiesced() {
			return ErrQuiesced
		}
		add(l, func(run func()) {
			if ctx.Err() != nil {
				return // nobody waits for it any more
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
		return fmt.Errorf("wait for a look at the node: %w", ctx.Err())
	case !ran:
		return ErrQuiesced // since
	}
	return nil
}

// Quiesce releases the driver, so that GPUs can be reset and the driver be replaced, and leaves it
// alone until Resume. The last Snapshot stays, marked stale; unless allocate, its GPUs become
// Unknown and are not given to new work. A new process leaves the driver alone, too. The error says
// why the driver could not be released yet: it is tried again until Resume.
func (m *Monitor) Quiesce(ctx context.Context, allocate bool) error {
	outcome := make(chan error, 1)
	release := ledger.Release{Since: time.Now().UTC(), Allocate: allocate, Boot: m.options.BootID}
	err := m.setRelease(ctx, &release, func(ctx context.Context) error {
		return m.ask(ctx, wantRelease, func(l *loop) error {
			klog.FromContext(ctx).Info("Releasing the driver", "allocate", allocate)
			if !l.isQuiesced() {
				l.quiesced = time.Now()
			}
			l.state.quiesce(allocate, time.Now())
			return nil
		}, outcome)
	})
	if err != nil {
		return err
	}
	return wait(ctx, outcome)
}

// Resume ends what Quiesce began: it opens a session and looks at the node. The error says why that
// failed; it is tried again.
func (m *Monitor) Resume(ctx context.Context) error {
	outcome := make(chan error, 1)
	err := m.setRelease(ctx, nil, func(ctx context.Context) error {
		return m.ask(ctx, wantLook, func(l *loop) error {
			klog.FromContext(ctx).Info("Using the driver again")
			l.quiesced, l.closed = time.Time{}, false
			return nil
		}, outcome)
	})
	if err != nil {
		return err
	}
	return wait(ctx, outcome)
}

// Clear forgets all faults of the GPU or MIG device with the given UUID; for a GPU also those of
// its MIG devices. It returns when the next look has found what is still wrong. The error says that
// there is no such device, or why the look failed.
func (m *Monitor) Clear(ctx context.Context, uuid string) error {
	return m.await(ctx, wantEither, func(l *loop) error {
		if !l.state.clear(uuid, time.Now()) {
			return fmt.Errorf("clear faults: this node has no GPU or MIG device %q; status lists them by index and UUID", uuid)
		}
		klog.FromContext(ctx).Info("Faults cleared by an operator", "device", uuid)
		return nil
	})
}

// Proven folds in what a proof showed of the GPU or MIG device with a UUID: why CUDA does not work
// on it, with the cure; nothing is wrong if why is empty. The error says that the monitor could not
// be reached before ctx ended.
func (m *Monitor) Proven(ctx context.Context, uuid, why string, cure inventory.Cure) error {
	return m.do(ctx, func(l *loop) {
		l.state.proven(uuid, why, cure, time.Now())
		l.publish(ctx)
	})
}

// Deliver folds in an event that did not come from a session, such as one of the kernel's log. The
// error says that ctx ended before the monitor took it.
func (m *Monitor) Deliver(ctx context.Context, e inventory.Event) error {
	select {
	case m.events <- e:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("reach the monitor: %w", ctx.Err())
	}
}

// Apply puts another policy in force.
func (m *Monitor) Apply(ctx context.Context, p health.Policy) error {
	return m.do(ctx, func(l *loop) { l.state.policy = p })
}

// await makes the loop run a request. Unless the request fails, await then waits for the outcome of
// the next look.
func (m *Monitor) await(ctx context.Context, w want, request func(*loop) error) error {
	outcome := make(chan error, 1)
	if err := m.ask(ctx, w, request, outcome); err != nil {
		return err
	}
	return wait(ctx, outcome)
}

// ask has the loop run a request, whose outcome follows when it is known.
func (m *Monitor) ask(ctx context.Context, w want, request func(*loop) error, outcome chan<- error) error {
	return m.do(ctx, func(l *loop) {
		if err := request(l); err != nil {
			outcome <- err
			return
		}
		if l.closed {
			outcome <- nil // nothing is left to do, and nobody looks
			return
		}
		l.waiters = append(l.waiters, waiter{outcome, w})
		l.next = time.Now()
	})
}

// wait waits for the outcome of a request.
func wait(ctx context.Context, outcome <-chan error) error {
	select {
	case err := <-outcome:
		return err
	case <-ctx.Done():
		return fmt.Errorf("wait for a look at the node: %w", ctx.Err())
	}
}

// do has the loop run a request and waits until it has. The loop runs no request that nobody waits
// for any more.
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
		return fmt.Errorf("reach the monitor: %w", ctx.Err())
	}
	if err := <-done; err != nil { // the loop never waits
		return fmt.Errorf("reach the monitor: %w", err)
	}
	return nil
}
