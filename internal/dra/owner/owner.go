// Package owner decides for each GPU whether the device plugin or the DRA driver offers it, and moves a
// GPU only when the evidence shows that no pod, no slice and no claim has it. Package plan/dra has the
// rules, and package pool the slices' devices.
package owner

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
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/pool"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const (
	// queryInterval is how often the kubelet is asked whether pods hold GPUs that leave
	// the device plugin.
	queryInterval = time.Second
	// listFirst and listMost are the shortest and the longest interval between two lists
	// of the cluster's claims.
	listFirst, listMost = 2 * time.Second, 15 * time.Second
	// claimGrace is how long a GPU must be in no record, first with a taint in its slice
	// and then in no slice, if claims are not listed. The kubelet limits a call of the
	// driver to 45 s.
	claimGrace = time.Minute
	// driverGrace is how long the kubelet must be without a DRA driver before its account
	// of claims is accepted. Device accounts without a holder must last as long.
	driverGrace = 10 * time.Second
)

// The messages about GPUs that return from slices in a process that does not serve the
// driver. The second message follows a reason.
const (
	driverGraceWait = "it was given by claims before; the device plugin gets it when the kubelet has had no driver " +
		"for claims for 10s and names no claim that has it"
	// ReleaseRemedy is the remedy for a GPU that does not return by itself.
	ReleaseRemedy = "to release it, run the driver until no claim has it: helm upgrade gpu-device-plugin … " +
		"--reset-then-reuse-values --set dra.enabled=true --set dra.mode=plugin"
)

// ErrNotListed is the error if the cluster's claims are not listed: permission is missing,
// or the list would be too large.
var ErrNotListed = errors.New("the ResourceClaims of the cluster are not listed")

// Options configure an Arbiter.
type Options struct {
	// Devices have the feed of owners for the Arbiter's decisions, the GPUs that may be in
	// slices at the API server, and the configurations and Snapshots.
	Devices *pool.Devices
	// Holders is nil without a kubelet: then no pod holds a device.
	Holders kubelet.Holders
	// Offered are the owners on which the current lists of the device plugin are based.
	Offered *feed.Feed[dra.Owners]
	// OtherProcess reports whether another process of this program also serves the
	// kubelet, and returns a channel closed when the answer may have changed. Nil means
	// that there is no other process. Meanwhile no GPU moves from the device plugin to a
	// slice, because the other process may list the GPU.
	OtherProcess func() (bool, <-chan struct{})
	// Records are the prepared claims, by UUID of the GPU; nil while unknown.
	Records *feed.Feed[map[string][]claims.Holder]
	// List returns the names, "NAMESPACE/NAME", of the cluster's claims with devices of
	// the given GPUs, by UUID of the GPU. The error says why they are unknown. With
	// ErrNotListed the result may be incomplete. Calls do not overlap. Without the
	// function the process has Driverless.
	List func(ctx context.Context, gpus []string) (map[string][]string, error)
	// Driverless reports whether no claim can be prepared on this node, because this
	// process does not offer the driver to the kubelet: it lacks a client of the API
	// server or the kubelet's plugin folder. Nil means false. A driverless process uses
	// the kubelet's account of claims, not the API server's.
	Driverless func() bool
	// Prepared is like List, by the kubelet's account. It is nil without Driverless.
	Prepared func(ctx context.Context, gpus []string) (map[string][]string, error)
	// Clock is the clock for all waits; nil means the real clock.
	Clock clock.WithTicker
}

// An ownedGPU is the Arbiter's state of a GPU.
type ownedGPU struct {
	dra.OwnerFacts
	epoch              uint64    // increases when earlier evidence becomes invalid
	since              time.Time // start of the epoch
	wait               string
	claimedUnpublished bool // in no slice, but the API server has a claim with the GPU
	// isAnswered says that the evidence was queried: the reason of a delay is known.
	isAnswered bool
}

// An Arbiter decides the owner of each GPU. Create it with New, and call Run once.
type Arbiter struct {
	options Options
	waits   *feed.Feed[map[string]string]
	pulse   supervise.Pulse
	gpus    map[string]*ownedGPU // by UUID; used by Run only
	// driverlessSince is since when no claim can be prepared and no other process of this
	// program runs; zero otherwise. Used by Run only.
	driverlessSince time.Time
	returning       atomic.Bool         // GPUs return from slices within seconds
	loggedWaits     map[string][]string // the waiting GPUs by reason, as last logged; used by Run only
}

// New returns an Arbiter without decisions.
func New(o Options) *Arbiter {
	o.Clock = cmp.Or[clock.WithTicker](o.Clock, clock.RealClock{})
	return &Arbiter{options: o, waits: feed.New(map[string]string(nil)), pulse: supervise.NewPulse(),
		gpus: map[string]*ownedGPU{}}
}

