package mig

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const (
	// readTimeout bounds one question to the driver, stepTimeout one step, and modeTimeout a change of
	// the mode, which may reset the GPU.
	readTimeout = 20 * time.Second
	stepTimeout = 30 * time.Second
	modeTimeout = 2 * time.Minute
	// soon is the time between two questions whether kubelet knows of a hold, for soonFor at most;
	// then they are rarer. soonFor is also how long the Snapshot may lack what was created.
	soon    = 100 * time.Millisecond
	soonFor = 5 * time.Second
	later   = time.Second
	// retryFirst and retryMost are the shortest and the longest pause after a failure. The pause
	// doubles. busyMost is the longest one while something other than a pod uses the GPU.
	retryFirst = 5 * time.Second
	retryMost  = 5 * time.Minute
	busyMost   = 30 * time.Second
)

// errOvertaken ends the steps of a Wish that is not the latest any more.
var errOvertaken = errors.New("another layout is wanted now")

// A turn brings one GPU nearer to the Wish, as it finds the GPU.
type turn struct {
	*Owner
	GPU     // what is shown of it
	wish    Wish
	gpu     *ownedGPU // what turns keep of it is this turn's
	unknown error     // the GPU has no built-in layout of that name

	log       klog.Logger
	processes []inventory.Process
}

// An outcome says when the next turn of a GPU is due.
type outcome struct {
	uuid string
	// again is after how long; 0 for when the Wish or the GPU changes.
	again time.Duration
	// failed says that a try failed: then a change of the GPU is no reason for an earlier try.
	failed bool
}

// run makes the turn.
func (t *turn) run(ctx context.Context) outcome {
	t.log = klog.FromContext(ctx)
	noted := t.journal.record(t.UUID)
	if !t.gpu.ran && noted.Change != nil { // the earlier process may have paused DaemonSets
		t.gpu.paused = time.Now()
	}
	t.gpu.ran = true
	if err := t.journal.writable(); errors.Is(err, errFormer) && (noted.Change != nil || noted.lost) {
		return t.wait(PhaseWaiting, err.Error(), 0, t.held())
	}
	if !t.wish.concerns(t.GPU) && noted.Change == nil && !noted.lost {
		t.Change = layout.GPUChange{}
		return t.rest(PhaseKept, "")
	}
	now, err := t.read(ctx, noted)
	if err != nil {
		hold := t.gpu.hold // a GPU that is divided as wanted serves on
		if t.Phase == PhaseUnknown {
			hold = resource.GPUHold{Reason: "it cannot be read how its GPU is divided"}
		}
		return t.wait(PhaseWaiting, err.Error(), later, hold)
	}
	c, end, reason := t.plan(now, noted)
	if len(c.Steps) > 0 {
		t.markHeld(ctx, &now)
		c, end, reason = t.plan(now, noted)
	}
	switch {
	case c.Reason != "":
		o := t.wait(PhaseFailed, c.Reason, t.pause(retryMost), t.held())
		o.failed = true
		return o
	case len(c.Steps) == 0:
		return t.finish(ctx, now, end, reason)
	}
	return t.change(ctx, c, noted, end, reason)
}

// read reads how the GPU is divided. Instances count as in use if a process computes on them, and
// if they must not be destroyed because this program did not make them.
func (t *turn) read(ctx context.Context, noted journalRecord) (layout.GPU, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	g := layout.GPU{Index: t.Index, UUID: t.UUID, Model: t.Model, InUse: map[int]bool{}}
	var err error
	if g.Partitions, err = t.options.Driver.Partitions(ctx, g.UUID); err != nil {
		return g, err
	}
	processes, err := t.options.Driver.Processes(ctx, []string{g.UUID})
	if err != nil {
		return g, err
	}
	t.processes = processes[g.UUID]
	for _, i := range g.Instances {
		used := slices.ContainsFunc(t.processes, func(p inventory.Process) bool { return on(p, i.ID) })
		g.InUse[i.ID] = used || !t.wish.Replace && !noted.made(i)
	}
	return g, nil
}

// on says whether a process may be on a GPU instance. Where the driver does not say on which one it
// is, it may be on each.
func on(p inventory.Process, gi int) bool { return !p.GI.Known || p.GI.Value == gi }

