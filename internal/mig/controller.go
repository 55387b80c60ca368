package mig

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/eviction"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// Options are the parts of the daemon that a Controller uses.
type Options struct {
	Desired   *feed.Feed[DesiredLayout]
	Snapshots *feed.Feed[inventory.Snapshot]
	Driver    Driver
	// Holders is nil on a node without a kubelet: then only processes count as users.
	Holders kubelet.Holders
	// Refuse returns why the GPU must not be divided now; empty if it may. Refuse may be
	// nil.
	Refuse func(uuid string) string
	// Evictor is nil where pods are not evicted.
	Evictor Evictor
	// Pauser is nil where DaemonSets are not paused. Clients returns the processes that have
	// the GPU with a minor number open, and must be set if Pauser is set.
	Pauser  Pauser
	Clients func(minor int) ([]inventory.DriverClient, error)
	// StateDir is the directory of the journal.
	StateDir string
	// TakeOver is called in each Run before any change, to read the orders accepted by an
	// earlier process. It may be nil.
	TakeOver func(context.Context)
	// PreviousLeader returns an error naming the previous leader while the previous leader
	// may still change GPUs; nil afterwards. The Controller rereads the journal until then.
	// It may be nil.
	PreviousLeader func() error
	// Blocked returns another reason why no GPU may be changed now; nil if there is none. It may be
	// nil.
	Blocked func() error
	// Admit returns why a change to a layout must not begin now; nil if it may. A change that has
	// begun, and instances that a restart of the node removed, are not asked about. It may be nil.
	Admit func(layout string) error
	// BootID is the node's boot ID; empty if unknown.
	BootID string
}

// A Controller divides GPUs. Create it with New, and call Run once at a time.
//
// Run is one loop that starts reconciliations: at most one at a time for each GPU, and
// several GPUs in parallel. A reconciliation reads the division of the GPU, and changes it
// as far as possible. A change of the DesiredLayout or of the GPU starts a reconciliation,
// and a waiting reconciliation is repeated.
type Controller struct {
	options Options
	journal *journal
	status  *feed.Feed[Status]
	holds   *feed.Feed[map[string]resource.GPUHold]
	pulse   supervise.Pulse

	mu             sync.Mutex           // guards all following fields
	desired        DesiredLayout        // of the latest reconciliations
	journalChanges int                  // number of journal changes that the loop has handled
	gpus           map[string]*gpuState // by UUID
}

// A gpuState is the state of the Controller for one GPU.
type gpuState struct {
	gpuReport
	gpuSchedule
	gpuAttempts
}

// A gpuReport is the published state of a GPU, guarded by the Controller's lock.
type gpuReport struct {
	reported    GPU
	reportedFor *DesiredLayout // layout to which reported refers; nil before the first report
	hold        resource.GPUHold
	notBuiltIn  error // why the built-in layout does not exist for this GPU
	keepPaused  bool  // DaemonSets must stay paused
}

// A gpuSchedule says when a GPU is reconciled. The loop alone uses it.
type gpuSchedule struct {
	running        bool           // a reconciliation is in progress
	next           time.Time      // time of the next reconciliation; zero to wait for a change
	desired        *DesiredLayout // at the last reconciliation; nil before the first
	division       string         // divisionText at the last reconciliation
	journalChanges int            // at the last reconciliation
	failed         bool
}

// gpuAttempts are what the reconciliations of a GPU, one at a time, remember of each other.
type gpuAttempts struct {
	failures         int       // in a row
	dividedAt        time.Time // when the GPU last reached the DesiredLayout
	waitingSince     time.Time // start of the wait for users
	evictions        eviction.Evictions
	hasRun           bool      // at least one reconciliation has run
	driverInUse      bool      // the driver refused a change because the GPU is in use
	pausedSince      time.Time // when DaemonSets were paused; zero if they are not
	pauseEndedAt     time.Time // when the last pause was given up
	pauseRequestedAt time.Time // when the pause was last requested
	pauseError       error     // why DaemonSets cannot be paused
}

// New returns a Controller that does nothing until Run.
func New(o Options) *Controller {
	if o.Blocked == nil {
		o.Blocked = func() error { return nil }
	}
	if o.Admit == nil {
		o.Admit = func(string) error { return nil }
	}
	if o.PreviousLeader == nil {
		o.PreviousLeader = func() error { return nil }
	}
	if o.TakeOver == nil {
		o.TakeOver = func(context.Context) {}
	}
	return &Controller{
		options: o, journal: newJournal(o.StateDir, o.BootID), gpus: map[string]*gpuState{},
		status: feed.New(Status{}), holds: feed.New(map[string]resource.GPUHold{}), pulse: supervise.NewPulse(),
	}
}

// Status returns the feed of the Controller's status.
func (c *Controller) Status() *feed.Feed[Status] { return c.status }

// Holds returns the feed of holds on GPUs, by UUID. A GPU without an entry is not
// allocatable, because its wanted division is unknown. While Run does not run, the daemon
// may publish here the holds received from the process that divides GPUs.
func (c *Controller) Holds() *feed.Feed[map[string]resource.GPUHold] { return c.holds }

