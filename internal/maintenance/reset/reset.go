// Package reset resets GPUs, for an operator or for package repairer. It withdraws the GPUs from new pods
// and waits for, or names, their users. It then runs the driver's own program while nothing in this process has the
// driver open, and awaits the new health of the GPUs.
package reset

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

const (
	// queryInterval is the interval between queries of the GPUs' users.
	queryInterval = time.Second
	// usersPatience is how long the users of a GPU may stay unknown: the kubelet must read the list
	// with the withdrawn GPU, and report newly admitted pods.
	usersPatience = 15 * time.Second
	// healthPatience limits the wait for the health of the GPUs after the reset.
	healthPatience = 30 * time.Second
	// withholdPatience limits the wait for the monitor. The monitor answers at once unless the daemon
	// is stopping.
	withholdPatience = 2 * time.Second
	// remedy is the end of a sentence about a reset that users of the GPU prevent.
	remedy = "the GPU must not be in use during a reset: stop its processes; nvidia-persistenced, DCGM, Fabric " +
		"Manager and the kernel module nvidia_drm may also have it open"
)

// Options are the parts of the daemon used by Resets.
type Options struct {
	Snapshots *feed.Feed[inventory.Snapshot]
	// Withhold keeps GPUs, by UUID, from new pods, for a reason; an empty reason ends the hold.
	Withhold func(ctx context.Context, gpus []string, reason string) error
	// Reserve keeps claims from a GPU until release is called, and returns the users of the GPU, in
	// words for people. release is nil if the GPU may be in use. The error says why the users are not
	// known.
	Reserve func(ctx context.Context, gpu inventory.GPU) (users []string, release func(), err error)
	// Clients returns the processes that have a GPU open, in words for people, as far as visible to
	// this process.
	Clients func(gpu inventory.GPU) []string
	// Run resets GPUs while this process has released the driver, if May then allows the reset. It
	// returns in bounded time, with context.Canceled when the daemon stops. After an error that
	// wraps ErrHangs, Run calls ended at the end of the reset.
	Run func(ctx context.Context, gpus []inventory.GPU, ended func()) error
	// May returns why this process may not reset GPUs now; nil if it may.
	May func() error
	// PreviousLeader returns the earlier leader, in words for people, that may still reset GPUs;
	// empty if there is none. The channel is closed when the answer may have changed.
	PreviousLeader func() (who string, changed <-chan struct{})
	// StateDir is the folder for the note of a reset; empty for no note. BootID is the boot ID of the
	// node.
	StateDir, BootID string
	// Write writes the note to a path, within any time; nil is statefile.WriteState.
	Write func(path string, v any) error
}

// ErrHangs is wrapped by the error of a reset that continues after its stop.
var ErrHangs = errors.New("the reset does not end")

// A NotTriedError is why the driver was not asked to reset GPUs.
type NotTriedError struct{ error }

func (e NotTriedError) Unwrap() error { return e.error }

// errGivenUp is the error of a reset whose caller has gone away.
var errGivenUp = errors.New("the reset was cancelled before the driver was released")

// errBusy is the error during another reset.
var errBusy = errors.New("another reset is running on this node: check it with status, and retry when it has ended")

// Phase is the progress of a reset.
type Phase string

// The phases of a reset.
const (
	PhaseWaiting     Phase = "waiting"     // for the users of the GPUs
	PhaseResetting   Phase = "resetting"   // the driver's program runs
	PhaseHangs       Phase = "hangs"       // a reset that cannot be stopped; the GPUs stay withdrawn until the end
	PhaseDone        Phase = "done"        // the GPUs were reset
	PhaseFailed      Phase = "failed"      // they were not
	PhaseInterrupted Phase = "interrupted" // the process of the reset ended before, or does not lead any more
)

// Status describes the last reset; Phase is empty without a reset.
type Status struct {
	// GPUs are the UUIDs.
	GPUs  []string
	Phase Phase
	// Since is the time of the request.
	Since time.Time
	// Reason is a sentence without a full stop: the cause of the wait or of the failure.
	Reason string
}

// Resets reset GPUs, one request at a time. New creates Resets; Run ends the resets of earlier
// processes.
type Resets struct {
	options      Options
	disk         *statefile.Disk
	wantedRecord atomic.Pointer[record] // the wanted record in the file; nil for no file
	status       *feed.Feed[Status]
	busy         sync.Mutex // held while a reset is under way
}

// New returns Resets without any reset.
func New(o Options) *Resets {
	if o.Write == nil {
		o.Write = statefile.WriteState
	}
	return &Resets{options: o, disk: statefile.NewDisk(), status: feed.New(Status{})}
}

// Status is the feed of the last reset.
func (r *Resets) Status() *feed.Feed[Status] { return r.status }

// Withheld returns why a GPU, by UUID, may not be given to a pod because of a reset; nil if it may.
func (r *Resets) Withheld(gpu string) error {
	if s := r.status.Value(); s.Withholds() && slices.Contains(s.GPUs, gpu) {
		return fmt.Errorf("GPU %s is being reset", gpu)
	}
	return nil
}