// plan returns what is to be done now, or why what was begun cannot be undone, and how far the GPU
// is when that is done. What an earlier Wish has begun and this one does not want is undone;
// without a Wish, the instances of this program that a restart of the node ended are made again.
func (t *turn) plan(now layout.GPU, noted journalRecord) (c layout.GPUChange, end Phase, reason string) {
	end, t.unknown = PhaseKept, nil
	nothing := layout.Restore(now, now.Mode, now.Instances)
	nothing.Reason, t.Change = "", nothing
	if t.wish.concerns(t.GPU) {
		l, err := layout.Find(t.wish.Layout, t.wish.File, []layout.GPU{now})
		switch {
		case err != nil:
			if t.wish.File == nil {
				t.unknown = err
			}
			end, reason = PhaseFailed, err.Error()
		default:
			t.Change = layout.Plan(l, []layout.GPU{now}).GPUs[0]
			switch {
			case t.Change.Reason != "":
				end, reason = PhaseFailed, t.Change.Reason
			case t.Change.Note != "":
				reason = t.Change.Note
			default:
				return t.Change, PhaseDone, ""
			}
		}
	}
	switch {
	case noted.Change != nil:
		return layout.Restore(now, mode(noted.Change.Enabled), inventoried(noted.Change.Before)), end, reason
	case noted.lost && noted.Enabled && len(now.Instances) == 0 && end == PhaseKept:
		if c = layout.Restore(now, inventory.MIGEnabled, inventoried(noted.Made)); c.Reason == "" {
			return c, end, reason
		}
	}
	return nothing, end, reason
}

// finish releases the GPU, which is as it is to be.
func (t *turn) finish(ctx context.Context, now layout.GPU, end Phase, reason string) outcome {
	seen, missing := t.seen(ctx, now)
	if !seen {
		return t.wait(PhaseWaiting, "the last look at the node does not show the GPU as it is divided now", later, t.held())
	}
	if err := t.journal.end(ctx, now); err != nil {
		t.log.Error(err, "Cannot note that a GPU is divided as wanted", "gpu", t.UUID)
	}
	if missing == "" || end != PhaseDone {
		return t.rest(end, reason)
	}
	o := t.rest(PhaseFailed, missing)
	o.again = busyMost
	return o
}

// seen waits until the Snapshot shows the GPU as it is divided, and reports whether it does. MIG
// devices are not waited for for long: those that are not shown are not on offer. Then missing says
// which, and why.
func (t *turn) seen(ctx context.Context, now layout.GPU) (seen bool, missing string) {
	timer := time.NewTimer(soonFor)
	defer timer.Stop()
	for {
		snapshot, looked := t.options.Snapshots.Latest()
		found, _ := snapshot.GPU(t.UUID)
		unseen := unseen(found, now)
		if found.MIG == now.Mode && len(unseen) == 0 {
			return true, ""
		}
		select {
		case <-ctx.Done():
			return false, ""
		case <-timer.C:
			return found.MIG == now.Mode, unshown(unseen, snapshot, found.Index)
		case <-looked:
		}
	}
}

// unseen returns the IDs of the GPU instances of which a compute instance has no MIG device.
func unseen(found inventory.GPU, now layout.GPU) []string {
	var ids []string
	for _, i := range now.Instances {
		shown := func(c inventory.ComputeInstance) bool {
			return slices.ContainsFunc(found.MIGDevices, func(d inventory.MIGDevice) bool { return d.GI == i.ID && d.CI == c.ID })
		}
		if slices.ContainsFunc(i.Computes, func(c inventory.ComputeInstance) bool { return !shown(c) }) {
			ids = append(ids, strconv.Itoa(i.ID))
		}
	}
	return ids
}

// unshown says that MIG devices of GPU instances are not shown, and why.
func unshown(instances []string, snapshot inventory.Snapshot, index int) string {
	reasons := []string{"run gpu-device-plugin doctor, which checks whether this container may open them"}
	for _, l := range snapshot.LeftOut {
		if l.Index == index {
			reasons = append([]string{l.Reason}, reasons...)
		}
	}
	return fmt.Sprintf("it is divided, and no look at the node shows the MIG devices of GPU instances %s: %s",
		strings.Join(instances, ", "),
		reasons[0])
}

