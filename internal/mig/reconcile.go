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

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/eviction"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const (
	// readTimeout limits one query of the driver, stepTimeout one step, and modeTimeout a
	// change of the MIG mode, including a reset of the GPU.
	readTimeout = 20 * time.Second
	stepTimeout = 30 * time.Second
	modeTimeout = 2 * time.Minute
	// fastPoll is the interval at which the Controller checks whether the kubelet has
	// confirmed a hold. After fastPollFor it uses slowPoll. fastPollFor also limits the wait
	// until the Snapshot shows new instances.
	fastPoll    = 100 * time.Millisecond
	fastPollFor = 5 * time.Second
	slowPoll    = time.Second
	// retryFirst and retryMax are the shortest and the longest delay after a failure; the delay
	// doubles. busyRetryMax is the longest delay while something other than a pod uses the GPU.
	retryFirst   = 5 * time.Second
	retryMax     = 5 * time.Minute
	busyRetryMax = 30 * time.Second
)

// errSuperseded stops the steps of a layout that is no longer wanted.
var errSuperseded = errors.New("another layout is wanted now")

// A reconciler brings one GPU closer to the DesiredLayout, starting from its present
// division.
type reconciler struct {
	*Controller
	GPU        // state to report
	desired    DesiredLayout
	gpu        *gpuState // its fields for reconciliations belong to this reconciler
	notBuiltIn error     // why the GPU has no built-in layout of this name

	log       klog.Logger
	processes []inventory.Process
}

// A result says when the next reconciliation of a GPU is due.
type result struct {
	uuid string
	// after is the delay; 0 to wait for a change of the layout or the GPU.
	after time.Duration
	// failed says that the attempt failed. Then a change of the GPU does not shorten the delay.
	failed bool
}

// reconcile runs one reconciliation.
func (r *reconciler) reconcile(ctx context.Context) result {
	r.log = klog.FromContext(ctx)
	record := r.journal.record(r.UUID)
	if !r.gpu.hasRun && record.Change != nil { // the previous process may have paused DaemonSets
		r.gpu.pausedSince = time.Now()
	}
	r.gpu.hasRun = true
	if err := r.journal.writable(); errors.Is(err, errPreviousLeader) && (record.Change != nil || record.restarted) {
		return r.requeue(PhaseWaiting, err.Error(), 0, r.currentHold())
	}
	if !r.desired.concerns(r.GPU) && record.Change == nil && !record.restarted {
		r.Change = layout.GPUChange{}
		return r.done(PhaseKept, "")
	}
	now, err := r.read(ctx, record)
	if err != nil {
		hold := r.gpu.hold // a GPU with the layout stays in service
		if r.Phase == PhaseUnknown {
			hold = resource.GPUHold{Reason: "the division of its GPU cannot be read"}
		}
		return r.requeue(PhaseWaiting, err.Error(), slowPoll, hold)
	}
	c, end, reason := r.plan(now, record)
	if len(c.Steps) > 0 {
		r.markPodInstances(ctx, &now)
		c, end, reason = r.plan(now, record)
	}
	switch {
	case c.Reason != "":
		res := r.requeue(PhaseFailed, c.Reason, r.backoff(retryMax), r.currentHold())
		res.failed = true
		return res
	case len(c.Steps) == 0:
		return r.finish(ctx, now, end, reason)
	}
	return r.change(ctx, c, record, end, reason)
}

// read returns the division of the GPU. An instance counts as in use if a process computes
// on it, or if another program created the instance and this program must not destroy it.
func (r *reconciler) read(ctx context.Context, record journalRecord) (layout.GPU, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	g := layout.GPU{Index: r.Index, UUID: r.UUID, Model: r.Model, InUse: map[int]bool{}}
	var err error
	if g.Partitions, err = r.options.Driver.Partitions(ctx, g.UUID); err != nil {
		return g, err
	}
	processes, err := r.options.Driver.Processes(ctx, []string{g.UUID})
	if err != nil {
		return g, err
	}
	r.processes = processes[g.UUID]
	for _, i := range g.Instances {
		used := slices.ContainsFunc(r.processes, func(p inventory.Process) bool { return mayRunOn(p, i.ID) })
		g.InUse[i.ID] = used || !r.desired.Replace && !record.created(i)
	}
	return g, nil
}

// mayRunOn reports whether a process may use a GPU instance. If the driver does not report the
// instance of the process, the process may use any.
func mayRunOn(p inventory.Process, gi int) bool { return !p.GI.Known || p.GI.Value == gi }

