package plugin

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

// unreadFor is how long what kubelet has saved must be unreadable, while kubelet is there, before devices that nothing is known
// of no longer count as held.
const unreadFor = 10 * time.Second

// Claims returns the devices that the plan does not offer and that pods hold or may hold: those that depart or will, and those of
// resources that no server of this Set has. Nothing is known of a device before kubelet's accounts were read after it left the
// plan; a feed of Claimed tells when they were. Where they cannot be read for long, devices of which nothing is known are
// left out, and unread is the reason.
//
// The first call reads what kubelet has saved.
func (s *Set) Claims(plan resource.Plan) (claims []resource.Claim, unread string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.evidence == nil {
		saved, _ := s.collaborators.Checkpoint() // one that cannot be read says nothing
		s.evidence = &evidence{saved: saved, held: heldIn(saved)}
	}
	s.planned = map[string]bool{}
	for _, r := range plan.Resources {
		for _, d := range r.Devices {
			s.planned[d.UUID], s.planned[d.GPU] = true, true
		}
	}
	for name, entry := range s.resources {
		r, _ := plan.Resource(name)
		claims = append(claims, entry.list.claims(r, s.unread != "")...)
	}
	s.foreign = s.foreignLocked()
	for _, c := range s.foreign {
		r, _ := plan.Resource(c.Resource)
		if _, offered := r.Device(c.ID); !offered {
			claims = append(claims, c)
		}
	}
	return claims, s.unread
}

// foreignLocked returns the devices on GPUs of the plan that kubelet knows under resources that no server of this Set has.
func (s *Set) foreignLocked() []resource.Claim {
	var foreign []resource.Claim
	add := func(name, id, reason string) {
		uuid, _, _ := strings.Cut(id, "::")
		if _, served := s.resources[name]; !served && s.planned[uuid] {
			foreign = append(foreign, resource.Claim{Resource: name, ID: id, Reason: reason})
		}
	}
	for key, holder := range s.evidence.held {
		add(key.resource, key.id, heldBy(holder.pod))
	}
	for name, ids := range s.evidence.saved.Healthy {
		for _, id := range ids {
			if _, held := s.evidence.held[deviceKey{name, id}]; !held {
				add(name, id, "another device plugin offers it, or did so until a short time ago")
			}
		}
	}
	slices.SortFunc(foreign, func(a, b resource.Claim) int {
		return cmp.Or(strings.Compare(a.Resource, b.Resource), strings.Compare(a.ID, b.ID))
	})
	return foreign
}

// Claimed returns a feed that changes when Claims may say something else than before.
func (s *Set) Claimed() *feed.Feed[uint64] { return s.claimed }

func (s *Set) claimsChanged() { s.claimed.Publish(s.claimed.Value() + 1) }

// foreignWaits reports whether devices of resources that no server of this Set has are claimed.
func (s *Set) foreignWaits() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.foreign) > 0
}

// note keeps what kubelet's accounts say of resources that no server of this Set has, and whether they can be read. It reports
// whether it would help to have kubelet save again, and whether claims changed.
func (s *Set) note(e evidence, now time.Time) (doubtful, changed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	unread := ""
	switch {
	case !e.unsaved:
		s.unreadSince = time.Time{}
	case s.unreadSince.IsZero():
		s.unreadSince = now
	case now.Sub(s.unreadSince) >= unreadFor:
		unread = e.gap
	}
	before := s.foreign
	if e.gap == "" {
		s.evidence = &e
		s.foreign = s.foreignLocked()
		s.serveForeignLocked()
	}
	changed = unread != s.unread || !slices.Equal(before, s.foreign)
	s.unread = unread
	return e.unsaved || len(s.foreign) > 0, changed
}

// serveForeignLocked begins to serve the resources that nobody serves any more and whose devices pods hold. Kubelet crashes
// when it starts and no list names a device that a pod holds.
func (s *Set) serveForeignLocked() {
	for _, c := range s.foreign {
		_, held := s.evidence.held[deviceKey{c.Resource, c.ID}]
		if _, served := s.resources[c.Resource]; served || !held || len(s.evidence.saved.Healthy[c.Resource]) > 0 {
			continue
		}
		entry := &served{list: newList(c.Resource, s.collaborators.Clock)}
		entry.list.adopt(knownOf(s.evidence.saved, c.Resource))
		entry.list.clear(true)
		s.resources[c.Resource] = entry
		s.added.Publish(s.added.Value() + 1)
	}
}

// heldBy is the reason of a device that a pod holds.
func heldBy(pod string) string { return "pod " + pod + " holds it" }