// change makes the steps of a change, once nobody uses what they end.
func (t *turn) change(ctx context.Context, c layout.GPUChange, noted journalRecord, end Phase, reason string) outcome {
	hold := holdFor(c)
	if o, waits := t.awaitOthers(c, noted, end, hold); waits {
		return o
	}
	if !reflect.DeepEqual(t.gpu.hold, hold) {
		t.show(PhaseWaiting, "waiting until kubelet offers none of its devices", hold)
	}
	if now := t.journal.record(t.UUID); !reflect.DeepEqual(now, noted) { // by a former process
		return t.wait(PhaseWaiting, "the journal was read again", soon, hold)
	}
	if o, waits := t.awaitUsers(ctx, c, hold); waits {
		return o
	}
	if o, waits := t.awaitClients(ctx, hold); waits {
		return o
	}
	if err := t.journal.begin(ctx, c, t.wish.Layout); err != nil {
		return t.unjournaled(err, noted, hold)
	}
	if t.Phase != PhaseReset {
		t.show(PhaseChanging, "", hold)
	}
	now, err := t.make(ctx, c, true)
	switch {
	case err != nil:
		return t.ended(ctx, err, hold)
	case end == PhaseFailed: // what another Wish had begun, or this one before it was known to be impossible, is undone
		failures := t.gpu.failures
		o := t.finish(ctx, now, end, reason)
		t.gpu.failures = failures
		o.again, o.failed = t.pause(retryMost), true
		return o
	}
	t.gpu.made = time.Now()
	return t.finish(ctx, now, end, reason)
}

// awaitOthers reports whether the change has to wait, or is not made, for another reason than users
// of the GPU.
func (t *turn) awaitOthers(c layout.GPUChange, noted journalRecord, end Phase, hold resource.GPUHold) (o outcome,
	waits bool) {
	if t.options.Refuse != nil && noted.Change == nil && end == PhaseDone {
		if reason := t.options.Refuse(t.UUID); reason != "" {
			return t.wait(PhaseWaiting, reason, later, resource.GPUHold{}), true
		}
	}
	if ago := time.Since(t.gpu.made); ago < retryFirst {
		return t.wait(PhaseWaiting, "the GPU was divided as wanted, and something has divided it otherwise", retryFirst-ago,
			t.gpu.hold), true
	}
	if problem := t.forbidden(c, noted); problem != "" {
		if noted.Change == nil {
			o = t.rest(PhaseFailed, problem)
		} else {
			o = t.wait(PhaseFailed, problem, 0, hold)
		}
		o.again = busyMost // an instance that is empty goes without a change of the Snapshot
		return o, true
	}
	if noted.Change == nil {
		hold = resource.GPUHold{}
	}
	switch err := t.journal.writable(); {
	case errors.Is(err, errFormer): // it would have noted that it changes this GPU
		return t.wait(PhaseWaiting, err.Error(), 0, hold), true
	case err != nil:
		return t.unjournaled(err, noted, hold), true
	}
	if err := t.options.Held(); err != nil {
		return t.wait(PhaseWaiting, err.Error(), later, hold), true
	}
	return o, false
}

// ended ends a try in which a step failed.
func (t *turn) ended(ctx context.Context, err error, hold resource.GPUHold) outcome {
	switch {
	case ctx.Err() != nil || errors.Is(err, errOvertaken):
		return t.wait(PhaseChanging, err.Error(), soon, hold)
	case errors.Is(err, inventory.ErrNoAnswer) || errors.Is(err, context.DeadlineExceeded):
		return t.wait(PhaseWaiting, err.Error(), later, hold) // the step may still happen
	case errors.Is(err, inventory.ErrResetRequired):
		return t.wait(PhaseReset, err.Error(), t.pause(retryMost), hold)
	case errors.Is(err, inventory.ErrInUse):
		t.gpu.blocked = true
		if o, waits := t.awaitClients(ctx, hold); waits {
			return o
		}
		if errors.Is(err, inventory.ErrOpenElsewhere) && t.gpu.paused.IsZero() {
			return t.fail(ctx, t.openElsewhere(err), hold)
		}
		for _, p := range t.processes {
			t.Holders = append(t.Holders, Holder{Device: t.UUID, PID: p.PID})
		}
		reason := err.Error()
		if len(t.Holders) == 0 {
			reason += ": the driver shows this container no process on it, and without hostPID none of other containers"
		}
		return t.wait(PhaseWaiting, reason, t.pause(busyMost), hold)
	}
	return t.fail(ctx, err, hold)
}