// plan returns the change to make now, or why a started change cannot be undone, and the
// phase and reason to report after the change. The change undoes the steps of an earlier
// layout, unless they are part of the present layout. Without a layout, it recreates the
// instances of this program removed by a restart of the node.
func (r *reconciler) plan(now layout.GPU, record journalRecord) (c layout.GPUChange, end Phase, reason string) {
	end, r.notBuiltIn = PhaseKept, nil
	nothing := layout.Restore(now, now.Mode, now.Instances)
	nothing.Reason, r.Change = "", nothing
	if r.desired.concerns(r.GPU) {
		l, err := layout.Find(r.desired.Layout, r.desired.File, []layout.GPU{now})
		switch {
		case err != nil:
			if r.desired.File == nil {
				r.notBuiltIn = err
			}
			end, reason = PhaseFailed, err.Error()
		default:
			r.Change = layout.Plan(l, []layout.GPU{now}).GPUs[0]
			switch {
			case r.Change.Reason != "":
				end, reason = PhaseFailed, r.Change.Reason
			case r.Change.Note != "":
				reason = r.Change.Note
			default:
				return r.Change, PhaseDone, ""
			}
		}
	}
	switch {
	case record.Change != nil:
		return layout.Restore(now, mode(record.Change.Enabled), inventoried(record.Change.Before)), end, reason
	case record.restarted && record.Enabled && len(now.Instances) == 0 && end == PhaseKept:
		if c = layout.Restore(now, inventory.MIGEnabled, inventoried(record.Created)); c.Reason == "" {
			return c, end, reason
		}
	}
	return nothing, end, reason
}

// finish releases a GPU with its final division.
func (r *reconciler) finish(ctx context.Context, now layout.GPU, end Phase, reason string) result {
	shown, missing := r.awaitSnapshot(ctx, now)
	if !shown {
		return r.requeue(PhaseWaiting, "the last scan of the node does not show the present division of the GPU",
			slowPoll, r.currentHold())
	}
	if err := r.journal.endChange(ctx, now); err != nil {
		r.log.Error(err, "Cannot record in the journal that a GPU has its MIG layout", "gpu", r.UUID)
	}
	if missing == "" || end != PhaseDone {
		return r.done(end, reason)
	}
	res := r.done(PhaseFailed, missing)
	res.after = busyRetryMax
	return res
}

// awaitSnapshot waits until the Snapshot shows the present division of the GPU, and reports
// success. The wait for MIG devices is short, because missing devices are not advertised.
// Then missing names the missing devices and the reason.
func (r *reconciler) awaitSnapshot(ctx context.Context, now layout.GPU) (shown bool, missing string) {
	timer := time.NewTimer(fastPollFor)
	defer timer.Stop()
	for {
		snapshot, snapshotChanged := r.options.Snapshots.Latest()
		found, _ := snapshot.GPU(r.UUID)
		hidden := hiddenInstances(found, now)
		if found.MIG == now.Mode && len(hidden) == 0 {
			return true, ""
		}
		select {
		case <-ctx.Done():
			return false, ""
		case <-timer.C:
			return found.MIG == now.Mode, hiddenReason(hidden, snapshot, found.Index)
		case <-snapshotChanged:
		}
	}
}

// hiddenInstances returns the IDs of the GPU instances with a compute instance that has no MIG
// device in the Snapshot.
func hiddenInstances(found inventory.GPU, now layout.GPU) []string {
	var ids []string
	for _, i := range now.Instances {
		shown := func(c inventory.ComputeInstance) bool {
			return slices.ContainsFunc(found.MIGDevices,
				func(d inventory.MIGDevice) bool { return d.GI == i.ID && d.CI == c.ID })
		}
		if slices.ContainsFunc(i.Computes, func(c inventory.ComputeInstance) bool { return !shown(c) }) {
			ids = append(ids, strconv.Itoa(i.ID))
		}
	}
	return ids
}

// hiddenReason says which MIG devices the Snapshot does not have, and why.
func hiddenReason(instances []string, snapshot inventory.Snapshot, index int) string {
	reasons := []string{"run gpu-device-plugin doctor to check whether this container may open them"}
	for _, l := range snapshot.LeftOut {
		if l.Index == index {
			reasons = append([]string{l.Reason}, reasons...)
		}
	}
	return fmt.Sprintf("the GPU is divided, but scans of the node do not find the MIG devices of GPU instances %s: %s",
		strings.Join(instances, ", "),
		reasons[0])
}

