package cluster

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/keeper"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/slots"
)

// The annotations of a slot. kubectl-gpu shows them.
const (
	slotChange = "gpu-device-plugin.github.io/change"
	slotState  = "gpu-device-plugin.github.io/change.state"
	slotReason = "gpu-device-plugin.github.io/change.reason"
	slotWave   = "gpu-device-plugin.github.io/change.wave"
	slotDomain = "gpu-device-plugin.github.io/change.domain"
)

const (
	// A waiting node reads the slots after firstPoll, and then less and less often, up to lastPoll. All
	// times are random by half, so that the nodes of a cluster do not read together.
	firstPoll = 5 * time.Second
	lastPoll  = time.Minute
	// renewEvery is how often a node renews its slot.
	renewEvery = time.Minute
)

// A rollout has the slot of this node. The daemon requests a slot with RequestSlot before a change
// begins. The task takes a slot, and gives it back when the change is done. All state is in the
// Lease: a process that starts reads whether the node has a slot.
type rollout struct {
	client    *kubeapi.Client
	daemon    daemon.View
	alarm     *feed.Alarm
	admission *admission // to change the node

	// Used by the task alone.
	listed    bool           // the slots were read since the start
	namespace string         // of the slots; that of own while the node has a slot
	own       *kubeapi.Lease // this node's slot; nil if it has none. Without UID, it may not exist.
	refused   string         // the slot that the API server did not create, because the name is taken
	poll      time.Duration  // the next time between two reads
	nextRead  time.Time      // a waiting node does not read earlier
	wellSince time.Time      // since when the earlier waves have been well; zero if they are not
}

// waitingForSlot is the answer before the slots were read.
const waitingForSlot = "waiting for a slot of the cluster"

func newRollout() *rollout {
	return &rollout{alarm: new(feed.Alarm), admission: newAdmission(waitingForSlot, "")}
}

// RequestSlot requests a slot for a change of this node. It returns nil while the node has one, and
// otherwise why not. The caller repeats the request until then.
func (c *Cluster) RequestSlot(change string) error { return c.rollout.admission.request(change) }

// SlotSince returns when the node took its slot; zero if it has none. A slot that was taken away and
// taken again has a later time.
func (c *Cluster) SlotSince() time.Time {
	_, since := c.rollout.admission.latest()
	return since
}

// answer sets what RequestSlot and SlotSince return.
func (r *rollout) answer(granted bool, reason string) {
	if granted {
		r.admission.answer("", r.own.Acquired)
	} else {
		r.admission.answer(cmp.Or(reason, waitingForSlot), time.Time{})
	}
}

// followSlots keeps the slot of this node until ctx ends.
func (c *Cluster) followSlots(ctx context.Context, d daemon.View) {
	r := c.rollout
	r.client, r.daemon, r.listed, r.own = c.client, d, false, nil
	defer r.answer(false, "this process does not lead")
	wake := func() []<-chan struct{} {
		_, nodeChanged := r.client.Nodes().Latest()
		_, configChanged := d.Configs.Latest()
		_, requestChanged := r.admission.begun.Latest()
		_, repairsChanged := d.Repairs.Latest()
		_, driverChanged := d.DriverChange.Latest()
		channels := []<-chan struct{}{
			nodeChanged, configChanged, repairsChanged, driverChanged, requestChanged, r.alarm.Rings()}
		if d.MIG != nil {
			_, migChanged := d.MIG.Latest()
			channels = append(channels, migChanged)
		}
		return channels
	}
	kubeapi.RunWithRetry(ctx, clock.RealClock{}, "slots of the cluster", wake, func(ctx context.Context) error {
		err := r.step(ctx)
		if err != nil {
			r.answer(r.own != nil && stateOf(*r.own) != slots.Checking, err.Error())
		}
		return err
	})
}