// Waits returns the feed of the reasons why GPUs wait for their new owner, by UUID:
// sentences without a full stop.
func (a *Arbiter) Waits() *feed.Feed[map[string]string] { return a.waits }

// Returning reports whether GPUs are about to return from slices by the kubelet's account:
// the outcome is known within a minute of the start.
func (a *Arbiter) Returning() bool { return a.returning.Load() }

// Alive returns an error if Run completes no round before ctx ends.
func (a *Arbiter) Alive(ctx context.Context) error { return a.pulse.Check(ctx) }

// evidence is the result of a query about GPUs, each in its epoch.
type evidence struct {
	epochs map[string]uint64
	// has says who holds each GPU; a GPU without an entry is free.
	has    map[string]string
	err    error
	claims bool // about claims, not about the device plugin
}

// Run decides until ctx ends, and then returns nil. It starts without decisions and relies
// on evidence alone, because another process may have decided before.
func (a *Arbiter) Run(ctx context.Context) error {
	clear(a.gpus)
	a.driverlessSince = time.Time{}
	grace := a.options.Clock.NewTimer(driverGrace)
	defer grace.Stop()
	kubeletPoller := newPoller(a.options.Clock, queryInterval, queryInterval)
	claimPoller := newPoller(a.options.Clock, listFirst, listMost)
	for {
		c, configChanged := a.options.Devices.Configs().Latest()
		snapshot, snapshotChanged := a.options.Devices.Snapshots().Latest()
		offered, offeredChanged := a.options.Offered.Latest()
		published, changed := a.options.Devices.Published().Latest()
		records, recordsChanged := a.options.Records.Latest()
		hasOther, othersChanged := a.otherProcess()
		a.noteDriver(hasOther, grace)
		if hasOther {
			for uuid := range a.leavingPlugin(offered) {
				a.gpus[uuid].wait = "another process of this program also serves the kubelet, as during a rolling " +
					"update"
			}
		}
		switch {
		case snapshot.Generation == 0:
		case published == nil:
			a.waitAll(snapshot, "the state directory is not read yet: the GPUs in slices are unknown")
		case records == nil:
			a.waitAll(snapshot, "the state directory is not read yet: the prepared claims are unknown")
		default:
			a.decide(ctx, c, snapshot, published, records)
		}
		leaving := a.leavingPlugin(offered)
		if hasOther {
			leaving = nil
		}
		kubeletPoller.start(ctx, leaving, a.queryKubelet(snapshot))
		claimPoller.start(ctx, a.unclaimed(published), a.listClaims())
		select {
		case <-ctx.Done():
			kubeletPoller.wait()
			claimPoller.wait()
			return nil
		case a.pulse.Heartbeat() <- struct{}{}:
		case <-configChanged:
		case <-snapshotChanged:
		case <-offeredChanged:
		case <-changed:
		case <-recordsChanged:
		case <-othersChanged:
		case <-grace.C():
		case <-kubeletPoller.due():
			kubeletPoller.ready = true
		case <-claimPoller.due():
			claimPoller.ready = true
		case end := <-kubeletPoller.answers:
			a.addEvidence(kubeletPoller.end(end))
		case end := <-claimPoller.answers:
			a.addEvidence(claimPoller.end(end))
		}
	}
}

// noteDriver notes since when no claim can be prepared on the node. The timer fires when
// the kubelet's account becomes valid.
func (a *Arbiter) noteDriver(hasOther bool, grace clock.Timer) {
	switch driverless := a.options.Driverless != nil && a.options.Driverless() && !hasOther; {
	case !driverless:
		a.driverlessSince = time.Time{}
	case a.driverlessSince.IsZero():
		a.driverlessSince = a.options.Clock.Now()
		grace.Reset(driverGrace)
		for _, g := range a.gpus {
			if g.Before == dra.LeavesDRA || g.Before == dra.OwnedByNobody {
				a.resetEvidence(g) // earlier evidence is not from the kubelet's account
			}
		}
	}
}

// inGrace reports whether the kubelet's account is not valid yet.
func (a *Arbiter) inGrace() bool {
	return !a.driverlessSince.IsZero() && a.options.Clock.Since(a.driverlessSince) < driverGrace
}

// otherProcess returns the result of Options.OtherProcess; false and nil without the
// function.
func (a *Arbiter) otherProcess() (bool, <-chan struct{}) {
	if a.options.OtherProcess == nil {
		return false, nil
	}
	return a.options.OtherProcess()
}

