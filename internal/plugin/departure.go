package plugin

import (
	"context"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"
)

// What a Set does about devices and resources on their way out. When a list may let go of a device, list.go decides.

// adoptTimeout bounds the wait for kubelet's account before the first registration. A kubelet that is not there says so
// at once; one that is slow to answer is waited for, as the first list would drop what it does not know; one that hangs
// not for long, as pods that are admitted before the registration fail.
const adoptTimeout = time.Second

// adopt lists, on their way out, the devices that kubelet knows from an earlier process and this one does not have.
func (s *Set) adopt(ctx context.Context, l *list) {
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
	for _, ask := range []func(context.Context) (map[string][]string, error){
		s.collaborators.Accountant.Allocatable, s.collaborators.Accountant.Held,
	} {
		ids, err := ask(ctx)
		if err != nil {
			klog.FromContext(ctx).V(2).Info("Cannot tell what kubelet knows of the resource", "reason", err.Error())
			return
		}
		l.adopt(ids[l.name])
	}
}

// reapInterval is the pace at which departing devices are looked at, while there are any.
const reapInterval = time.Second

// reap drops departing devices when their time has come, and ends the servers of retired resources that have none left.
func (s *Set) reap(ctx context.Context) error {
	ticker := s.collaborators.Clock.NewTicker(reapInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
		var held map[string][]string
		asked := false
		for _, entry := range s.entries() {
			departing, ended := entry.list.leaving()
			if ended { // a tick after its last device was dropped: kubelet has the empty list
				s.end(entry)
			}
			if !departing {
				continue
			}
			if !asked {
				held, asked = s.held(ctx), true
			}
			entry.list.reap(holds(held, entry.list.name))
		}
	}
}

func (s *Set) entries() []*served {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.resources))
}

// held returns the devices that pods hold, by resource; nil when kubelet's account cannot be asked.
func (s *Set) held(ctx context.Context) map[string][]string {
	ctx, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	held, err := s.collaborators.Accountant.Held(ctx)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot tell which devices pods hold", "reason", err.Error())
		return nil
	}
	return held
}

// holds returns who tells by ID whether a pod holds a device of the resource: nil, as list.reap takes it, if held is.
func holds(held map[string][]string, resource string) func(id string) bool {
	if held == nil {
		return nil
	}
	ids := make(map[string]bool, len(held[resource])) // replicas are counted in thousands
	for _, id := range held[resource] {
		ids[id] = true
	}
	return func(id string) bool { return ids[id] }
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