// Withholds reports whether the GPUs are not given to pods.
func (s Status) Withholds() bool {
	return s.Phase == PhaseWaiting || s.Phase == PhaseResetting || s.Phase == PhaseHangs
}

// Runs reports whether the driver's program resets GPUs, or hangs.
func (r *Resets) Runs() bool {
	phase := r.status.Value().Phase
	return phase == PhaseResetting || phase == PhaseHangs
}

// An Order is a request to reset GPUs.
type Order struct {
	// GPUs are indexes and UUIDs; at least one. All GPUs of a request are reset together.
	GPUs []string
	// Wait limits the wait for the users of the GPUs; 0 for no wait.
	Wait time.Duration
}

// Reset resets GPUs, and reports the progress in sentences. The error is why the GPUs were not
// reset, or are still not Healthy afterwards. If ctx ends before the driver is released, no GPU is
// reset. A later end does not stop the reset, and Status has the result. An error that wraps a
// NotTriedError says that the driver was not asked to reset the GPUs.
func (r *Resets) Reset(ctx context.Context, q Order, tell func(string)) error {
	gpus, err := selectGPUs(r.options.Snapshots.Value(), q.GPUs)
	if err == nil {
		err = r.options.May()
	}
	if err == nil && !r.busy.TryLock() {
		err = errBusy
	}
	if err != nil {
		return NotTriedError{err}
	}
	a := &attempt{Resets: r, gpus: gpus, status: Status{Since: time.Now()}, progress: make(chan string),
		callerGone: ctx.Done()}
	for _, g := range gpus {
		a.status.GPUs = append(a.status.GPUs, g.UUID)
	}
	if err := a.note(ctx, PhaseWaiting); err != nil {
		r.busy.Unlock()
		return NotTriedError{err}
	}
	outcome := make(chan error, 1)
	waiting, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	go func() { // the reset continues without a caller
		defer cancel()
		a.run(waiting, q.Wait, func() bool { return ctx.Err() == nil && stop() }, outcome)
	}()
	for {
		select {
		case text := <-a.progress:
			tell(text)
		case err := <-outcome:
			if err != nil {
				return err
			}
			return r.awaitHealth(ctx, gpus)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// An attempt is a running reset.
type attempt struct {
	*Resets
	gpus       []inventory.GPU
	status     Status
	lastText   string
	progress   chan string // sends progress to the operator
	callerGone <-chan struct{}
}

// run waits for the users until ctx ends, and resets the GPUs. From a call of keep on, the end of
// ctx has no effect; keep returns false if ctx has already ended. run sends the outcome as soon as
// it is known, and then waits for a reset that cannot be stopped.
func (a *attempt) run(ctx context.Context, wait time.Duration, keep func() bool, outcome chan<- error) {
	always := context.WithoutCancel(ctx)
	over := make(chan struct{})
	releases, err := a.await(ctx, wait)
	if err == nil && !keep() {
		err = errGivenUp
	}
	if err != nil {
		err = NotTriedError{err}
	} else {
		err = a.reset(always, func() { close(over) })
	}
	for _, release := range releases {
		release()
	}
	switch {
	case err == nil:
		a.end(always, PhaseDone, "")
	case errors.Is(err, context.Canceled): // the daemon ends; the next daemon finds the note
	case errors.Is(err, ErrHangs):
		a.show(always, PhaseHangs, err.Error())
		outcome <- err
		<-over
		a.end(always, PhaseFailed,
			"nvidia-smi has ended after a long time: it is not known whether the GPUs were reset")
		return
	default:
		a.end(always, PhaseFailed, err.Error())
	}
	outcome <- err
}

// show publishes the progress. The GPUs are withdrawn.
func (a *attempt) show(ctx context.Context, p Phase, reason string) {
	a.status.Phase, a.status.Reason = p, reason
	a.withdraw(ctx, a.status)
	if a.lastText == reason || p == PhaseHangs {
		return
	}
	a.lastText = reason
	select {
	case a.progress <- reason:
	case <-a.callerGone:
	}
}

// end publishes the result of the reset, and ends the hold on the GPUs. It removes the note first:
// a new leader reads the note only after this process resets nothing any more.
func (a *attempt) end(ctx context.Context, p Phase, reason string) {
	klog.FromContext(ctx).Info("The reset of GPUs has ended", "gpus", a.status.GPUs, "phase", p, "reason", reason)
	if err := a.forget(ctx); err != nil {
		klog.FromContext(ctx).Info("Cannot remove the note of a reset; the next start shows it as interrupted",
			"reason", err.Error())
	}
	a.status.Phase, a.status.Reason = p, reason
	a.Resets.status.Publish(a.status)
	a.endHold(ctx, a.status.GPUs)
	a.busy.Unlock()
}

// withdraw publishes the progress of a reset, and withholds the GPUs from new pods.
func (r *Resets) withdraw(ctx context.Context, s Status) {
	r.status.Publish(s)
	ctx, cancel := context.WithTimeout(ctx, withholdPatience)
	defer cancel()
	_ = r.options.Withhold(ctx, s.GPUs, "it is being reset: "+s.Reason) // fails when the daemon stops
}

// endHold ends the hold on GPUs.
func (r *Resets) endHold(ctx context.Context, gpus []string) {
	ctx, cancel := context.WithTimeout(ctx, withholdPatience)
	defer cancel()
	_ = r.options.Withhold(ctx, gpus, "") // fails when the daemon stops
}

// await withdraws the GPUs, and waits until nobody uses them. It returns the functions that release
// the GPUs for claims.
func (a *attempt) await(ctx context.Context, wait time.Duration) (releases []func(), err error) {
	began := time.Now()
	a.show(ctx, PhaseWaiting, "withdrawn from new pods")
	for {
		if err := a.options.May(); err != nil { // a roll-out has begun
			return nil, err
		}
		var users []string
		var unknown error
		releases = nil
		for _, g := range a.gpus {
			found, release, err := a.options.Reserve(ctx, g)
			if release != nil {
				releases = append(releases, release)
			}
			for _, u := range found {
				users = append(users, fmt.Sprintf("GPU %d by %s", g.Index, u))
			}
			unknown = errors.Join(unknown, err)
		}
		if len(users) == 0 && unknown == nil {
			return releases, nil
		}
		for _, release := range releases {
			release()
		}
		why := "in use: " + strings.Join(users, ", ")
		patience := wait
		if len(users) == 0 {
			why, patience = unknown.Error(), max(wait, usersPatience)
		}
		switch waited := time.Since(began); {
		case waited >= patience && wait == 0 && len(users) > 0:
			return nil, fmt.Errorf("%s; stop these first, or wait for them with --wait", why)
		case waited >= patience:
			return nil, fmt.Errorf("%s, for %v", why, waited.Round(time.Second))
		}
		if len(users) > 0 {
			why = "waits, " + why
		}
		a.show(ctx, PhaseWaiting, why)
		select {
		case <-time.After(queryInterval):
		case <-ctx.Done():
			return nil, errGivenUp
		}
	}
}

// reset resets the GPUs. Nobody uses them.
func (a *attempt) reset(ctx context.Context, ended func()) error {
	if err := a.note(ctx, PhaseResetting); err != nil {
		return NotTriedError{err}
	}
	a.show(ctx, PhaseResetting, "the driver is released, and nvidia-smi --gpu-reset runs")
	err := a.options.Run(ctx, a.gpus, ended)
	if err == nil || errors.Is(err, ErrHangs) {
		return err
	}
	var open []string
	for _, g := range a.gpus {
		for _, c := range a.options.Clients(g) {
			open = append(open, fmt.Sprintf("GPU %d by %s", g.Index, c))
		}
	}
	if len(open) > 0 {
		return fmt.Errorf("%w; open: %s; %s", err, strings.Join(open, ", "), remedy)
	}
	return fmt.Errorf("%w; %s", err, remedy)
}

// awaitHealth waits until the GPUs are Healthy after the reset. Otherwise the error has their
// state.
func (r *Resets) awaitHealth(ctx context.Context, gpus []inventory.GPU) error {
	late := time.After(healthPatience)
	for {
		s, changed := r.options.Snapshots.Latest()
		var bad []string
		for _, g := range gpus {
			now, there := s.GPU(g.UUID)
			switch {
			case !there:
				bad = append(bad, fmt.Sprintf("GPU %d is not there any more", g.Index))
			case now.Health.State != inventory.Healthy:
				bad = append(bad, fmt.Sprintf("GPU %d is %s: %s", g.Index, now.Health.State, now.Health.Reason))
			}
		}
		if len(bad) == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-late:
			return fmt.Errorf("after the reset, %s", strings.Join(bad, "; "))
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// selectGPUs returns the GPUs of a Snapshot with the given indexes or UUIDs.
func selectGPUs(s inventory.Snapshot, names []string) ([]inventory.GPU, error) {
	var gpus []inventory.GPU
	for _, name := range names {
		i := slices.IndexFunc(s.GPUs, func(g inventory.GPU) bool {
			return g.UUID == name || strconv.Itoa(g.Index) == name
		})
		switch {
		case i < 0:
			return nil, fmt.Errorf("--gpu: no GPU has the index or UUID %q; status lists them", name)
		case s.GPUs[i].Health.Remedy == inventory.RemedyReboot:
			return nil, fmt.Errorf("GPU %s needs a restart of its node, which a reset does not replace; nothing was "+
				"tried. GPU %[1]s is %s: %s", name, s.GPUs[i].Health.State,
				cmp.Or(s.GPUs[i].Health.Reason, "no reason is known"))
		case s.GPUs[i].BDF == "":
			return nil, fmt.Errorf("--gpu: the PCI address of GPU %s is not known", name)
		}
		if !slices.ContainsFunc(gpus, func(g inventory.GPU) bool { return g.UUID == s.GPUs[i].UUID }) {
			gpus = append(gpus, s.GPUs[i])
		}
	}
	if len(gpus) == 0 {
		return nil, errors.New("--gpu: name at least one GPU by its index or UUID")
	}
	return gpus, nil
}
