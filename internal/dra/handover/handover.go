// Package handover moves GPUs between the device plugin and the driver for Dynamic Resource
// Allocation. Its Arbiter decides by which of the two ways a GPU is given to pods, and gathers the
// evidence for that: package dra has the rules. Its Devices has the devices of the GPUs that shall
// be in ResourceSlices, and knows which of these may be at the API server.
//
// Package daemon builds both, and others read their feeds.
package handover

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const (
	// askInterval is the pace at which kubelet is asked whether pods hold GPUs that leave the device
	// plugin.
	askInterval = time.Second
	// listFirst and listMost are the times between two lists of the claims of the cluster, the first
	// and the longest.
	listFirst, listMost = 2 * time.Second, 15 * time.Second
	// claimGrace is how long a GPU must be in no record, with a taint in its slice and then in no
	// slice, where claims are not listed. Kubelet gives a call of the driver 45 s.
	claimGrace = time.Minute
	// driverGrace is how long the kubelet must have been without a driver for claims before its
	// account of them counts, as long as its accounts of devices must have named no holder.
	driverGrace = 10 * time.Second
)

// The sentences about GPUs that come back from slices in a process that is no driver. The second
// one follows a reason.
const (
	inGrace = "it was given by claims before; the device plugin gets it when the kubelet has had no driver for claims for 10s and names no " +
		"claim that has it"
	// WayBack is what an operator can do about a GPU that does not come back by itself.
	WayBack = "to release it, run the driver until no claim has it: helm upgrade gpu-device-plugin … --reset-then-reuse-values " +
		"--set dra.enabled=true --set dra.mode=plugin"
)

// ErrNotListed is the error of a list of claims that is not made: this program has no right to it,
// or it would be too large.
var ErrNotListed = errors.New("the ResourceClaims of the cluster are not listed")

// Users knows which pods hold devices of the device plugin.
type Users interface {
	// Users returns which pods hold the given GPUs or MIG devices, by UUID. If the error is nil, no
	// other pod holds one, and no pod gets one while they are in no list.
	Users(ctx context.Context, uuids []string) ([]kubelet.HeldDevice, error)
}

// Options are the parts of the daemon that an Arbiter uses.
type Options struct {
	// Devices have the owners that the Arbiter publishes, and which GPUs may be in a slice at the API
	// server. The Arbiter also uses their configurations and Snapshots.
	Devices *Devices
	// Users is nil where there is no kubelet: then no pod holds a device.
	Users Users
	// Offered are the owners by which the lists of the device plugin were last made.
	Offered *feed.Feed[dra.Owners]
	// Beside reports whether another process of this program serves kubelet, too. It also returns a
	// channel that is closed when that may have changed. Nil means that there is no such process. As
	// long as one does, no GPU goes from the device plugin to a slice: that process may have it in its
	// list.
	Beside func() (bool, <-chan struct{})
	// Records are the claims that are prepared, by the UUID of the GPU; nil as long as they are not
	// known.
	Records *feed.Feed[map[string][]claims.Holder]
	// List says which claims of the cluster have devices of some GPUs of this node, by UUID: it
	// returns their names, "NAMESPACE/NAME", by the UUID of the GPU. The error says why they are not
	// known. If it is ErrNotListed, there may be others beside those that are returned. It is not
	// called again before it returns. A process without the function has Driverless.
	List func(ctx context.Context, gpus []string) (map[string][]string, error)
	// Driverless reports whether no claim can be prepared on this node, because this process does
	// not offer the driver to the kubelet: it has no client of the API server, or not the kubelet's
	// folder for that. Nil means that it does. The process then goes by the kubelet's account of
	// claims, and not by the API server.
	Driverless func() bool
	// Prepared says which claims have devices of some GPUs by the kubelet's account, as List does.
	// It is nil without Driverless.
	Prepared func(ctx context.Context, gpus []string) (map[string][]string, error)
	// Clock is the clock for all waits; nil means the real one.
	Clock clock.WithTicker
}

// An ownedGPU is an Arbiter's record of a GPU.
type ownedGPU struct {
	dra.OwnerFacts
	epoch uint64    // rises with what the evidence below is about
	since time.Time // of the epoch
	wait  string
	late  bool // in no slice, and yet the API server has a claim with it
	// answered says that the evidence was asked for: if the GPU stays, it is known why.
	answered bool
}

// An Arbiter decides about the owners of GPUs. Make it with New; Run is its one life.
type Arbiter struct {
	options Options
	waits   *feed.Feed[map[string]string]
	pulse   supervise.Pulse
	gpus    map[string]*ownedGPU // by UUID; the loop's
	// driverless is since when no claim can be prepared, and no other process of this program is
	// there; zero otherwise. The loop's.
	driverless time.Time
	returning  atomic.Bool         // GPUs come back from slices within seconds
	said       map[string][]string // the GPUs that wait, by the reason, as it was logged; the loop's
}

