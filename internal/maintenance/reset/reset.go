// Package reset is the owner of the resets of GPUs that an operator asks for: GPUs are withdrawn,
// their users are waited for or named, the driver's own program resets them while nobody of this
// process has the driver open, and they are judged anew.
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
	// askEvery is how often the users of the GPUs are asked for.
	askEvery = time.Second
	// soonFor is how long it may stay unknown who uses a GPU: kubelet reads the list in which it is
	// withdrawn, and tells of pods that it has just admitted.
	soonFor = 15 * time.Second
	// judgedWithin is how long it is waited for the verdict on GPUs that were reset.
	judgedWithin = 30 * time.Second
	// withholdPatience is how long it is waited for the monitor, which answers at once unless the
	// daemon ends.
	withholdPatience = 2 * time.Second
	// remedy ends the sentence about a reset that others are in the way of.
	remedy = "a reset needs that nothing has the GPU open: end its processes; nvidia-persistenced, DCGM and Fabric Manager may have it " +
		"open, and so has the kernel module nvidia_drm"
)

// Options are the parts of the daemon that Resets use.
type Options struct {
	Snapshots *feed.Feed[inventory.Snapshot]
	// Withhold has GPUs, by UUID, not be given to new pods, for a reason; with an empty one they are
	// judged as before.
	Withhold func(ctx context.Context, gpus []string, reason string) error
	// Reserve keeps claims from a GPU until release is called, and returns the users of the GPU, in
	// words for people. release is nil if the GPU may be in use. The error says why the users are not
	// known.
	Reserve func(ctx context.Context, gpu inventory.GPU) (users []string, release func(), err error)
	// Clients returns who has a GPU open, in words for people, as far as this process sees it.
	Clients func(gpu inventory.GPU) []string
	// Run resets GPUs while this process has released the driver, if May allows it then. It returns in
	// bounded time, with context.Canceled when the daemon ends. When the error wraps ErrHangs, ended
	// is called once the reset has ended.
	Run func(ctx context.Context, gpus []inventory.GPU, ended func()) error
	// May returns why this process may not reset GPUs now; nil if it may.
	May func() error
	// PreviousLeader returns the process, in words for people, that led before and may still reset
	// GPUs; empty if there is none. The channel is closed when the answer may have changed.
	PreviousLeader func() (who string, changed <-chan struct{})
	// StateDir is where it is noted that GPUs are being reset; empty for nowhere. BootID is the boot
	// ID of the node.
	StateDir, BootID string
	// Write writes the note to a path, within any time; nil is statefile.WriteState.
	Write func(path string, v any) error
}

// ErrHangs is wrapped by the error of a reset that goes on although it was ended.
var ErrHangs = errors.New("the reset does not end")

// errGivenUp is the error of a reset that nobody waits for any more.
var errGivenUp = errors.New("it was given up before the driver was released")

// errBusy is the error of a reset while another one is under way.
var errBusy = errors.New("another reset is under way on this node: status shows it; ask again when it has ended")

// Phase is how far a reset is.
type Phase string

// The phases.
const (
	PhaseWaiting     Phase = "waiting"     // for those who use the GPUs
	PhaseResetting   Phase = "resetting"   // the driver's program runs
	PhaseHangs       Phase = "hangs"       // that cannot be ended; the GPUs stay withdrawn until it has
	PhaseDone        Phase = "done"        // the GPUs were reset
	PhaseFailed      Phase = "failed"      // they were not
	PhaseInterrupted Phase = "interrupted" // the process that reset them ended before, or does not lead any more
)

// Status is the last reset; of none, Phase is empty.
type Status struct {
	// GPUs are the UUIDs.
	GPUs  []string
	Phase Phase
	// Since is when the reset was asked for.
	Since time.Time
	// Reason is a sentence without a full stop: what is waited for, or what failed.
	Reason string
}

// Resets reset GPUs, those of one request at a time. New makes one; Run ends what an earlier
// process left.
type Resets struct {
	options Options
	disk    *statefile.Disk
	noted   atomic.Pointer[record] // what the file is to say; nil for no file
	status  *feed.Feed[Status]
	busy    sync.Mutex // held while a reset is under way
}

// New returns Resets that have reset nothing yet.
func New(o Options) *Resets {
	if o.Write == nil {
		o.Write = statefile.WriteState
	}
	return &Resets{options: o, disk: statefile.NewDisk(), status: feed.New(Status{})}
}

// Status is the feed of the last reset.
func (r *Resets) Status() *feed.Feed[Status] { return r.status }

// Withheld returns why a GPU, by UUID, may not be given to a pod: it is being reset. It is nil
// where it may be.
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

// An Order is what an operator asks for.
type Order struct {
	// GPUs are indexes and UUIDs; at least one. Those of a request are reset together.
	GPUs []string
	// Wait is how long it is waited for those who use the GPUs; 0 for not at all.
	Wait time.Duration
}

