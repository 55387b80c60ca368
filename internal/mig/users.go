package mig

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/eviction"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// markPodInstances marks the instances that pods hold as in use.
func (r *reconciler) markPodInstances(ctx context.Context, now *layout.GPU) {
	if r.options.Holders == nil {
		return
	}
	found, _ := r.options.Snapshots.Value().GPU(r.UUID)
	var uuids []string
	gis := map[string]int{}
	for _, d := range found.MIGDevices {
		uuids, gis[d.UUID] = append(uuids, d.UUID), d.GI
	}
	// Before any step, findHolders finds the holders that are not known now.
	held, _ := r.options.Holders.Holders(ctx, uuids)
	for _, d := range held {
		uuid, _ := resource.SplitID(d.ID)
		now.InUse[gis[uuid]] = true
	}
}

// awaitUsers reports whether the change must wait for users of the devices removed by the
// change.
func (r *reconciler) awaitUsers(ctx context.Context, c layout.GPUChange, hold resource.GPUHold) (result, bool) {
	err := r.findHolders(ctx, c)
	if len(r.Holders) == 0 && err == nil {
		r.gpu.waitingSince, r.gpu.evictions = time.Time{}, eviction.Evictions{}
		return result{}, false
	}
	now := time.Now()
	if r.gpu.waitingSince.IsZero() {
		r.gpu.waitingSince = now
	}
	waited := now.Sub(r.gpu.waitingSince)
	switch {
	case len(r.Holders) == 0 && waited < fastPollFor:
		return r.requeue(PhaseWaiting, err.Error(), fastPoll, hold), true
	case len(r.Holders) == 0:
		return r.requeue(PhaseWaiting, err.Error(), slowPoll, hold), true
	}
	if !slices.ContainsFunc(r.Holders, func(h Holder) bool { return h.PID == 0 }) {
		r.gpu.driverInUse = true
		if res, wait := r.awaitClients(ctx, hold); wait {
			return res, true
		}
	}
	reason := "in use by " + holders(r.Holders)
	if r.desired.Evict && r.options.Evictor != nil {
		if r.desired.EvictTimeout > 0 && waited >= r.desired.EvictTimeout {
			r.gpu.waitingSince, r.gpu.evictions = time.Time{}, eviction.Evictions{}
			res := r.requeue(PhaseFailed, fmt.Sprintf("%s for more than %v", reason, r.desired.EvictTimeout),
				r.backoff(retryMax),
				resource.GPUHold{})
			res.failed = true
			return res, true
		}
		if refusals := r.evict(ctx); refusals != "" {
			reason += ": " + refusals
		}
	}
	return r.requeue(PhaseWaiting, reason, slowPoll, hold), true
}

// findHolders finds the users of the devices that the change removes. The error says why there may
// be others.
func (r *reconciler) findHolders(ctx context.Context, c layout.GPUChange) error {
	r.Holders = nil
	ended := map[int]bool{}
	switches := false // a change of the mode: all processes on the GPU must end
	for _, s := range c.Steps {
		switch s.Action {
		case inventory.MIGDestroyCompute, inventory.MIGDestroyInstance:
			ended[s.Part.ID] = true
		case inventory.MIGEnable, inventory.MIGDisable:
			switches = true
		default: // creates
		}
	}
	if len(ended) == 0 && !switches {
		return nil
	}
	found, _ := r.options.Snapshots.Value().GPU(r.UUID)
	devices := []string{r.UUID}
	for _, p := range c.Before.Instances {
		for _, compute := range p.Computes {
			at := slices.IndexFunc(found.MIGDevices,
				func(d inventory.MIGDevice) bool { return d.GI == p.ID && d.CI == compute.ID })
			switch {
			case !ended[p.ID]:
			case at < 0:
				return fmt.Errorf("the last scan of the node does not show the MIG device of GPU instance %d", p.ID)
			default:
				devices = append(devices, found.MIGDevices[at].UUID)
			}
		}
	}
	for _, p := range r.processes {
		if switches || slices.ContainsFunc(c.Before.Instances,
			func(i layout.Part) bool { return ended[i.ID] && mayRunOn(p, i.ID) }) {
			r.Holders = append(r.Holders, Holder{Device: r.UUID, PID: p.PID})
		}
	}
	if r.options.Holders == nil {
		return nil
	}
	held, err := r.options.Holders.Holders(ctx, devices)
	for _, d := range held {
		var h Holder
		h.Device, _ = resource.SplitID(d.ID)
		h.Pod.Namespace, h.Pod.Name, h.Pod.UID = d.SplitPod()
		if !slices.Contains(r.Holders, h) {
			r.Holders = append(r.Holders, h)
		}
	}
	return err
}

// evict evicts the pods among the Holders, repeatedly until they end. It returns why some are not
// evicted; empty if all are.
func (r *reconciler) evict(ctx context.Context) string {
	var pods []Pod
	for _, h := range r.Holders {
		if h.PID == 0 && !slices.Contains(pods, h.Pod) {
			pods = append(pods, h.Pod)
		}
	}
	return r.gpu.evictions.Evict(ctx, time.Now(), "MIG layout of GPU "+r.UUID, pods, r.options.Evictor.Evict)
}