// New returns an Arbiter that has not decided anything.
func New(o Options) *Arbiter {
	o.Clock = cmp.Or[clock.WithTicker](o.Clock, clock.RealClock{})
	return &Arbiter{options: o, waits: feed.New(map[string]string(nil)), pulse: supervise.NewPulse(),
		gpus: map[string]*ownedGPU{}}
}

// Waits returns the feed of the reasons why GPUs wait for their new owner, by UUID: sentences
// without a full stop.
func (a *Arbiter) Waits() *feed.Feed[map[string]string] { return a.waits }

// Returning reports whether GPUs are about to come back from slices by the kubelet's account: the
// outcome is known within a minute of the start.
func (a *Arbiter) Returning() bool { return a.returning.Load() }

// Alive returns an error if Run makes no round before ctx ends.
func (a *Arbiter) Alive(ctx context.Context) error { return a.pulse.Check(ctx) }

// evidence is what a question has told of GPUs, each in its epoch.
type evidence struct {
	epochs map[string]uint64
	// has says of each GPU who has it; a GPU without an entry is nobody's.
	has    map[string]string
	err    error
	claims bool // it is about claims, not about the device plugin
}

// Run decides until ctx ends, and then returns nil. It begins without decisions, and decides by
// evidence alone: another process may have decided before.
func (a *Arbiter) Run(ctx context.Context) error {
	clear(a.gpus)
	a.driverless = time.Time{}
	grace := a.options.Clock.NewTimer(driverGrace)
	defer grace.Stop()
	asking := newPoller(a.options.Clock, askInterval, askInterval)
	listing := newPoller(a.options.Clock, listFirst, listMost)
	for {
		c, configured := a.options.Devices.o.Configs.Latest()
		snapshot, looked := a.options.Devices.o.Snapshots.Latest()
		offered, listed := a.options.Offered.Latest()
		published, changed := a.options.Devices.published.Latest()
		records, prepared := a.options.Records.Latest()
		beside, alone := a.beside()
		a.noteDriver(beside, grace)
		if beside {
			for uuid := range a.leaving(offered) {
				a.gpus[uuid].wait = "another process of this program serves kubelet, too, as in a roll-out"
			}
		}
		switch {
		case snapshot.Generation == 0:
		case published == nil:
			a.wait(snapshot, "the state directory has not told yet which GPUs are in slices")
		case records == nil:
			a.wait(snapshot, "the state directory has not told yet which claims are prepared")
		default:
			a.decide(ctx, c, snapshot, published, records)
		}
		leaving := a.leaving(offered)
		if beside {
			leaving = nil
		}
		asking.start(ctx, leaving, a.askKubelet(snapshot))
		listing.start(ctx, a.unclaimed(published), a.listClaims())
		select {
		case <-ctx.Done():
			asking.wait()
			listing.wait()
			return nil
		case a.pulse.Heartbeat() <- struct{}{}:
		case <-configured:
		case <-looked:
		case <-listed:
		case <-changed:
		case <-prepared:
		case <-alone:
		case <-grace.C():
		case <-asking.due():
			asking.ready = true
		case <-listing.due():
			listing.ready = true
		case end := <-asking.answers:
			a.take(asking.end(end))
		case end := <-listing.answers:
			a.take(listing.end(end))
		}
	}
}

// noteDriver notes since when no claim can be prepared on the node. The timer fires when the
// kubelet's account begins to count.
func (a *Arbiter) noteDriver(beside bool, grace clock.Timer) {
	switch driverless := a.options.Driverless != nil && a.options.Driverless() && !beside; {
	case !driverless:
		a.driverless = time.Time{}
	case a.driverless.IsZero():
		a.driverless = a.options.Clock.Now()
		grace.Reset(driverGrace)
		for _, g := range a.gpus {
			if g.Before == dra.LeavesDRA || g.Before == dra.OwnedByNobody {
				a.renew(g) // what was asked before says nothing of the kubelet's account
			}
		}
	}
}

// inGrace reports whether the kubelet's account does not count yet.
func (a *Arbiter) inGrace() bool {
	return !a.driverless.IsZero() && a.options.Clock.Since(a.driverless) < driverGrace
}

// beside returns what Options.Beside returns; false and nil where that is nil.
func (a *Arbiter) beside() (bool, <-chan struct{}) {
	if a.options.Beside == nil {
		return false, nil
	}
	return a.options.Beside()
}

// wait says why nothing is decided. GPUs that have an owner keep it.
func (a *Arbiter) wait(s inventory.Snapshot, why string) {
	waits := map[string]string{}
	for _, g := range s.GPUs {
		waits[g.UUID] = why
	}
	if !maps.Equal(waits, a.waits.Value()) {
		a.waits.Publish(waits)
	}
}

