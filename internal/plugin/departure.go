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
	if entry.list.adopt(knownOf(saved, entry.list.name)) {
		s.claimsChanged()
	}
}

// knownOf returns the devices of a resource that kubelet has saved, by ID with the NUMA nodes of those that are held.
func knownOf(saved kubelet.Checkpoint, resource string) map[string][]int64 {
	nodes := map[string][]int64{}
	for _, id := range saved.Healthy[resource] {
		nodes[id] = nil
	}
	for _, d := range saved.Held {
		if d.Resource == resource {
			nodes[d.ID] = append(nodes[d.ID], d.NUMANodes...)
		}
	}
	return nodes
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

const (
	// reapInterval is the pace at which kubelet's accounts are read, while somebody waits for what they say.
	reapInterval = time.Second
	// A list that says nothing new is sent again to have kubelet save who holds devices: at the first pace, which doubles up to
	// the second one.
	refreshSoon  = time.Second
	refreshLater = 30 * time.Second
)

// reap drops departing devices when their time has come, and ends the servers of retired resources that have none left.
//
// What kubelet has saved may name pods that ended: it does not save the end of a pod. It saves what it knows when it receives
// a list. So lists are sent again where only what is saved names a holder, and where what is saved cannot be read.
func (s *Set) reap(ctx context.Context) error {
	ticker := s.collaborators.Clock.NewTicker(reapInterval)
	defer ticker.Stop()
	accounts := accounts{Collaborators: s.collaborators}
	var refresh refresh
	for {
		ticked := false
		select {
		case <-ctx.Done():
			return nil
		case <-s.departed:
		case <-ticker.C():
			ticked = true
		}
		waiting := s.foreignWaits()
		entries := s.entries()
		for _, entry := range entries {
			departs, ended := entry.list.leaving()
			if ended && ticked { // a tick after its last device was dropped: kubelet has the empty list
				s.end(entry)
			}
			waiting = waiting || departs
		}
		if !waiting {
			continue
		}
		e := accounts.read(ctx)
		now := s.collaborators.Clock.Now()
		doubtful, changed := s.note(e, now)
		for _, entry := range entries {
			d, c := entry.list.reap(e)
			doubtful, changed = doubtful || d, changed || c
		}
		if changed {
			s.claimsChanged()
		}
		if refresh.due(now, doubtful) {
			for _, entry := range entries {
				entry.list.resend()
			}
		}
	}
}

// refresh says when lists that say nothing new are sent again. The zero value is ready.
type refresh struct {
	last  time.Time
	pause time.Duration // from last to the next time
}

// due reports whether it is time to send them, where that would help.
func (r *refresh) due(now time.Time, helps bool) bool {
	if !helps {
		r.pause = 0
		return false
	}
	if now.Sub(r.last) < r.pause {
		return false
	}
	r.last, r.pause = now, min(max(2*r.pause, refreshSoon), refreshLater)
	return true
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