// waitAll publishes why nothing is decided. GPUs keep their owner.
func (a *Arbiter) waitAll(s inventory.Snapshot, why string) {
	waits := map[string]string{}
	for _, g := range s.GPUs {
		waits[g.UUID] = why
	}
	if !maps.Equal(waits, a.waits.Value()) {
		a.waits.Publish(waits)
	}
}

// decide decides the owner of every GPU of a Snapshot, and publishes the owners.
func (a *Arbiter) decide(
	ctx context.Context, c config.Config, s inventory.Snapshot, published map[string]bool,
	records map[string][]claims.Holder,
) {
	owners := dra.Owners{}
	waits := map[string]string{}
	returning := false
	var moved moves
	for _, found := range s.GPUs {
		g := a.gpus[found.UUID]
		if g == nil {
			g = a.newGPU(found, c)
			a.gpus[found.UUID] = g
		}
		holder := slices.IndexFunc(records[found.UUID], func(h claims.Holder) bool { return !h.Admin })
		before := g.OwnerFacts
		g.Wanted, g.Published = c.GivenByDRA(found), published[found.UUID]
		g.Claimed = holder >= 0 || g.claimedUnpublished
		if before.Published != g.Published || before.Claimed != g.Claimed {
			a.resetEvidence(g)
		}
		for { // all steps allowed by the evidence
			next := dra.Decide(g.OwnerFacts)
			if next == g.Before {
				break
			}
			if g.Before != "" || next != dra.OwnedByPlugin {
				moved.add(move{next, g.Before}, found.UUID)
			}
			g.Before = next
			a.resetEvidence(g)
			if next == dra.OwnedByPlugin {
				a.options.Devices.NoteReturned(found.UUID)
			}
		}
		comesBack := g.Before == dra.LeavesDRA || g.Before == dra.OwnedByNobody
		switch {
		case holder >= 0 && (g.Before == dra.LeavesDRA || g.Before == dra.LeavesPlugin):
			h := records[found.UUID][holder]
			g.wait = "claim " + h.Namespace + "/" + h.Name + " has it" + a.remedy()
		case comesBack && !g.Claimed && a.inGrace():
			g.wait = driverGraceWait
		case g.Before == dra.OwnedByNobody && g.Published:
			g.wait = "it may still be in a ResourceSlice"
			if !a.driverlessSince.IsZero() {
				a.options.Devices.Retract(found.UUID)
			}
		case g.wait == driverGraceWait:
			g.wait = ""
		}
		returning = returning || comesBack && !g.Claimed && !g.isAnswered && !a.driverlessSince.IsZero() &&
			a.options.Clock.Since(a.driverlessSince) < driverGrace+claimGrace/2
		if owners[found.UUID] = g.Before; g.wait != "" && g.Before != dra.OwnedByPlugin && g.Before != dra.OwnedByDRA {
			waits[found.UUID] = g.wait
		}
	}
	moved.log(ctx)
	a.returning.Store(returning)
	a.logWaits(ctx, waits)
	maps.DeleteFunc(a.gpus, func(uuid string, _ *ownedGPU) bool { _, there := owners[uuid]; return !there })
	if decided := a.options.Devices.Owners(); !maps.Equal(owners, decided.Value()) || decided.Value() == nil {
		decided.Publish(owners)
	}
	if !maps.Equal(waits, a.waits.Value()) {
		a.waits.Publish(waits)
	}
}

// remedy returns the remedy for a GPU of a claim, in a process that cannot release the
// claim; empty in any other process.
func (a *Arbiter) remedy() string {
	if a.driverlessSince.IsZero() {
		return ""
	}
	return "; " + ReleaseRemedy
}

// logWaits logs why GPUs do not return from slices, one line per reason, when the reasons
// change.
func (a *Arbiter) logWaits(ctx context.Context, waits map[string]string) {
	gpus := map[string][]string{}
	for _, uuid := range slices.Sorted(maps.Keys(waits)) {
		if g := a.gpus[uuid]; g != nil && (g.Before == dra.LeavesDRA || g.Before == dra.OwnedByNobody) {
			gpus[waits[uuid]] = append(gpus[waits[uuid]], uuid)
		}
	}
	for _, why := range slices.Sorted(maps.Keys(gpus)) {
		if !slices.Equal(gpus[why], a.loggedWaits[why]) {
			klog.FromContext(ctx).Info("GPUs wait for the device plugin", "reason", why, "gpus", gpus[why])
		}
	}
	a.loggedWaits = gpus
}

