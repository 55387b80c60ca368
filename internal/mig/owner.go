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

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// Options are the parts of the daemon that an Owner uses.
type Options struct {
	Wishes    *feed.Feed[Wish]
	Snapshots *feed.Feed[inventory.Snapshot]
	Driver    Driver
	// Users is nil where there is no kubelet: then processes alone count.
	Users Users
	// Refuse says why a GPU, by UUID, is not divided as the Wish says now; empty if it may be. It may
	// be nil.
	Refuse func(uuid string) string
	// Evictor is nil where pods are not evicted.
	Evictor Evictor
	// Pauser is nil where DaemonSets are not paused. Clients returns the processes that have the GPU
	// with a minor number open; it is not nil where Pauser is not.
	Pauser  Pauser
	Clients func(minor int) ([]inventory.DriverClient, error)
	// StateDir is where the journal is kept.
	StateDir string
	// Begins is called in each Run before anything is changed: this process then takes up the orders
	// that an earlier process got. It may be nil.
	Begins func(context.Context)
	// Former says which process that led before may still change GPUs; nil if none may. The journal
	// is read until then. It may be nil.
	Former func() error
	// Held says why no GPU may be changed now for another reason; nil if there is none. It may be nil.
	Held func() error
	// BootID is the node's boot ID; empty if it is not known.
	BootID string
}

// An Owner divides GPUs. Make it with New, and call Run once.
//
// Run is one loop. Each GPU is worked on in turns. A GPU has one turn at a time; turns of several
// GPUs run beside each other. A turn reads how the GPU is divided, and goes from there as far as it
// can. It begins when the Wish or the GPU has changed, and is repeated while something is waited
// for.
type Owner struct {
	options Options
	journal *journal
	status  *feed.Feed[Status]
	holds   *feed.Feed[map[string]resource.GPUHold]
	pulse   supervise.Pulse

	mu   sync.Mutex           // guards all following fields
	wish Wish                 // that of the latest turns
	news int                  // of the journal, that they know
	gpus map[string]*ownedGPU // by UUID
}

// An ownedGPU is what an Owner keeps of a GPU.
type ownedGPU struct {
	// What is shown, under the Owner's lock.
	shown   GPU
	about   *Wish // that shown is about; nil before the first
	hold    resource.GPUHold
	unknown error // why the built-in layout is not found with this GPU alone
	pausing bool  // DaemonSets have to stay paused

	// The loop's.
	busy   bool      // a turn is under way
	due    time.Time // when the next one is; zero for when something changes
	wish   *Wish     // of the last turn; nil before the first
	look   string    // how the Snapshot showed the GPU at the last turn
	news   int       // of the journal at the last turn
	failed bool

	// The turns', one after the other.
	failures int       // in a row
	made     time.Time // when the GPU was last divided for this Wish
	waiting  time.Time // since when users are waited for
	told     map[Pod]eviction
	ran      bool      // there was a turn
	blocked  bool      // the driver said that the GPU is in use
	paused   time.Time // since when DaemonSets are to be paused; zero if they are not
	gaveUp   time.Time // when that was given up last
	asked    time.Time // when it was last asked for
	refused  error     // why they cannot be paused
}

// New returns an Owner that does nothing yet.
func New(o Options) *Owner {
	if o.Held == nil {
		o.Held = func() error { return nil }
	}
	if o.Former == nil {
		o.Former = func() error { return nil }
	}
	if o.Begins == nil {
		o.Begins = func(context.Context) {}
	}
	return &Owner{
		options: o, journal: newJournal(o.StateDir, o.BootID), gpus: map[string]*ownedGPU{},
		status: feed.New(Status{}), holds: feed.New(map[string]resource.GPUHold{}), pulse: supervise.NewPulse(),
	}
}

// Status returns the feed of the owner's state.
func (o *Owner) Status() *feed.Feed[Status] { return o.status }

// Holds returns the feed of holds on GPUs, by UUID. A GPU without an entry is not given out: it is
// not known yet how it is to be divided. While Run does not run, others may publish there what the
// process tells that divides GPUs.
func (o *Owner) Holds() *feed.Feed[map[string]resource.GPUHold] { return o.holds }