// decide decides about every GPU of a Snapshot, and publishes the owners.
func (a *Arbiter) decide(
	ctx context.Context, c config.Config, s inventory.Snapshot, published map[string]bool, records map[string][]claims.Holder,
) {
	owners := dra.Owners{}
	waits := map[string]string{}
	returning := false
	var moved moves
	for _, found := range s.GPUs {
		g := a.gpus[found.UUID]
		if g == nil {
			g = a.begin(found, c)
			a.gpus[found.UUID] = g
		}
		holder := slices.IndexFunc(records[found.UUID], func(h claims.Holder) bool { return !h.Admin })
		before := g.OwnerFacts
		g.Wanted, g.Published, g.Claimed = c.GivenByDRA(found), published[found.UUID], holder >= 0 || g.late
		if before.Published != g.Published || before.Claimed != g.Claimed {
			a.renew(g)
		}
		for { // as far as the evidence goes
			next := dra.Decide(g.OwnerFacts)
			if next == g.Before {
				break
			}
			if g.Before != "" || next != dra.OwnedByPlugin {
				moved.add(move{next, g.Before}, found.UUID)
			}
			g.Before = next
			a.renew(g)
			if next == dra.OwnedByPlugin {
				a.options.Devices.returned(found.UUID)
			}
		}
		comesBack := g.Before == dra.LeavesDRA || g.Before == dra.OwnedByNobody
		switch {
		case holder >= 0 && (g.Before == dra.LeavesDRA || g.Before == dra.LeavesPlugin):
			h := records[found.UUID][holder]
			g.wait = "claim " + h.Namespace + "/" + h.Name + " has it" + a.wayBack()
		case comesBack && !g.Claimed && a.inGrace():
			g.wait = inGrace
		case g.Before == dra.OwnedByNobody && g.Published:
			g.wait = "it may be in a ResourceSlice still"
			if !a.driverless.IsZero() {
				a.options.Devices.retract(found.UUID)
			}
		case g.wait == inGrace:
			g.wait = ""
		}
		returning = returning || comesBack && !g.Claimed && !g.answered && !a.driverless.IsZero() &&
			a.options.Clock.Since(a.driverless) < driverGrace+claimGrace/2
		if owners[found.UUID] = g.Before; g.wait != "" && g.Before != dra.OwnedByPlugin && g.Before != dra.OwnedByDRA {
			waits[found.UUID] = g.wait
		}
	}
	moved.log(ctx)
	a.returning.Store(returning)
	a.sayWaits(ctx, waits)
	maps.DeleteFunc(a.gpus, func(uuid string, _ *ownedGPU) bool { _, there := owners[uuid]; return !there })
	if !maps.Equal(owners, a.options.Devices.o.Owners.Value()) || a.options.Devices.o.Owners.Value() == nil {
		a.options.Devices.o.Owners.Publish(owners)
	}
	if !maps.Equal(waits, a.waits.Value()) {
		a.waits.Publish(waits)
	}
}

// wayBack returns what to do about a GPU that a claim has, in a process that cannot release the
// claim; empty in another one.
func (a *Arbiter) wayBack() string {
	if a.driverless.IsZero() {
		return ""
	}
	return "; " + WayBack
}

// sayWaits logs why GPUs do not come back from slices, a line for each reason, when that changes.
func (a *Arbiter) sayWaits(ctx context.Context, waits map[string]string) {
	gpus := map[string][]string{}
	for _, uuid := range slices.Sorted(maps.Keys(waits)) {
		if g := a.gpus[uuid]; g != nil && (g.Before == dra.LeavesDRA || g.Before == dra.OwnedByNobody) {
			gpus[waits[uuid]] = append(gpus[waits[uuid]], uuid)
		}
	}
	for _, why := range slices.Sorted(maps.Keys(gpus)) {
		if !slices.Equal(gpus[why], a.said[why]) {
			klog.FromContext(ctx).Info("GPUs wait for the device plugin", "reason", why, "gpus", gpus[why])
		}
	}
	a.said = gpus
}

// begin is the record of a GPU of which nothing was decided by this process. A process before may
// have ended while the GPU was nobody's.
func (a *Arbiter) begin(found inventory.GPU, c config.Config) *ownedGPU {
	g := &ownedGPU{}
	if a.options.Devices.hasLeft(found.UUID) && !c.GivenByDRA(found) {
		g.Before = dra.OwnedByNobody
		a.renew(g)
	}
	return g
}

// A move is how GPUs go from one owner to another.
type move struct {
	owner, before dra.Ownership
}

// moves are the GPUs that go to other owners in one decision, in the order in which they do so.
type moves struct {
	made []move
	gpus map[move][]string
}

