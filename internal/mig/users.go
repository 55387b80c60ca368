package mig

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const (
	// evictAgain is the time between two evictions of a pod that does not end, and evictTimeout bounds
	// one request.
	evictAgain   = 10 * time.Second
	evictTimeout = 10 * time.Second
)

// markHeld adds to the instances in use those that pods hold.
func (t *turn) markHeld(ctx context.Context, now *layout.GPU) {
	if t.options.Users == nil {
		return
	}
	found, _ := t.options.Snapshots.Value().GPU(t.UUID)
	var uuids []string
	gis := map[string]int{}
	for _, d := range found.MIGDevices {
		uuids, gis[d.UUID] = append(uuids, d.UUID), d.GI
	}
	held, _ := t.options.Users.Users(ctx, uuids) // what it does not know now is asked before anything is done
	for _, d := range held {
		uuid, _ := resource.SplitID(d.ID)
		now.InUse[gis[uuid]] = true
	}
}

// awaitUsers reports whether users of what a change ends are to be waited for.
func (t *turn) awaitUsers(ctx context.Context, c layout.GPUChange, hold resource.GPUHold) (outcome, bool) {
	err := t.findHolders(ctx, c)
	if len(t.Holders) == 0 && err == nil {
		t.gpu.waiting, t.gpu.told = time.Time{}, nil
		return outcome{}, false
	}
	now := time.Now()
	if t.gpu.waiting.IsZero() {
		t.gpu.waiting = now
	}
	waited := now.Sub(t.gpu.waiting)
	switch {
	case len(t.Holders) == 0 && waited < soonFor:
		return t.wait(PhaseWaiting, err.Error(), soon, hold), true
	case len(t.Holders) == 0:
		return t.wait(PhaseWaiting, err.Error(), later, hold), true
	}
	if !slices.ContainsFunc(t.Holders, func(h Holder) bool { return h.PID == 0 }) {
		t.gpu.blocked = true
		if o, waits := t.awaitClients(ctx, hold); waits {
			return o, true
		}
	}
	reason := "in use by " + holders(t.Holders)
	if t.wish.Evict && t.options.Evictor != nil {
		if t.wish.EvictTimeout > 0 && waited >= t.wish.EvictTimeout {
			t.gpu.waiting, t.gpu.told = time.Time{}, nil
			o := t.wait(PhaseFailed, fmt.Sprintf("%s for more than %v", reason, t.wish.EvictTimeout), t.pause(retryMost),
				resource.GPUHold{})
			o.failed = true
			return o, true
		}
		if err := t.evict(ctx); err != nil {
			reason += ": " + err.Error()
		}
	}
	return t.wait(PhaseWaiting, reason, later, hold), true
}

// findHolders finds the users of what a change ends. The error says why it is not known whether
// there are others.
func (t *turn) findHolders(ctx context.Context, c layout.GPUChange) error {
	t.Holders = nil
	ended := map[int]bool{}
	switches := false // the mode: all processes of the GPU have to end
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
	found, _ := t.options.Snapshots.Value().GPU(t.UUID)
	devices := []string{t.UUID}
	for _, p := range c.Before.Instances {
		for _, compute := range p.Computes {
			at := slices.IndexFunc(found.MIGDevices, func(d inventory.MIGDevice) bool { return d.GI == p.ID && d.CI == compute.ID })
			switch {
			case !ended[p.ID]:
			case at < 0:
				return fmt.Errorf("the last look at the node does not show the MIG device of GPU instance %d", p.ID)
			default:
				devices = append(devices, found.MIGDevices[at].UUID)
			}
		}
	}
	for _, p := range t.processes {
		if switches || slices.ContainsFunc(c.Before.Instances,
			func(i layout.Part) bool { return ended[i.ID] && on(p, i.ID) }) {
			t.Holders = append(t.Holders, Holder{Device: t.UUID, PID: p.PID})
		}
	}
	if t.options.Users == nil {
		return nil
	}
	held, err := t.options.Users.Users(ctx, devices)
	for _, d := range held {
		var h Holder
		h.Device, _ = resource.SplitID(d.ID)
		h.Pod.Namespace, h.Pod.Name, h.Pod.UID = d.SplitPod()
		if !slices.Contains(t.Holders, h) {
			t.Holders = append(t.Holders, h)
		}
	}
	return err
}

// An eviction is the last request to evict a pod: when it was made, and why it was refused; nil if
// it was not.
type eviction struct {
	at      time.Time
	refused error
}

// evict has the pods evicted that are waited for, each again and again until it ends. The error
// says why some of them are not.
func (t *turn) evict(ctx context.Context) error {
	if t.gpu.told == nil {
		t.gpu.told = map[Pod]eviction{}
	}
	var pods []Pod
	var problems []error
	for _, h := range t.Holders {
		if h.PID != 0 || slices.Contains(pods, h.Pod) {
			continue
		}
		pods = append(pods, h.Pod)
		last, told := t.gpu.told[h.Pod]
		if now := time.Now(); !told || now.Sub(last.at) >= evictAgain {
			limited, cancel := context.WithTimeout(ctx, evictTimeout)
			last = eviction{now, t.options.Evictor.Evict(limited, h.Pod)}
			cancel()
			t.gpu.told[h.Pod] = last
			if last.refused == nil {
				t.log.Info("Evicted a pod, so that its GPU can be divided anew", "gpu", t.UUID, "namespace", h.Pod.Namespace, "pod",
					h.Pod.Name)
			}
		}
		problems = append(problems, last.refused)
	}
	return errors.Join(problems...)
}