// Alive returns an error if Run makes no round before ctx ends. A driver that hangs does not keep
// it from that.
func (o *Owner) Alive(ctx context.Context) error { return o.pulse.Check(ctx) }

// Run divides GPUs as the Wish says until ctx ends, and then returns nil. The next process, or the
// next Run of this one, goes on with what is under way then: it reads the notes anew.
func (o *Owner) Run(ctx context.Context) error {
	o.mu.Lock()
	disk := o.journal.disk
	o.journal, o.gpus = newJournal(o.options.StateDir, o.options.BootID), map[string]*ownedGPU{}
	o.journal.disk = disk // what hangs there is waited for
	o.mu.Unlock()
	var turns sync.WaitGroup
	defer turns.Wait()
	turns.Go(func() { o.journal.load(ctx, o.options) })
	ends := make(chan outcome)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		wish, wished := o.options.Wishes.Latest()
		snapshot, looked := o.options.Snapshots.Latest()
		news, noted := o.journal.news.Latest()
		if snapshot.Generation > 0 && news > 0 {
			for _, t := range o.begin(wish, snapshot, news) {
				turns.Go(func() {
					select {
					case ends <- t.run(ctx):
					case <-ctx.Done():
					}
				})
			}
		}
		o.rest(timer)
		select {
		case <-ctx.Done():
			return nil
		case o.pulse.Beat() <- struct{}{}:
		case <-wished:
		case <-looked:
		case <-noted:
		case <-timer.C:
		case end := <-ends:
			o.end(end)
		}
	}
}

// begin takes in the Wish, the Snapshot and how often the journal has changed, and returns the
// turns that are due.
func (o *Owner) begin(wish Wish, snapshot inventory.Snapshot, news int) []*turn {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.wish, o.news = wish, news
	now := time.Now()
	var turns []*turn
	for uuid, g := range o.gpus {
		if _, there := snapshot.GPU(uuid); !there && !g.busy {
			delete(o.gpus, uuid)
		}
	}
	for _, found := range snapshot.GPUs {
		g := o.gpus[found.UUID]
		if g == nil {
			g = &ownedGPU{shown: GPU{UUID: found.UUID, Phase: PhaseUnknown}}
			o.gpus[found.UUID] = g
		}
		g.shown.Index, g.shown.Model = found.Index, found.Model
		if found.MIG == inventory.MIGUnsupported {
			g.shown.Phase = PhaseKept
		}
		look := lookOf(found)
		changed := g.wish == nil || !reflect.DeepEqual(*g.wish, wish)
		same := !changed && (g.failed || g.look == look) && g.news == news
		if g.busy || found.MIG == inventory.MIGUnsupported || same && (g.due.IsZero() || now.Before(g.due)) {
			continue
		}
		if changed {
			g.failures, g.made, g.waiting, g.told = 0, time.Time{}, time.Time{}, nil
			g.blocked, g.paused, g.gaveUp, g.asked = false, time.Time{}, time.Time{}, time.Time{}
		}
		g.busy, g.wish, g.look, g.news = true, &wish, look, news
		turns = append(turns, &turn{Owner: o, GPU: g.shown, wish: wish, gpu: g})
	}
	o.publishLocked()
	return turns
}

// lookOf returns a text that differs where a GPU is divided in another way.
func lookOf(g inventory.GPU) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d %d %v", g.Index, g.Binding, g.MIG)
	for _, d := range g.MIGDevices {
		fmt.Fprintf(&b, " %s/%d/%d", d.UUID, d.GI, d.CI)
	}
	return b.String()
}

// end takes in the end of a turn.
func (o *Owner) end(end outcome) {
	o.mu.Lock()
	defer o.mu.Unlock()
	g := o.gpus[end.uuid]
	g.busy, g.failed, g.due = false, end.failed, time.Time{}
	if end.again > 0 {
		g.due = time.Now().Add(end.again)
	}
}