// change executes a change as soon as the affected devices are not in use.
func (r *reconciler) change(ctx context.Context, c layout.GPUChange, record journalRecord, end Phase,
	reason string) result {
	hold := holdFor(c)
	if res, wait := r.checkBlockers(c, record, end, hold); wait {
		return res
	}
	if !reflect.DeepEqual(r.gpu.hold, hold) {
		r.report(PhaseWaiting, "waiting until the kubelet no longer allocates its devices", hold)
	}
	if now := r.journal.record(r.UUID); !reflect.DeepEqual(now, record) { // written by the previous leader
		return r.requeue(PhaseWaiting, "the journal has changed", fastPoll, hold)
	}
	if res, wait := r.awaitUsers(ctx, c, hold); wait {
		return res
	}
	if res, wait := r.awaitClients(ctx, hold); wait {
		return res
	}
	if err := r.journal.beginChange(ctx, c, r.desired.Layout); err != nil {
		return r.journalFailed(err, record, hold)
	}
	if r.Phase != PhaseReset {
		r.report(PhaseChanging, "", hold)
	}
	now, err := r.apply(ctx, c, true)
	switch {
	case err != nil:
		return r.stepFailed(ctx, err, hold)
	// The change undid an earlier layout, or the present layout after it proved impossible.
	case end == PhaseFailed:
		failures := r.gpu.failures
		res := r.finish(ctx, now, end, reason)
		r.gpu.failures = failures
		res.after, res.failed = r.backoff(retryMax), true
		return res
	}
	r.gpu.dividedAt = time.Now()
	return r.finish(ctx, now, end, reason)
}

// checkBlockers reports whether the change must wait, or is not possible, for a reason other than
// users of the GPU.
func (r *reconciler) checkBlockers(c layout.GPUChange, record journalRecord, end Phase,
	hold resource.GPUHold) (res result,
	wait bool) {
	if r.options.Refuse != nil && record.Change == nil && end == PhaseDone {
		if reason := r.options.Refuse(r.UUID); reason != "" {
			return r.requeue(PhaseWaiting, reason, slowPoll, resource.GPUHold{}), true
		}
	}
	if ago := time.Since(r.gpu.dividedAt); ago < retryFirst {
		return r.requeue(PhaseWaiting, "another program changed the GPU after the layout was applied",
			retryFirst-ago,
			r.gpu.hold), true
	}
	if problem := r.foreignInstance(c, record); problem != "" {
		if record.Change == nil {
			res = r.done(PhaseFailed, problem)
		} else {
			res = r.requeue(PhaseFailed, problem, 0, hold)
		}
		res.after = busyRetryMax // an empty instance can disappear without a change of the Snapshot
		return res, true
	}
	if record.Change == nil {
		hold = resource.GPUHold{}
	}
	switch err := r.journal.writable(); {
	case errors.Is(err, errPreviousLeader): // the previous leader would have noted a change of this GPU
		return r.requeue(PhaseWaiting, err.Error(), 0, hold), true
	case err != nil:
		return r.journalFailed(err, record, hold), true
	}
	err := r.options.Blocked()
	if err == nil && record.Change == nil && !record.restarted && end == PhaseDone {
		err = r.options.Admit(r.desired.Layout)
	}
	if err != nil {
		return r.requeue(PhaseWaiting, err.Error(), slowPoll, hold), true
	}
	return res, false
}

// stepFailed handles the failure of a step.
func (r *reconciler) stepFailed(ctx context.Context, err error, hold resource.GPUHold) result {
	switch {
	case ctx.Err() != nil || errors.Is(err, errSuperseded):
		return r.requeue(PhaseChanging, err.Error(), fastPoll, hold)
	case errors.Is(err, inventory.ErrNoAnswer) || errors.Is(err, context.DeadlineExceeded):
		return r.requeue(PhaseWaiting, err.Error(), slowPoll, hold) // the step may still take effect
	case errors.Is(err, inventory.ErrResetRequired):
		return r.requeue(PhaseReset, err.Error(), r.backoff(retryMax), hold)
	case errors.Is(err, inventory.ErrInUse):
		r.gpu.driverInUse = true
		if res, wait := r.awaitClients(ctx, hold); wait {
			return res
		}
		if errors.Is(err, inventory.ErrOpenElsewhere) && r.gpu.pausedSince.IsZero() {
			return r.fail(ctx, r.openElsewhere(err), hold)
		}
		for _, p := range r.processes {
			r.Holders = append(r.Holders, Holder{Device: r.UUID, PID: p.PID})
		}
		reason := err.Error()
		if len(r.Holders) == 0 {
			reason += ": the driver shows no process on it; without hostPID, processes of other containers are hidden"
		}
		return r.requeue(PhaseWaiting, reason, r.backoff(busyRetryMax), hold)
	}
	return r.fail(ctx, err, hold)
}

