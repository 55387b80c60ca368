package main

import (
	"context"
	"fmt"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// departure is how long a device that the plan no longer has, and that no pod holds, may be listed
// while nothing else happens: kubelet's checkpoint may name its last holder for half a minute, and
// ten seconds of evidence have to follow.
const departure = 90 * time.Second

// unserved is how long kubelet may have no device at all of a resource whose devices pods hold,
// while nothing else happens: no GPU of it can be read, and a daemon serves such a resource once
// nobody has done so for ten seconds (ADR 16). Kubelet does without for so long.
const unserved = 20 * time.Second

// again is how long after a violation the same thing is not looked at.
const again = 60 * time.Second

// watch holds the node to what must be true, at each event of kubelet's and between them, until ctx
// ends.
func (s *stage) watch(ctx context.Context) {
	go func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				s.check()
			case <-ctx.Done():
				return
			}
		}
	}()
	for e := range s.Follow(ctx, 0) {
		s.take(e)
	}
}

// take judges one event of kubelet's.
func (s *stage) take(e standin.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts[e.Kind.String()]++
	if e.Kind == standin.Crash {
		s.violateLocked("kubelet would have crashed: %v", e.Err)
	}
	if s.busy || e.Time.Before(s.settled) {
		return
	}
	switch e.Kind {
	case standin.StreamEnded, standin.Refused:
		if s.offersLocked(e.Resource) {
			s.violateLocked("%v, while nothing happened to it", e)
		}
	case standin.Listed:
		want := s.wantLocked()
		for _, d := range e.Devices {
			k := key{e.Resource, d.GetID()}
			if w, ok := want[k]; ok && w.healthy && d.GetHealth() != v1beta1.Healthy && s.settledLocked(w.gpu, e.Time) {
				s.violateLocked("%s was listed as Unhealthy, and %v is well", k, w.gpu)
				w.gpu.settled = e.Time.Add(again)
			}
		}
	default:
	}
}

// offersLocked reports whether there are devices of a resource and nothing happened to any of their
// GPUs.
func (s *stage) offersLocked(resource string) bool {
	offered := false
	for k, w := range s.wantLocked() {
		if k.resource == resource {
			offered = true
			if !s.settledLocked(w.gpu, time.Now()) {
				return false
			}
		}
	}
	return offered
}

// wanted is how kubelet has to see a device.
type wanted struct {
	gpu     *gpu
	healthy bool
}

// wantLocked returns the devices of the plan.
func (s *stage) wantLocked() map[key]wanted {
	want := map[key]wanted{}
	for _, g := range s.gpus {
		parts := map[string]bool{}
		for _, p := range g.parts {
			parts[p.UUID] = true
		}
		for _, k := range s.setting.keys(g) {
			d := held{key: k, slot: g.slot}
			if parts[k.uuid()] {
				d.part = k.uuid()
			}
			want[k] = wanted{g, g.good() && !s.conflictsLocked(d)}
		}
	}
	return want
}

// conflictsLocked reports whether a pod holds a GPU in another form than that of a device.
func (s *stage) conflictsLocked(d held) bool {
	for _, pod := range s.pods {
		for _, h := range pod {
			if h.excludes(d) {
				return true
			}
		}
	}
	return false
}

// settledLocked reports whether kubelet had to see a GPU as it is at a time. While a call hangs,
// what happens to other GPUs may not be found; what had been found before stays.
func (s *stage) settledLocked(g *gpu, at time.Time) bool {
	if s.busy || g.busy || at.Before(s.settled) || at.Before(g.settled) {
		return false
	}
	for _, o := range s.gpus {
		if o != g && o.problem != nil && o.problem.hangs && o.since.Before(g.settled) {
			return false
		}
	}
	return true
}

// viewLocked returns the devices that kubelet has: Healthy or not.
func (s *stage) viewLocked() map[key]bool {
	view := map[key]bool{}
	for resource := range s.Resources() {
		for id, healthy := range s.Devices(resource) {
			view[key{resource, id}] = healthy
		}
	}
	return view
}

// waitsLocked reports whether a device that a pod holds is of a resource that kubelet has no device
// of, for a short time only.
func (s *stage) waitsLocked(k key, view map[key]bool, now time.Time) bool {
	for listed := range view {
		if listed.resource == k.resource {
			return false
		}
	}
	since, known := s.unserved[k.resource]
	if !known {
		since = now
		s.unserved[k.resource] = now
	}
	return now.Sub(since) < unserved*s.options.slack
}

// check compares what kubelet has with what must be.
func (s *stage) check() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.counts["looks"]++
	if s.busy || now.Before(s.settled) {
		return
	}
	s.counts["looks at a settled node"]++
	want, view := s.wantLocked(), s.viewLocked()
	for k, w := range want {
		if !s.settledLocked(w.gpu, now) {
			continue
		}
		healthy, listed := view[k]
		s.counts[fmt.Sprintf("devices compared, Healthy %t", w.healthy)]++
		switch {
		case w.healthy && !listed:
			s.violateLocked("%s is not listed, and %v is well", k, w.gpu)
		case w.healthy && !healthy:
			s.violateLocked("%s is Unhealthy, and %v is well", k, w.gpu)
		case !w.healthy && healthy:
			s.violateLocked("%s is Healthy, and %v is not to be given out: %v", k, w.gpu, s.whyLocked(w.gpu))
		default:
			continue
		}
		w.gpu.settled = now.Add(again)
	}
	holders := map[key]string{}
	for k := range view {
		delete(s.unserved, k.resource)
	}
	for pod, devices := range s.pods {
		for _, h := range devices {
			holders[h.key] = pod
			if _, listed := view[h.key]; !listed && !s.waitsLocked(h.key, view, now) {
				s.violateLocked("%s is held by pod %s and not listed", h.key, pod)
				s.settled = now.Add(again)
			}
		}
	}
	s.checkExtrasLocked(want, view, holders, now)
}

// checkExtrasLocked checks the devices that are listed although they are not wanted and no pod
// holds them.
func (s *stage) checkExtrasLocked(want map[key]wanted, view map[key]bool, holders map[key]string, now time.Time) {
	for k, healthy := range view {
		if _, planned := want[k]; planned || holders[k] != "" {
			delete(s.extras, k)
			continue
		}
		g := s.gpuOfLocked(k.uuid())
		if g != nil && !s.settledLocked(g, now) {
			continue
		}
		// Where a pod holds a device that left the plan, as many replicas stay offered as the node has
		// devices in the new form.
		if healthy && (g == nil || !s.heldLocked(g)) {
			s.violateLocked("%s is Healthy, and nobody offers it", k)
			s.settled = now.Add(again)
		}
		if since, known := s.extras[k]; !known {
			s.extras[k] = now
		} else if now.Sub(since) > departure*s.options.slack {
			s.violateLocked("%s has been listed for %s, and no pod holds it", k, short(now.Sub(since)))
			s.extras[k] = now.Add(again)
		}
	}
}

// whyLocked says why a GPU may not be given out.
func (s *stage) whyLocked(g *gpu) string {
	if g.problem != nil && !g.problem.harmless {
		return g.problem.name
	}
	return "a pod holds it in another form"
}

// gpuOfLocked returns the GPU of a UUID, of a GPU or of a MIG device that it has or had; nil if
// there is none.
func (s *stage) gpuOfLocked(uuid string) *gpu {
	if slot, known := s.owners[uuid]; known {
		return s.gpus[slot]
	}
	return nil
}
