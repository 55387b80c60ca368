package plugin

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

// unreadableFor is how long kubelet's checkpoint must be unreadable, while kubelet runs, before a device no longer counts as held
// although nothing is known about it.
const unreadableFor = 10 * time.Second

// Claims returns the devices that the plan does not offer and that pods hold or may hold: devices that left the plan or are
// about to, and devices of resources that this Set does not serve. A device that has just left the plan may be held until
// kubelet's checkpoint was read again; Claimed tells when that has happened. If the checkpoint cannot be read for 10 s, only
// devices that are known to be held are returned, and unreadable is the reason.
//
// The first call reads the checkpoint.
func (s *Set) Claims(plan resource.Plan) (claims []resource.Claim, unreadable string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.evidence == nil {
		checkpoint, _ := s.collaborators.Checkpoint() // if it cannot be read, it is empty
		s.evidence = &evidence{checkpoint: checkpoint, held: heldIn(checkpoint)}
	}
	s.planned = map[string]bool{}
	for _, r := range plan.Resources {
		for _, d := range r.Devices {
			s.planned[d.UUID], s.planned[d.GPU] = true, true
		}
	}
	for name, entry := range s.resources {
		r, _ := plan.Resource(name)
		claims = append(claims, entry.list.claims(r, s.unreadable != "")...)
	}
	s.foreign = s.foreignLocked()
	for _, c := range s.foreign {
		r, _ := plan.Resource(c.Resource)
		if _, offered := r.Device(c.ID); !offered {
			claims = append(claims, c)
		}
	}
	return claims, s.unreadable
}

// foreignLocked returns the devices on GPUs of the plan that kubelet has under resources that this Set does not serve.
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
	for name, ids := range s.evidence.checkpoint.Healthy {
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

// Claimed returns a feed that changes when the result of Claims may have changed.
func (s *Set) Claimed() *feed.Feed[uint64] { return s.claimed }

func (s *Set) claimsChanged() { s.claimed.Publish(s.claimed.Value() + 1) }

// hasForeign reports whether there are devices of the plan's GPUs under resources that this Set does not serve.
func (s *Set) hasForeign() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.foreign) > 0
}

// update takes in new evidence about resources that this Set does not serve, and about whether the checkpoint can be read. It
// reports whether a new checkpoint would say more, and whether the claims changed.
func (s *Set) update(e evidence, now time.Time) (outdated, changed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	unreadable := ""
	switch {
	case !e.unreadable:
		s.unreadableSince = time.Time{}
	case s.unreadableSince.IsZero():
		s.unreadableSince = now
	case now.Sub(s.unreadableSince) >= unreadableFor:
		unreadable = e.gap
	}
	before := s.foreign
	if e.gap == "" {
		s.evidence = &e
		s.foreign = s.foreignLocked()
		s.serveForeignLocked()
	}
	changed = unreadable != s.unreadable || !slices.Equal(before, s.foreign)
	s.unreadable = unreadable
	return e.unreadable || len(s.foreign) > 0, changed
}

// forgetUnreadable forgets that the checkpoint could not be read: nothing waits for it any more.
func (s *Set) forgetUnreadable() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unreadable, s.unreadableSince = "", time.Time{}
}

// serveForeignLocked begins to serve resources that no plugin serves any more and whose devices pods hold. Otherwise kubelet
// crashes at its next start, because no list has the devices.
func (s *Set) serveForeignLocked() {
	for _, c := range s.foreign {
		_, held := s.evidence.held[deviceKey{c.Resource, c.ID}]
		if _, served := s.resources[c.Resource]; served || !held || len(s.evidence.checkpoint.Healthy[c.Resource]) > 0 {
			continue
		}
		entry := &served{list: newList(c.Resource, s.collaborators.Clock)}
		entry.list.adopt(knownOf(s.evidence.checkpoint, c.Resource))
		entry.list.clear(true)
		s.resources[c.Resource] = entry
		s.added.Publish(s.added.Value() + 1)
	}
}

// heldBy is the reason of a device that a pod holds.
func heldBy(pod string) string { return "pod " + pod + " holds it" }