// unjournaled says that the journal cannot be written, so that no step is made. A GPU of which no
// change was begun is offered as it is.
func (t *turn) unjournaled(err error, noted journalRecord, hold resource.GPUHold) outcome {
	if noted.Change == nil {
		hold = resource.GPUHold{}
	}
	o := t.wait(PhaseFailed, "the journal cannot be written: "+err.Error(), t.pause(retryMost), hold)
	o.failed = true
	return o
}

// forbidden says which instance of a change must not be destroyed, because this program did not
// make it.
func (t *turn) forbidden(c layout.GPUChange, noted journalRecord) string {
	for _, s := range c.Steps {
		if s.Action == inventory.MIGDestroyInstance && !t.wish.Replace && !noted.made(s.Part.GPUInstance) {
			return fmt.Sprintf("GPU instance %d (%s at slice %d) is in the way, and this program did not make it: allow that with replace",
				s.Part.ID, s.Part.Profile, s.Part.Start)
		}
	}
	return ""
}

// dividedAnew is why devices of a GPU that is being changed are not given out.
const dividedAnew = "its GPU is being divided anew"

// held returns the hold that there is, or one on all devices.
func (t *turn) held() resource.GPUHold {
	if t.gpu.hold.Reason == "" {
		return resource.GPUHold{Reason: dividedAnew}
	}
	return t.gpu.hold
}

// holdFor returns the hold on a GPU that is changed: on all devices, but for those of instances
// that stay.
func holdFor(c layout.GPUChange) resource.GPUHold {
	h := resource.GPUHold{Reason: dividedAnew}
	for _, p := range c.After.Instances {
		if p.Exists {
			h.Kept = append(h.Kept, p.ID)
		}
	}
	return h
}

// fail undoes on the GPU what was done for the Wish, and says when it is tried again. The GPU is
// released if it is as before.
func (t *turn) fail(ctx context.Context, cause error, hold resource.GPUHold) outcome {
	reason := cause.Error()
	now, err := t.undo(ctx)
	if err == nil {
		if seen, _ := t.seen(ctx, now); seen {
			hold = resource.GPUHold{}
			err = t.journal.end(ctx, now)
		}
	}
	if err != nil {
		reason += "; and it could not be undone: " + err.Error()
	}
	if errors.Is(cause, inventory.ErrNoPermission) {
		t.gpu.failures = 10 // it takes another pod to have more rights
	}
	o := t.wait(PhaseFailed, reason, t.pause(retryMost), hold)
	o.failed = true
	return o
}

// undo gives the GPU the division back that it had before the change.
func (t *turn) undo(ctx context.Context) (layout.GPU, error) {
	noted := t.journal.record(t.UUID)
	now, err := t.read(ctx, noted)
	if err != nil || noted.Change == nil { // or no step was begun
		return now, err
	}
	c := layout.Restore(now, mode(noted.Change.Enabled), inventoried(noted.Change.Before))
	switch problem := t.forbidden(c, noted); {
	case c.Reason != "" || problem != "":
		return now, errors.New(c.Reason + problem)
	case len(c.Steps) == 0:
		return now, nil
	}
	if err := t.findHolders(ctx, c); err != nil || len(t.Holders) > 0 {
		return now, errors.Join(err, errors.New("in use by "+holders(t.Holders)))
	}
	if err := t.journal.begin(ctx, c, t.wish.Layout); err != nil {
		return now, err
	}
	return t.make(ctx, c, false)
}

// pause returns how long to wait after one more failure in a row.
func (t *turn) pause(most time.Duration) time.Duration {
	d := min(retryFirst<<min(t.gpu.failures, 10), most)
	t.gpu.failures++
	return d
}

// rest shows that nothing is to be done, and nothing is held.
func (t *turn) rest(p Phase, reason string) outcome {
	t.gpu.failures, t.Holders, t.gpu.waiting, t.gpu.told, t.gpu.blocked = 0, nil, time.Time{}, nil, false
	return t.wait(p, reason, 0, resource.GPUHold{})
}

// wait shows how far the GPU is, and says when the next turn is due.
func (t *turn) wait(p Phase, reason string, again time.Duration, hold resource.GPUHold) outcome {
	t.Retry = time.Time{}
	if again >= retryFirst {
		t.Retry = time.Now().Add(again)
	}
	t.show(p, reason, hold)
	return outcome{uuid: t.UUID, again: again}
}