// step takes, keeps or gives back the slot of this node.
func (r *rollout) step(ctx context.Context) error {
	c, node, now := r.daemon.Configs.Value(), r.client.Nodes().Value(), time.Now()
	change, progress := r.admission.pending(now), r.progress(c)
	wanted := progress.wanted
	switch {
	case node.UID == "" && (wanted || r.own == nil), !progress.enabled && r.own == nil,
		r.own == nil && now.Before(r.nextRead):
		return nil
	case r.own == nil && r.listed && (!wanted || change == ""):
		r.poll, r.wellSince = firstPoll, time.Time{}
		return nil
	case r.own != nil && wanted && stateOf(*r.own) != slots.Checking && !r.mustWrite(progress, now):
		r.alarm.After(ctx, renewEvery)
		return nil
	}
	if r.own == nil {
		r.namespace = cmp.Or(c.Rollout.Namespace, c.Namespace)
	}
	if node.UID == "" {
		node = holderOf(*r.own)
	}
	others, err := r.read(ctx, node)
	switch {
	case err != nil:
		return err
	case r.own != nil && !wanted:
		return r.giveBack(ctx)
	case r.own != nil && stateOf(*r.own) != slots.Checking:
		return r.keep(ctx, progress, now)
	case r.own == nil && (!wanted || change == ""):
		r.answer(false, "")
		return nil
	}
	wave, err := 0, error(nil)
	if progress.waves {
		wave, err = waveOf(node, c.Rollout.WaveLabel)
	}
	if err != nil {
		if r.own != nil {
			if err := r.giveBack(ctx); err != nil {
				return err
			}
		}
		r.answer(false, err.Error())
		return nil
	}
	request := slots.Request{Node: node.Name, Wave: wave, Domain: node.Labels[c.Rollout.TopologyLabel]}
	rules := slots.Rules{Slots: c.Rollout.Slots, Soak: c.Rollout.WaveSoak, Windows: c.Rollout.Windows}
	if r.refused != "" && !slices.ContainsFunc(others.Slots, func(s slots.Slot) bool { return s.Name == r.refused }) {
		// An old list, or a Lease without the label.
		others.Slots = append(others.Slots,
			slots.Slot{Name: r.refused, Node: unknownNode(r.refused), Wave: slots.LastWave})
	}
	r.refused = ""
	if err := r.readEarlierWaves(ctx, c.Rollout, request, &others, now); err != nil {
		return err
	}
	if r.own == nil {
		name, reason := slots.Take(request, rules, others, now)
		if reason != "" {
			r.postpone(ctx, reason)
			return nil
		}
		if taken, err := r.take(ctx, name, change, request, node, now); err != nil || !taken {
			return err
		}
		if others, err = r.read(ctx, node); err != nil {
			return err
		}
	}
	return r.confirm(ctx, request, rules, others, now)
}

// read reads all slots. It returns those of other nodes, and sets own.
func (r *rollout) read(ctx context.Context, node kubeapi.Node) (slots.Cluster, error) {
	leases, err := r.client.Leases(ctx, r.namespace, r.own != nil || !r.listed)
	if err != nil {
		return slots.Cluster{}, err
	}
	r.listed, r.own = true, nil
	var c slots.Cluster
	var surplus []kubeapi.Lease
	for _, l := range leases {
		switch {
		case l.Name == slots.Paused:
			c.Paused, c.Reason = true, l.Annotations[slotReason]
		case !strings.HasPrefix(l.Name, slots.Prefix):
		case l.Holder == node.Name && l.HolderUID == node.UID:
			switch {
			case r.own == nil:
				r.own = &l
			case stateOf(*r.own) == slots.Checking:
				surplus, r.own = append(surplus, *r.own), &l
			default:
				surplus = append(surplus, l)
			}
		default: // also that of an earlier Node of this name, which the API server deletes
			wave, err := strconv.Atoi(l.Annotations[slotWave])
			if err != nil {
				wave = slots.LastWave
			}
			c.Slots = append(c.Slots, slots.Slot{
				Name: l.Name, Node: cmp.Or(l.Holder, unknownNode(l.Name)), State: stateOf(l), Wave: wave,
				Domain: l.Annotations[slotDomain],
			})
		}
	}
	for _, l := range surplus { // two processes of this node created slots at the same time
		if err := r.client.DeleteLease(ctx, r.namespace, l); err != nil {
			return slots.Cluster{}, err
		}
	}
	return c, nil
}

// holderOf returns the Node that holds a Lease of this node. The watch of the Node has ended if nothing
// else needs the Node; the Lease is given back nevertheless.
func holderOf(l kubeapi.Lease) kubeapi.Node {
	return kubeapi.Node{Name: l.Holder, UID: l.HolderUID}
}

// unknownNode stands for the name of the node of a slot whose Lease does not have it.
func unknownNode(slot string) string { return fmt.Sprintf("unknown (Lease %s)", slot) }

// stateOf returns the state of the change of a node with a slot.
func stateOf(l kubeapi.Lease) slots.State {
	if s := slots.State(l.Annotations[slotState]); s == slots.Working || s == slots.Failed {
		return s
	}
	return slots.Checking
}