// rest sets the timer to when the next turn is due.
func (o *Owner) rest(timer *time.Timer) {
	o.mu.Lock()
	defer o.mu.Unlock()
	var next time.Time
	for _, g := range o.gpus {
		if !g.busy && !g.due.IsZero() && (next.IsZero() || g.due.Before(next)) {
			next = g.due
		}
	}
	if next.IsZero() {
		timer.Stop()
		return
	}
	timer.Reset(max(0, time.Until(next)))
}

// show publishes how far a turn's GPU is, and the hold on it.
func (t *turn) show(p Phase, reason string, hold resource.GPUHold) {
	pausing := t.pausing(p)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.Phase, t.Reason, t.gpu.pausing = p, reason, pausing
	before := t.gpu.shown
	t.gpu.shown, t.gpu.about, t.gpu.hold, t.gpu.unknown = t.GPU, &t.wish, hold, t.unknown
	t.gpu.shown.Holders = slices.Clone(t.Holders)
	t.gpu.shown.Index = before.Index
	if quiet := p == PhaseWaiting && len(t.Holders) == 0 ||
		p == PhaseKept; !quiet && (before.Phase != p || before.Reason != reason) {
		t.log.Info("MIG layout of a GPU", "gpu", t.UUID, "layout", t.wish.Layout, "phase", p, "reason", reason)
	}
	t.publishLocked()
}

// publishLocked publishes what has changed.
func (o *Owner) publishLocked() {
	holds := map[string]resource.GPUHold{}
	before := o.holds.Value()
	for uuid, g := range o.gpus {
		switch hold, was := before[uuid]; {
		case g.shown.Phase != PhaseUnknown:
			holds[uuid] = g.hold
		case was: // as the process before this one told
			holds[uuid] = hold
		}
	}
	if !reflect.DeepEqual(holds, o.holds.Value()) {
		o.holds.Publish(holds)
	}
	if s := o.composeLocked(); !s.Equal(o.status.Value()) {
		o.status.Publish(s)
	}
}

// composeLocked returns the Status.
func (o *Owner) composeLocked() Status {
	s := Status{Layout: o.wish.Layout, Again: o.wish.Again}
	read := func(g *ownedGPU) bool { return g.unknown == nil && g.shown.Phase != PhaseUnknown }
	s.Resume = o.news > 0 && !errors.Is(o.journal.writable(), errFormer)
	known := slices.ContainsFunc(o.allLocked(), read)
	for _, g := range o.allLocked() {
		shown := g.shown
		if g.about == nil || !reflect.DeepEqual(*g.about, o.wish) {
			reason := ""
			if shown.Phase == PhaseChanging {
				reason = "a step for the last layout has not ended"
			}
			shown.Phase, shown.Reason = PhaseUnknown, reason
		}
		s.Resume = s.Resume && shown.Phase != PhaseUnknown && !g.pausing
		if known && g.unknown != nil && shown.Phase == PhaseFailed && g.hold.Reason == "" {
			shown.Phase = PhaseKept // the layout is one of other models
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
		indexes := map[string][]string{} // of the GPUs, by reason
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
		if len(o.wish.GPUs) == 0 { // whoever names GPUs has seen the plan for them
			changes = append(changes, g.Change)
		}
	}
	if s.State, s.Reason = StateSuccess, layout.Unmatched(s.Layout, o.wish.File, changes); s.Reason != "" {
		s.State = StateFailed
	}
	return s
}

// allLocked returns the GPUs that have multi-instance mode, by index.
func (o *Owner) allLocked() []*ownedGPU {
	var all []*ownedGPU
	for _, g := range o.gpus {
		if g.wish != nil || g.shown.Phase == PhaseUnknown {
			all = append(all, g)
		}
	}
	slices.SortFunc(all, func(a, b *ownedGPU) int {
		return cmp.Or(cmp.Compare(a.shown.Index, b.shown.Index), strings.Compare(a.shown.UUID, b.shown.UUID))
	})
	return all
}

// concerns says whether a Wish is about a GPU.
func (w Wish) concerns(g GPU) bool {
	return w.Layout != "" && (len(w.GPUs) == 0 || slices.Contains(w.GPUs, g.UUID) ||
		slices.Contains(w.GPUs, strconv.Itoa(g.Index)))
}

// holders names users.
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