// newGPU returns the state of a GPU without decisions of this process. An earlier process
// may have stopped while the GPU had no owner.
func (a *Arbiter) newGPU(found inventory.GPU, c config.Config) *ownedGPU {
	g := &ownedGPU{}
	if a.options.Devices.HasLeft(found.UUID) && !c.GivenByDRA(found) {
		g.Before = dra.OwnedByNobody
		a.resetEvidence(g)
	}
	return g
}

// A move is a change from one owner to another.
type move struct {
	owner, before dra.Ownership
}

// moves are the GPUs that change owners in one decision, in order.
type moves struct {
	order []move
	gpus  map[move][]string
}

func (m *moves) add(made move, gpu string) {
	if m.gpus == nil {
		m.gpus = map[move][]string{}
	}
	if m.gpus[made] == nil {
		m.order = append(m.order, made)
	}
	m.gpus[made] = append(m.gpus[made], gpu)
}

// log logs a line for each kind of move, not for each GPU.
func (m *moves) log(ctx context.Context) {
	for _, made := range m.order {
		klog.FromContext(ctx).Info("GPUs have another owner", "owner", made.owner, "before", made.before, "gpus",
			m.gpus[made])
	}
}

// resetEvidence discards the evidence about a GPU.
func (a *Arbiter) resetEvidence(g *ownedGPU) {
	g.epoch++
	g.since = a.options.Clock.Now()
	g.Free, g.Unclaimed, g.wait, g.claimedUnpublished, g.isAnswered = false, false, "", false, false
}

// leavingPlugin returns the GPUs that leave the device plugin and are no longer in its
// lists, with their epochs.
func (a *Arbiter) leavingPlugin(offered dra.Owners) map[string]uint64 {
	epochs := map[string]uint64{}
	for uuid, g := range a.gpus {
		if without := offered[uuid] != "" && offered[uuid] != dra.OwnedByPlugin; without && g.Wanted &&
			g.Before == dra.LeavesPlugin {
			epochs[uuid] = g.epoch
		}
	}
	return epochs
}

// queryKubelet returns the query for the pods that hold GPUs.
func (a *Arbiter) queryKubelet(s inventory.Snapshot) func(context.Context, map[string]uint64) evidence {
	return func(ctx context.Context, epochs map[string]uint64) evidence {
		if a.options.Holders == nil {
			return evidence{epochs: epochs}
		}
		gpuOf := map[string]string{}
		for _, g := range s.GPUs {
			if _, isQueried := epochs[g.UUID]; isQueried {
				gpuOf[g.UUID] = g.UUID
				for _, m := range g.MIGDevices {
					gpuOf[m.UUID] = g.UUID
				}
			}
		}
		held, err := a.options.Holders.Holders(ctx, slices.Sorted(maps.Keys(gpuOf)))
		has := map[string]string{}
		for _, d := range held {
			uuid, _ := resource.SplitID(d.ID)
			has[gpuOf[uuid]] = "pod " + d.Pod + " holds it"
		}
		return evidence{epochs: epochs, has: has, err: err}
	}
}

// unclaimed returns the GPUs for which claims must be queried, with their epochs.
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

// listClaims returns the query for the claims that have GPUs: to the kubelet in a
// driverless process, otherwise to the API server.
func (a *Arbiter) listClaims() func(context.Context, map[string]uint64) evidence {
	list := a.options.List
	if !a.driverlessSince.IsZero() {
		list = a.options.Prepared
	}
	if list == nil { // while there is another process, which may serve the driver
		list = func(context.Context, []string) (map[string][]string, error) { return nil, errOtherProcess }
	}
	return func(ctx context.Context, epochs map[string]uint64) evidence { return claimEvidence(ctx, epochs, list) }
}

var errOtherProcess = errors.New("another process of this program serves the kubelet, as during a rolling update")

// claimEvidence returns the evidence from a list of claims.
func claimEvidence(
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

// addEvidence applies evidence to the GPUs whose epoch has not changed since the query.
func (a *Arbiter) addEvidence(answer evidence) {
	notListed := errors.Is(answer.err, ErrNotListed)
	for uuid, epoch := range answer.epochs {
		g := a.gpus[uuid]
		if g == nil || g.epoch != epoch {
			continue
		}
		g.isAnswered = true
		switch g.wait = answer.has[uuid]; {
		case g.wait != "":
			g.wait += a.remedy()
			g.claimedUnpublished = answer.claims && g.Before == dra.OwnedByNobody
		case notListed && a.options.Clock.Since(g.since) < claimGrace:
			g.wait = "claims with this GPU may be in progress"
		case answer.err != nil && !notListed:
			g.wait = answer.err.Error() + a.remedy()
		default:
			g.Free, g.Unclaimed = !answer.claims, answer.claims
		}
	}
}