func (m *moves) add(made move, gpu string) {
	if m.gpus == nil {
		m.gpus = map[move][]string{}
	}
	if m.gpus[made] == nil {
		m.made = append(m.made, made)
	}
	m.gpus[made] = append(m.gpus[made], gpu)
}

// log logs a line for each way that GPUs go, and not for each GPU.
func (m *moves) log(ctx context.Context) {
	for _, made := range m.made {
		klog.FromContext(ctx).Info("GPUs have another owner", "owner", made.owner, "before", made.before, "gpus",
			m.gpus[made])
	}
}

// renew has the evidence of a GPU gathered anew.
func (a *Arbiter) renew(g *ownedGPU) {
	g.epoch++
	g.since = a.options.Clock.Now()
	g.Free, g.Unclaimed, g.wait, g.late, g.answered = false, false, "", false, false
}

// leaving returns the GPUs that leave the device plugin and that its lists are made without, with
// their epochs.
func (a *Arbiter) leaving(offered dra.Owners) map[string]uint64 {
	epochs := map[string]uint64{}
	for uuid, g := range a.gpus {
		if without := offered[uuid] != "" && offered[uuid] != dra.OwnedByPlugin; without && g.Wanted &&
			g.Before == dra.LeavesPlugin {
			epochs[uuid] = g.epoch
		}
	}
	return epochs
}

// askKubelet returns what asks which pods hold GPUs.
func (a *Arbiter) askKubelet(s inventory.Snapshot) func(context.Context, map[string]uint64) evidence {
	return func(ctx context.Context, epochs map[string]uint64) evidence {
		if a.options.Users == nil {
			return evidence{epochs: epochs}
		}
		gpuOf := map[string]string{}
		for _, g := range s.GPUs {
			if _, asked := epochs[g.UUID]; asked {
				gpuOf[g.UUID] = g.UUID
				for _, m := range g.MIGDevices {
					gpuOf[m.UUID] = g.UUID
				}
			}
		}
		held, err := a.options.Users.Users(ctx, slices.Sorted(maps.Keys(gpuOf)))
		has := map[string]string{}
		for _, d := range held {
			uuid, _ := resource.SplitID(d.ID)
			has[gpuOf[uuid]] = "pod " + d.Pod + " holds it"
		}
		return evidence{epochs: epochs, has: has, err: err}
	}
}

// unclaimed returns the GPUs of which it has to be known whether claims have them, with their
// epochs.
func (a *Arbiter) unclaimed(published map[string]bool) map[string]uint64 {
	epochs := map[string]uint64{}
	if a.inGrace() {
		return epochs
	}
	for uuid, g := range a.gpus {
		leaves := g.Before == dra.LeavesDRA || g.Before == dra.OwnedByNobody && !published[uuid]
		if leaves && !g.Claimed {
			epochs[uuid] = g.epoch
		}
	}
	return epochs
}

// listClaims returns what asks which claims have GPUs: the kubelet where no claim can be prepared,
// and the API server elsewhere.
func (a *Arbiter) listClaims() func(context.Context, map[string]uint64) evidence {
	list := a.options.List
	if !a.driverless.IsZero() {
		list = a.options.Prepared
	}
	if list == nil { // as long as another process is there, which may be the driver
		list = func(context.Context, []string) (map[string][]string, error) { return nil, errBeside }
	}
	return func(ctx context.Context, epochs map[string]uint64) evidence { return claimed(ctx, epochs, list) }
}

var errBeside = errors.New("another process of this program serves the kubelet, as in a roll-out")

// claimed returns the evidence of a list of claims.
func claimed(
	ctx context.Context, epochs map[string]uint64, list func(context.Context, []string) (map[string][]string, error),
) evidence {
	claimed, err := list(ctx, slices.Sorted(maps.Keys(epochs)))
	has := map[string]string{}
	for uuid, names := range claimed {
		if len(names) > 0 {
			has[uuid] = "claim " + names[0] + " was given it"
		}
	}
	return evidence{epochs: epochs, has: has, err: err, claims: true}
}

// take takes in evidence. It counts for a GPU about which nothing has changed since it was asked
// for.
func (a *Arbiter) take(answer evidence) {
	notListed := errors.Is(answer.err, ErrNotListed)
	for uuid, epoch := range answer.epochs {
		g := a.gpus[uuid]
		if g == nil || g.epoch != epoch {
			continue
		}
		g.answered = true
		switch g.wait = answer.has[uuid]; {
		case g.wait != "":
			g.wait += a.wayBack()
			g.late = answer.claims && g.Before == dra.OwnedByNobody
		case notListed && a.options.Clock.Since(g.since) < claimGrace:
			g.wait = "claims that have it may be under way"
		case answer.err != nil && !notListed:
			g.wait = answer.err.Error() + a.wayBack()
		default:
			g.Free, g.Unclaimed = !answer.claims, answer.claims
		}
	}
}
