package plugin

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// What a Set does about devices and resources on their way out. When a list may let go of a device, list.go decides.

type deviceKey struct{ resource, id string }

// A holder is the pod that holds a device.
type holder struct {
	pod       string
	savedOnly bool // only what kubelet has saved says so, and the pod may have ended since
}

// evidence is what kubelet's accounts say, at one moment, of who holds devices.
type evidence struct {
	kubelet uint64 // incarnation of the kubelet that was there; 0 if none was
	held    map[deviceKey]holder
	// gap is why a device that is not held by this may be held nevertheless; empty if it cannot.
	gap     string
	unsaved bool // what kubelet has saved cannot be read
}

// accounts reads both accounts of kubelet. It is for one goroutine.
type accounts struct {
	Collaborators
	kubelet  uint64 // incarnation of the kubelet that was there when they were read last
	answered bool   // that kubelet has answered through PodResources
}

// read says who holds devices.
//
// What kubelet has saved names every holder: kubelet itself starts from it. PodResources tells less: no init containers, and
// hardly a pod until kubelet has heard from the API server. It can only add to what is saved, where kubelet could not save.
func (a *accounts) read(ctx context.Context) evidence {
	e := evidence{kubelet: a.Presence.Value().Incarnation, held: map[deviceKey]holder{}}
	saved, unsaved := a.Checkpoint()
	for _, d := range saved.Held {
		e.held[deviceKey{d.Resource, d.ID}] = holder{pod: d.Pod, savedOnly: true}
	}
	ctx, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	told, untold := a.Accountant.Held(ctx)
	for _, d := range told {
		e.held[deviceKey{d.Resource, d.ID}] = holder{pod: d.Pod}
	}
	if a.kubelet != e.kubelet {
		a.kubelet, a.answered = e.kubelet, false
	}
	switch {
	case e.kubelet == 0:
		e.gap = "kubelet is not there"
	case a.Presence.Value().Incarnation != e.kubelet:
		e.gap = "kubelet has just restarted"
	case unsaved != nil:
		e.gap, e.unsaved = unsaved.Error(), true
	case untold != nil && a.answered:
		e.gap = untold.Error()
	}
	a.answered = a.answered || untold == nil
	return e
}

// adoptTimeout bounds the wait for PodResources before the first registration where kubelet has saved nothing that can be
// read. A kubelet that is not there says so at once; one that hangs is not waited for, as pods fail that are admitted before
// the registration.
const adoptTimeout = time.Second

// adopt lists, on their way out, the devices of the resource that kubelet knows and the plan does not have: an earlier process
// listed them, or another one that is about to end. It is called before each registration. What kubelet has saved is enough;
// PodResources is asked in its place before the first one.
func (s *Set) adopt(ctx context.Context, entry *served) {
	s.mu.Lock()
	first := !entry.adopted
	entry.adopted = true
	s.mu.Unlock()
	saved, err := s.collaborators.Checkpoint()
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot read what kubelet has saved", "reason", err.Error())
		if !first {
			return
		}
		saved = s.told(ctx)
	}
	known := map[string][]int64{}
	for _, id := range saved.Healthy[entry.list.name] {
		known[id] = nil
	}
	for _, d := range saved.Held {
		if d.Resource == entry.list.name {
			known[d.ID] = append(known[d.ID], d.NUMANodes...)
		}
	}
	entry.list.adopt(known)
}

// told returns what PodResources tells, which may be a part.
func (s *Set) told(ctx context.Context) kubelet.Checkpoint {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	patience := s.collaborators.Clock.NewTimer(adoptTimeout)
	defer patience.Stop()
	go func() {
		select {
		case <-patience.C():
			cancel()
		case <-ctx.Done():
		}
	}()
	healthy, err := s.collaborators.Accountant.Allocatable(ctx)
	held, err2 := s.collaborators.Accountant.Held(ctx)
	if err := cmp.Or(err, err2); err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot tell what kubelet knows of the resource", "reason", err.Error())
	}
	return kubelet.Checkpoint{Healthy: healthy, Held: held}
}

// reapInterval is the pace at which kubelet's accounts are read, while there are departing devices.
const reapInterval = time.Second

// reap drops departing devices when their time has come, and ends the servers of retired resources that have none left.
func (s *Set) reap(ctx context.Context) error {
	ticker := s.collaborators.Clock.NewTicker(reapInterval)
	defer ticker.Stop()
	accounts := accounts{Collaborators: s.collaborators}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
		var departing []*list
		for _, entry := range s.entries() {
			departs, ended := entry.list.leaving()
			if ended { // a tick after its last device was dropped: kubelet has the empty list
				s.end(entry)
			}
			if departs {
				departing = append(departing, entry.list)
			}
		}
		if departing == nil {
			continue
		}
		e := accounts.read(ctx)
		for _, l := range departing {
			l.reap(e)
		}
	}
}

func (s *Set) entries() []*served {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.resources))
}

// end ends the lives of a retired resource, unless the plan has it again.
func (s *Set) end(entry *served) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ended := entry.list.leaving(); ended && entry.stop != nil {
		entry.stop()
	}
}

// forget takes a retired resource out of the Set and reports whether it did: not if the plan has it again.
func (s *Set) forget(ctx context.Context, entry *served) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ended := entry.list.leaving(); !ended {
		return false
	}
	klog.FromContext(ctx).Info("Resource retired")
	delete(s.resources, entry.list.name)
	return true
}