// Alive returns an error if Run completes no round before ctx ends. A hanging driver does not block
// the rounds.
func (c *Controller) Alive(ctx context.Context) error { return c.pulse.Check(ctx) }

// Run divides GPUs until ctx ends, and then returns nil. The next process, or the next Run
// of this process, reads the journal again and completes the changes in progress.
func (c *Controller) Run(ctx context.Context) error {
	c.mu.Lock()
	disk := c.journal.disk
	c.journal, c.gpus = newJournal(c.options.StateDir, c.options.BootID), map[string]*gpuState{}
	c.journal.disk = disk // the new journal waits for hanging calls of the old one
	c.mu.Unlock()
	var workers sync.WaitGroup
	defer workers.Wait()
	workers.Go(func() { c.journal.load(ctx, c.options) })
	results := make(chan result)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		desired, desiredChanged := c.options.Desired.Latest()
		snapshot, snapshotChanged := c.options.Snapshots.Latest()
		journalChanges, journalChanged := c.journal.changes.Latest()
		if snapshot.Generation > 0 && journalChanges > 0 {
			for _, r := range c.startDue(desired, snapshot, journalChanges) {
				workers.Go(func() {
					select {
					case results <- r.reconcile(ctx):
					case <-ctx.Done():
					}
				})
			}
		}
		c.setTimer(timer)
		select {
		case <-ctx.Done():
			return nil
		case c.pulse.Heartbeat() <- struct{}{}:
		case <-desiredChanged:
		case <-snapshotChanged:
		case <-journalChanged:
		case <-timer.C:
		case r := <-results:
			c.accept(r)
		}
	}
}

// startDue stores the latest inputs, and returns the reconciliations that are due.
func (c *Controller) startDue(desired DesiredLayout, snapshot inventory.Snapshot, journalChanges int) []*reconciler {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.desired, c.journalChanges = desired, journalChanges
	now := time.Now()
	var due []*reconciler
	for uuid, g := range c.gpus {
		if _, exists := snapshot.GPU(uuid); !exists && !g.running {
			delete(c.gpus, uuid)
		}
	}
	for _, found := range snapshot.GPUs {
		g := c.gpus[found.UUID]
		if g == nil {
			g = &gpuState{gpuReport: gpuReport{reported: GPU{UUID: found.UUID, Phase: PhaseUnknown}}}
			c.gpus[found.UUID] = g
		}
		g.reported.Index, g.reported.Model = found.Index, found.Model
		if found.MIG == inventory.MIGUnsupported {
			g.reported.Phase = PhaseKept
		}
		division := divisionText(found)
		changed := g.desired == nil || !reflect.DeepEqual(*g.desired, desired)
		unchanged := !changed && (g.failed || g.division == division) && g.journalChanges == journalChanges
		if g.running || found.MIG == inventory.MIGUnsupported || unchanged && (g.next.IsZero() || now.Before(g.next)) {
			continue
		}
		if changed {
			g.failures, g.dividedAt, g.waitingSince, g.driverInUse = 0, time.Time{}, time.Time{}, false
			g.evictions = eviction.Evictions{}
			g.pausedSince, g.pauseEndedAt, g.pauseRequestedAt = time.Time{}, time.Time{}, time.Time{}
		}
		g.running, g.desired, g.division, g.journalChanges = true, &desired, division, journalChanges
		due = append(due, &reconciler{Controller: c, GPU: g.reported, desired: desired, gpu: g})
	}
	c.publishLocked()
	return due
}

// divisionText returns a text that changes with the division of the GPU.
func divisionText(g inventory.GPU) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d %d %v", g.Index, g.Binding, g.MIG)
	for _, d := range g.MIGDevices {
		fmt.Fprintf(&b, " %s/%d/%d", d.UUID, d.GI, d.CI)
	}
	return b.String()
}

// accept handles the end of a reconciliation.
func (c *Controller) accept(r result) {
	c.mu.Lock()
	defer c.mu.Unlock()
	g := c.gpus[r.uuid]
	g.running, g.failed, g.next = false, r.failed, time.Time{}
	if r.after > 0 {
		g.next = time.Now().Add(r.after)
	}
}

// setTimer sets the timer to the next due reconciliation.
func (c *Controller) setTimer(timer *time.Timer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var next time.Time
	for _, g := range c.gpus {
		if !g.running {
			next = order.Earliest(next, g.next)
		}
	}
	if next.IsZero() {
		timer.Stop()
		return
	}
	timer.Reset(max(0, time.Until(next)))
}

// report publishes the progress of the GPU, and the hold on it.
func (r *reconciler) report(p Phase, reason string, hold resource.GPUHold) {
	paused := r.keepPaused(p)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.Phase, r.Reason, r.gpu.keepPaused = p, reason, paused
	before := r.gpu.reported
	r.gpu.reported, r.gpu.reportedFor, r.gpu.hold, r.gpu.notBuiltIn = r.GPU, &r.desired, hold, r.notBuiltIn
	r.gpu.reported.Holders = slices.Clone(r.Holders)
	r.gpu.reported.Index = before.Index
	if quiet := p == PhaseWaiting && len(r.Holders) == 0 ||
		p == PhaseKept; !quiet && (before.Phase != p || before.Reason != reason) {
		r.log.Info("MIG layout of a GPU", "gpu", r.UUID, "layout", r.desired.Layout, "phase", p, "reason", reason)
	}
	r.publishLocked()
}