// waveOf returns the wave of a node.
func waveOf(n kubeapi.Node, label string) (int, error) {
	text, has := n.Labels[label]
	if label == "" || !has {
		return slots.LastWave, nil
	}
	wave, err := strconv.Atoi(text)
	if err != nil || wave < 0 || wave > maxWave || text != strconv.Itoa(wave) { // later waves look for this text
		return 0, fmt.Errorf("label %s of the node is %q; the wave must be a number from 0 to %d", label, text, maxWave)
	}
	return wave, nil
}

// maxWave bounds the waves: a node asks for the nodes of all earlier waves in one request.
const maxWave = 99

// readEarlierWaves finds out whether the nodes of the earlier waves are done. It does not read the
// nodes if the slots already exclude this node.
func (r *rollout) readEarlierWaves(ctx context.Context, o config.Rollout, request slots.Request, c *slots.Cluster,
	now time.Time,
) (err error) {
	if o.WaveLabel == "" || request.Wave == 0 {
		c.WellSince = time.Time{}
		return nil
	}
	used := 0
	for _, s := range c.Slots {
		if s.Wave < request.Wave {
			r.wellSince, c.WellSince = time.Time{}, now
			return nil
		}
		if s.Node != request.Node {
			used++
		}
	}
	if used >= o.Slots { // there is no need to read many nodes
		c.WellSince = now
		return nil
	}
	selector := o.WaveLabel
	if request.Wave <= maxWave {
		earlier := make([]string, request.Wave)
		for i := range earlier {
			earlier[i] = strconv.Itoa(i)
		}
		selector += " in (" + strings.Join(earlier, ",") + ")"
	}
	selector += "," + keeper.MIGStateLabel + " in (pending,failed,rebooting)"
	if c.Unfinished, err = r.client.NodesWith(ctx, selector, !r.wellSince.IsZero()); err != nil {
		r.wellSince = time.Time{}
		return err
	}
	switch {
	case len(c.Unfinished) > 0:
		r.wellSince = time.Time{}
	case r.wellSince.IsZero():
		r.wellSince = now
	}
	c.WellSince = cmp.Or(r.wellSince, now)
	return nil
}

// postpone sets the reason, and schedules the next read of the slots.
func (r *rollout) postpone(ctx context.Context, reason string) {
	r.answer(false, keeper.OneLine(waitingForSlot+": "+reason))
	r.poll = min(cmp.Or(r.poll, firstPoll), lastPoll)
	delay := r.poll/2 + rand.N(r.poll)
	r.nextRead = time.Now().Add(delay)
	r.alarm.After(ctx, delay)
	r.poll += r.poll / 3
}

// take creates the Lease of a slot. It returns false if another node was faster.
func (r *rollout) take(
	ctx context.Context, name, change string, request slots.Request, node kubeapi.Node, now time.Time,
) (bool, error) {
	l := kubeapi.Lease{
		Name: name, Holder: node.Name, HolderUID: node.UID, Acquired: now, Renewed: now,
		Annotations: map[string]string{
			slotChange: keeper.OneLine(change), slotState: string(slots.Checking),
			slotWave: strconv.Itoa(request.Wave), slotDomain: request.Domain,
		},
	}
	created, err := r.client.CreateLease(ctx, r.namespace, l)
	if kubeapi.IsStale(err) && !kubeapi.IsNotFound(err) {
		r.refused = name
		r.postpone(ctx, fmt.Sprintf("another node took slot %s", name))
		return false, nil
	}
	if err != nil {
		r.own = &l // the API server may have created the Lease
		return false, err
	}
	r.own = &created
	return true, nil
}

// confirm begins the change, or gives the slot back if another node took a slot at the same time
// that excludes this node.
func (r *rollout) confirm(ctx context.Context, request slots.Request, rules slots.Rules,
	others slots.Cluster, now time.Time,
) error {
	if r.own == nil { // an operator deleted it at once
		r.postpone(ctx, "an operator took the slot away")
		return nil
	}
	others.WellSince = r.wellSince
	if reason := slots.Refusal(request, rules, others, now); reason != "" {
		if err := r.giveBack(ctx); err != nil {
			return err
		}
		r.postpone(ctx, reason)
		return nil
	}
	if err := r.write(ctx, slots.Working, "", now); err != nil || r.own == nil || stateOf(*r.own) == slots.Checking {
		return err
	}
	klog.FromContext(ctx).Info("Took a slot of the cluster", "slot", r.own.Name, "change",
		r.own.Annotations[slotChange])
	r.answer(true, "")
	r.poll = firstPoll
	r.alarm.After(ctx, renewEvery)
	return nil
}