// Reset resets GPUs, and tells how far it is, in sentences. The error is why they were not reset,
// or are still not Healthy afterwards. When ctx ends before the driver is released, nothing is
// reset; later the reset goes on, and Status tells how it ends.
func (r *Resets) Reset(ctx context.Context, q Order, tell func(string)) error {
	gpus, err := selected(r.options.Snapshots.Value(), q.GPUs)
	if err != nil {
		return err
	}
	if err := r.options.May(); err != nil {
		return err
	}
	if !r.busy.TryLock() {
		return errBusy
	}
	a := &attempt{Resets: r, gpus: gpus, status: Status{Since: time.Now()}, tells: make(chan string), gone: ctx.Done()}
	for _, g := range gpus {
		a.status.GPUs = append(a.status.GPUs, g.UUID)
	}
	if err := a.note(ctx, PhaseWaiting); err != nil {
		r.busy.Unlock()
		return err
	}
	outcome := make(chan error, 1)
	waiting, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	go func() { // it goes on when nobody waits for it any more
		defer cancel()
		a.run(waiting, q.Wait, func() bool { return ctx.Err() == nil && stop() }, outcome)
	}()
	for {
		select {
		case text := <-a.tells:
			tell(text)
		case err := <-outcome:
			if err != nil {
				return err
			}
			return r.judged(ctx, gpus)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// An attempt is one reset.
type attempt struct {
	*Resets
	gpus   []inventory.GPU
	status Status
	told   string          // last
	tells  chan string     // what the operator is told
	gone   <-chan struct{} // closed when nobody is told any more
}

// run waits for the users until ctx ends, and resets the GPUs. Keep has the end of ctx not count
// any more; it reports false if it ended before. The outcome is sent as soon as it is known: a
// reset that cannot be ended is waited for after it.
func (a *attempt) run(ctx context.Context, wait time.Duration, keep func() bool, outcome chan<- error) {
	always := context.WithoutCancel(ctx)
	over := make(chan struct{})
	releases, err := a.await(ctx, wait)
	if err == nil && !keep() {
		err = errGivenUp
	}
	if err == nil {
		err = a.reset(always, func() { close(over) })
	}
	for _, release := range releases {
		release()
	}
	switch {
	case err == nil:
		a.end(always, PhaseDone, "")
	case errors.Is(err, context.Canceled): // the daemon ends; the next one finds the note
	case errors.Is(err, ErrHangs):
		a.show(always, PhaseHangs, err.Error())
		outcome <- err
		<-over
		a.end(always, PhaseFailed, "nvidia-smi has ended after a long time: it is not known whether the GPUs were reset")
		return
	default:
		a.end(always, PhaseFailed, err.Error())
	}
	outcome <- err
}

// show publishes how far the reset is. The GPUs are withdrawn.
func (a *attempt) show(ctx context.Context, p Phase, reason string) {
	a.status.Phase, a.status.Reason = p, reason
	a.withdraw(ctx, a.status)
	if a.told == reason || p == PhaseHangs {
		return
	}
	a.told = reason
	select {
	case a.tells <- reason:
	case <-a.gone:
	}
}

// end publishes how the reset ended. The GPUs are judged as before. The note goes first: a process
// that has got the lead meanwhile reads it once this one resets nothing any more.
func (a *attempt) end(ctx context.Context, p Phase, reason string) {
	klog.FromContext(ctx).Info("A reset of GPUs has ended", "gpus", a.status.GPUs, "phase", p, "reason", reason)
	if err := a.forget(ctx); err != nil {
		klog.FromContext(ctx).Info("Cannot remove the note of a reset; the next start shows it as interrupted", "reason",
			err.Error())
	}
	a.status.Phase, a.status.Reason = p, reason
	a.Resets.status.Publish(a.status)
	a.giveBack(ctx, a.status.GPUs)
	a.busy.Unlock()
}

// withdraw publishes how far a reset is, and has its GPUs not be given to new pods.
func (r *Resets) withdraw(ctx context.Context, s Status) {
	r.status.Publish(s)
	ctx, cancel := context.WithTimeout(ctx, withholdPatience)
	defer cancel()
	_ = r.options.Withhold(ctx, s.GPUs, "it is being reset: "+s.Reason) // it fails when the daemon ends
}

// giveBack has GPUs be judged as before.
func (r *Resets) giveBack(ctx context.Context, gpus []string) {
	ctx, cancel := context.WithTimeout(ctx, withholdPatience)
	defer cancel()
	_ = r.options.Withhold(ctx, gpus, "") // it fails when the daemon ends
}

// await withdraws the GPUs, and waits until nobody uses them. It returns what lets claims have them
// again.
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
			why, patience = unknown.Error(), max(wait, soonFor)
		}
		switch waited := time.Since(began); {
		case waited >= patience && wait == 0 && len(users) > 0:
			return nil, fmt.Errorf("%s; end these first, or wait for them with --wait", why)
		case waited >= patience:
			return nil, fmt.Errorf("%s, for %v", why, waited.Round(time.Second))
		}
		if len(users) > 0 {
			why = "waits, " + why
		}
		a.show(ctx, PhaseWaiting, why)
		select {
		case <-time.After(askEvery):
		case <-ctx.Done():
			return nil, errGivenUp
		}
	}
}

// reset resets the GPUs, which nobody uses.
func (a *attempt) reset(ctx context.Context, ended func()) error {
	if err := a.note(ctx, PhaseResetting); err != nil {
		return err
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

// judged waits until GPUs that were reset are Healthy. The error says what they are otherwise.
func (r *Resets) judged(ctx context.Context, gpus []inventory.GPU) error {
	late := time.After(judgedWithin)
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

// selected returns the GPUs of a Snapshot with the given indexes or UUIDs.
func selected(s inventory.Snapshot, names []string) ([]inventory.GPU, error) {
	var gpus []inventory.GPU
	for _, name := range names {
		i := slices.IndexFunc(s.GPUs, func(g inventory.GPU) bool { return g.UUID == name || strconv.Itoa(g.Index) == name })
		switch {
		case i < 0:
			return nil, fmt.Errorf("--gpu: no GPU has the index or UUID %q; status lists them", name)
		case s.GPUs[i].Health.Remedy == inventory.RemedyReboot:
			return nil, fmt.Errorf("GPU %s needs a restart of its node, which a reset does not replace; nothing was tried. "+
				"GPU %[1]s is %s: %s", name, s.GPUs[i].Health.State, cmp.Or(s.GPUs[i].Health.Reason, "no reason is known"))
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