// publishLocked publishes the holds and the Status that have changed.
func (c *Controller) publishLocked() {
	holds := map[string]resource.GPUHold{}
	before := c.holds.Value()
	for uuid, g := range c.gpus {
		switch hold, existed := before[uuid]; {
		case g.reported.Phase != PhaseUnknown:
			holds[uuid] = g.hold
		case existed: // as published by the previous process
			holds[uuid] = hold
		}
	}
	if !reflect.DeepEqual(holds, c.holds.Value()) {
		c.holds.Publish(holds)
	}
	if s := c.composeLocked(); !s.Equal(c.status.Value()) {
		c.status.Publish(s)
	}
}

// composeLocked returns the Status.
func (c *Controller) composeLocked() Status {
	s := Status{Layout: c.desired.Layout, OrderNumber: c.desired.OrderNumber}
	read := func(g *gpuState) bool { return g.notBuiltIn == nil && g.reported.Phase != PhaseUnknown }
	s.Resume = c.journalChanges > 0 && !errors.Is(c.journal.writable(), errPreviousLeader)
	known := slices.ContainsFunc(c.allLocked(), read)
	for _, g := range c.allLocked() {
		shown := g.reported
		if g.reportedFor == nil || !reflect.DeepEqual(*g.reportedFor, c.desired) {
			reason := ""
			if shown.Phase == PhaseChanging {
				reason = "a step of the previous layout is still in progress"
			}
			shown.Phase, shown.Reason = PhaseUnknown, reason
		}
		s.Resume = s.Resume && shown.Phase != PhaseUnknown && !g.keepPaused
		if known && g.notBuiltIn != nil && shown.Phase == PhaseFailed && g.hold.Reason == "" {
			shown.Phase = PhaseKept // the layout is for other models
		}
		s.GPUs = append(s.GPUs, shown)
	}
	if s.Layout == "" {
		return s
	}
	for _, of := range []struct {
		state  ConfigState
		phases []Phase
	}{
		{StatePending, []Phase{PhaseUnknown, PhaseChanging}},
		{StateFailed, []Phase{PhaseFailed}},
		{StateRebooting, []Phase{PhaseReset}},
		{StatePending, []Phase{PhaseWaiting}},
	} {
		var reasons []string             // each once
		indexes := map[string][]string{} // indexes of GPUs by reason
		for _, g := range s.GPUs {
			if slices.Contains(of.phases, g.Phase) {
				reason := cmp.Or(g.Reason, string(g.Phase))
				if indexes[reason] == nil {
					reasons = append(reasons, reason)
				}
				indexes[reason] = append(indexes[reason], strconv.Itoa(g.Index))
			}
		}
		if len(reasons) > 0 {
			for i, reason := range reasons {
				reasons[i] = "GPU " + strings.Join(indexes[reason], ", ") + ": " + reason
			}
			s.State, s.Reason = of.state, strings.Join(reasons, "; ")
			return s
		}
	}
	var changes []layout.GPUChange
	for _, g := range s.GPUs {
		if len(c.desired.GPUs) == 0 { // a user who names GPUs has seen the plan for them
			changes = append(changes, g.Change)
		}
	}
	if s.State, s.Reason = StateSuccess, layout.Unmatched(s.Layout, c.desired.File, changes); s.Reason != "" {
		s.State = StateFailed
	}
	return s
}

// allLocked returns the GPUs that support MIG, by index.
func (c *Controller) allLocked() []*gpuState {
	var all []*gpuState
	for _, g := range c.gpus {
		if g.desired != nil || g.reported.Phase == PhaseUnknown {
			all = append(all, g)
		}
	}
	slices.SortFunc(all, func(a, b *gpuState) int {
		return cmp.Or(cmp.Compare(a.reported.Index, b.reported.Index),
			strings.Compare(a.reported.UUID, b.reported.UUID))
	})
	return all
}

// concerns reports whether the layout is meant for a GPU.
func (w DesiredLayout) concerns(g GPU) bool {
	return w.Layout != "" && (len(w.GPUs) == 0 || slices.Contains(w.GPUs, g.UUID) ||
		slices.Contains(w.GPUs, strconv.Itoa(g.Index)))
}

// holders returns the names of users, for messages.
func holders(all []Holder) string {
	names := make([]string, len(all))
	for i, h := range all {
		switch {
		case h.PID != 0:
			names[i] = fmt.Sprintf("process %d", h.PID)
			if h.Name != "" {
				names[i] += " (" + h.Name + ")"
			}
		case h.Pod.Name != "":
			names[i] = "pod " + h.Pod.Namespace + "/" + h.Pod.Name
		default:
			names[i] = "pod with UID " + h.Pod.UID
		}
	}
	return strings.Join(slices.Compact(names), ", ")
}