// A progress is the progress of all changes of this node that take a slot.
type progress struct {
	// enabled is true if a change may take a slot, and wanted while one is to come, is under way or has
	// failed.
	enabled, wanted bool
	// waves is true if the change must wait for the earlier waves.
	waves bool
	// state is Working or Failed, and reason why the change failed.
	state  slots.State
	reason string
}

// progress returns the progress of this node. A repair that failed does not keep the slot, unlike a
// MIG layout: a broken GPU says nothing about the next node.
func (r *rollout) progress(c config.Config) progress {
	p := progress{state: slots.Working}
	if c.Repair.Acts() {
		s := r.daemon.Repairs.Value()
		p.enabled, p.wanted = true, !s.Known || s.Wanted
	}
	if s := r.daemon.DriverChange.Value(); c.DriverChange.Version != "" || s.NeedsSlot {
		needs := !s.Known || s.NeedsSlot
		p.enabled, p.waves, p.wanted = true, p.waves || needs, p.wanted || needs
		if s.State == driverchange.Failed {
			p.state, p.reason = slots.Failed, keeper.OneLine(s.Reason)
		}
	}
	if c.MIG.Enabled && c.MIG.Budget && r.daemon.MIG != nil {
		s := r.daemon.MIG.Value()
		p.enabled, p.waves = true, p.waves || !isDone(s)
		p.wanted = p.wanted || p.waves
		if s.State == mig.StateFailed {
			p.state, p.reason = slots.Failed, keeper.OneLine(s.Reason)
		}
	}
	return p
}

// mustWrite reports whether the slot lacks the present state of the change, or must be renewed.
func (r *rollout) mustWrite(p progress, now time.Time) bool {
	age := now.Sub(r.own.Renewed) // negative after the clock was set back
	return stateOf(*r.own) != p.state || r.own.Annotations[slotReason] != p.reason || age >= renewEvery ||
		age < -renewEvery
}

// keep writes the state of the change, and renews the slot.
func (r *rollout) keep(ctx context.Context, p progress, now time.Time) error {
	r.answer(true, "")
	r.alarm.After(ctx, renewEvery)
	if !r.mustWrite(p, now) {
		return nil
	}
	if p.state == slots.Failed && stateOf(*r.own) != slots.Failed {
		klog.FromContext(ctx).Info("The change failed; the node keeps its slot of the cluster", "slot", r.own.Name,
			"reason", p.reason)
	}
	return r.write(ctx, p.state, p.reason, now)
}

// write writes the state of the change into the slot. If the slot was taken away, own is nil
// afterwards.
func (r *rollout) write(ctx context.Context, state slots.State, reason string, now time.Time) error {
	next := *r.own
	next.Renewed, next.Annotations = now, maps.Clone(r.own.Annotations)
	next.Annotations[slotState], next.Annotations[slotReason] = string(state), reason
	if change, _ := r.admission.latest(); change != "" { // another layout may be wanted since the node took the slot
		next.Annotations[slotChange] = keeper.OneLine(change)
	}
	stored, err := r.client.UpdateLease(ctx, r.namespace, next)
	if kubeapi.IsStale(err) {
		if _, err := r.read(ctx, r.client.Nodes().Value()); err != nil {
			return err
		}
		if r.own == nil {
			r.postpone(ctx, "an operator took the slot away")
			return nil
		}
		r.alarm.After(ctx, time.Second) // somebody else has written the Lease
		return nil
	}
	if err != nil {
		return err
	}
	r.own = &stored
	return nil
}

// giveBack deletes the slot.
func (r *rollout) giveBack(ctx context.Context) error {
	r.answer(false, "")
	if err := r.client.DeleteLease(ctx, r.namespace, *r.own); err != nil {
		return err
	}
	if stateOf(*r.own) != slots.Checking {
		klog.FromContext(ctx).Info("Gave a slot of the cluster back", "slot", r.own.Name)
	}
	r.own, r.nextRead = nil, time.Time{}
	return nil
}

// isDone reports whether nothing is left to change. Without Resume, the absence of a layout may mean
// that a new process has not read the GPUs and the journal yet.
func isDone(s mig.Status) bool {
	return s.State == mig.StateSuccess || s.State == mig.StateNone && s.Resume
}