// journalFailed reports that the journal cannot be written, so no step may run. A GPU
// without a started change stays advertised.
func (r *reconciler) journalFailed(err error, record journalRecord, hold resource.GPUHold) result {
	if record.Change == nil {
		hold = resource.GPUHold{}
	}
	res := r.requeue(PhaseFailed, "the journal cannot be written: "+err.Error(), r.backoff(retryMax), hold)
	res.failed = true
	return res
}

// foreignInstance returns an error text for the first instance of another program in the
// change. Such instances must not be destroyed.
func (r *reconciler) foreignInstance(c layout.GPUChange, record journalRecord) string {
	for _, s := range c.Steps {
		if s.Action == inventory.MIGDestroyInstance && !r.desired.Replace && !record.created(s.Part.GPUInstance) {
			return fmt.Sprintf("GPU instance %d (%s at slice %d) prevents the layout, and this program did not "+
				"create it; set mig.replace to have it destroyed",
				s.Part.ID, s.Part.Profile, s.Part.Start)
		}
	}
	return ""
}

// repartitioned is the reason of the hold on a GPU that is being changed.
const repartitioned = "its GPU is being repartitioned"

// currentHold returns the present hold, or a hold on all devices.
func (r *reconciler) currentHold() resource.GPUHold {
	if r.gpu.hold.Reason == "" {
		return resource.GPUHold{Reason: repartitioned}
	}
	return r.gpu.hold
}

// holdFor returns the hold for a change: on all devices except the devices of unchanged
// instances.
func holdFor(c layout.GPUChange) resource.GPUHold {
	h := resource.GPUHold{Reason: repartitioned}
	for _, p := range c.After.Instances {
		if p.Exists {
			h.Kept = append(h.Kept, p.ID)
		}
	}
	return h
}

// fail undoes the change on the GPU, and schedules the next attempt. If the undo succeeds, the GPU
// is released.
func (r *reconciler) fail(ctx context.Context, cause error, hold resource.GPUHold) result {
	reason := cause.Error()
	now, err := r.undo(ctx)
	if err == nil {
		if shown, _ := r.awaitSnapshot(ctx, now); shown {
			hold = resource.GPUHold{}
			err = r.journal.endChange(ctx, now)
		}
	}
	if err != nil {
		reason += "; undo failed: " + err.Error()
	}
	if errors.Is(cause, inventory.ErrNoPermission) {
		r.gpu.failures = 10 // only a new pod can have more permissions
	}
	res := r.requeue(PhaseFailed, reason, r.backoff(retryMax), hold)
	res.failed = true
	return res
}

// undo restores the division that the GPU had before the change.
func (r *reconciler) undo(ctx context.Context) (layout.GPU, error) {
	record := r.journal.record(r.UUID)
	now, err := r.read(ctx, record)
	if err != nil || record.Change == nil { // without a record no step was started
		return now, err
	}
	c := layout.Restore(now, mode(record.Change.Enabled), inventoried(record.Change.Before))
	switch problem := r.foreignInstance(c, record); {
	case c.Reason != "" || problem != "":
		return now, errors.New(c.Reason + problem)
	case len(c.Steps) == 0:
		return now, nil
	}
	if err := r.findHolders(ctx, c); err != nil || len(r.Holders) > 0 {
		return now, errors.Join(err, errors.New("in use by "+holders(r.Holders)))
	}
	if err := r.journal.beginChange(ctx, c, r.desired.Layout); err != nil {
		return now, err
	}
	return r.apply(ctx, c, false)
}

// backoff returns the delay after one more failure in a row.
func (r *reconciler) backoff(limit time.Duration) time.Duration {
	d := min(retryFirst<<min(r.gpu.failures, 10), limit)
	r.gpu.failures++
	return d
}

// done reports that nothing needs to change, and releases the hold.
func (r *reconciler) done(p Phase, reason string) result {
	r.gpu.failures, r.Holders, r.gpu.waitingSince, r.gpu.driverInUse = 0, nil, time.Time{}, false
	r.gpu.evictions = eviction.Evictions{}
	return r.requeue(p, reason, 0, resource.GPUHold{})
}

// requeue reports the progress of the GPU, and schedules the next reconciliation.
func (r *reconciler) requeue(p Phase, reason string, again time.Duration, hold resource.GPUHold) result {
	r.Retry = time.Time{}
	if again >= retryFirst {
		r.Retry = time.Now().Add(again)
	}
	r.report(p, reason, hold)
	return result{uuid: r.UUID, after: again}
}
