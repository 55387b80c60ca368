package serve

import (
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// shrinkWait is how long removed devices stay on offer at most without a call of ApproveShrink.
const shrinkWait = 30 * time.Second

// waitsForTaint is why the new form of a GPU is not on offer before ApproveShrink.
const waitsForTaint = "the node gets fewer devices, and is tainted before that"

// A pendingShrink is a change that leaves a resource with fewer devices and waits for
// ApproveShrink.
type pendingShrink struct {
	number uint64    // of this change, or of the last one
	since  time.Time // zero if none waits
}

// over reports whether the change has waited long enough.
func (w pendingShrink) over(now time.Time) bool {
	return !w.since.IsZero() && now.Sub(w.since) >= shrinkWait
}

// PendingShrink returns the feed of the number of the change that removes devices and waits for
// ApproveShrink; 0 if no change waits. A change waits only with Options.AnnounceShrink, and for 30
// s at most. Unhealthy devices, and devices that the device plugin may not give, never wait.
func (s *Servers) PendingShrink() *feed.Feed[uint64] { return s.shrinkNumber }

// ApproveShrink lets the pending change proceed: the lists lose the devices. The number of another
// change has no effect.
func (s *Servers) ApproveShrink(number uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.shrink.since.IsZero() || s.shrink.number != number {
		return
	}
	s.releaseKept()
	s.refresh()
	s.wakeReaper()
}

// keepUntilApproved decides which devices that left the plan stay on offer until ApproveShrink.
func (s *Servers) keepUntilApproved() {
	var usable map[string]bool
	if s.wanted.options.AnnounceShrink {
		usable = s.usable()
	}
	now := s.collaborators.Clock.Now()
	switch fewer := s.wanted.options.AnnounceShrink && (s.forms.drain.next != "" || s.shrinks(usable)); {
	case !fewer || s.shrink.over(now):
		s.releaseKept()
	case s.shrink.since.IsZero():
		s.shrink = pendingShrink{number: s.shrink.number + 1, since: now}
	}
	waits := !s.shrink.since.IsZero()
	for _, entry := range s.resources {
		for id, d := range entry.list.retiring {
			d.keptOnOffer = waits && d.wasOffered && usable[d.device.GPU]
			entry.list.retiring[id] = d
		}
	}
	number := uint64(0)
	if waits {
		number = s.shrink.number
	}
	if s.shrinkNumber.Value() != number {
		s.shrinkNumber.Publish(number)
	}
}

// releaseKept ends the wait of all devices. They begin to retire now, because the kubelet may be
// allocating them.
func (s *Servers) releaseKept() {
	s.shrink.since = time.Time{}
	if s.forms.drain.next != "" {
		s.forms.drain.begin(s.collaborators.Clock.Now())
	}
	for _, entry := range s.resources {
		for id, d := range entry.list.retiring {
			if d.keptOnOffer {
				d.lastGrant = time.Time{}
				d.State = s.holders.Leaves(entry.list.key(id), true)
			}
			d.wasOffered, d.keptOnOffer = false, false
			entry.list.retiring[id] = d
		}
	}
}

// markAllOffered records that all retiring devices were on offer until now, because another process
// of this program may serve them.
func (l *list) markAllOffered() {
	for id, d := range l.retiring {
		d.wasOffered = true
		l.retiring[id] = d
	}
}

// usable returns the UUIDs of the GPUs whose planned devices are all Healthy: under no hold, not
// unhealthy, and not of another owner.
func (s *Servers) usable() map[string]bool {
	usable := map[string]bool{}
	for _, r := range s.wanted.plan.Resources {
		for _, d := range r.Devices {
			before, known := usable[d.GPU]
			usable[d.GPU] = d.Healthy && (before || !known)
		}
	}
	return usable
}

// shrinks reports whether a resource loses devices with the devices that have just left the plan.
func (s *Servers) shrinks(usable map[string]bool) bool {
	var forms []resource.HeldShape
	before := map[string]int{} // how many devices each resource has on offer
	for name, entry := range s.resources {
		for _, d := range entry.list.retiring {
			if d.wasOffered && usable[d.device.GPU] {
				before[name]++
				forms = append(forms, d.heldForm())
			}
		}
	}
	if len(before) == 0 {
		return false
	}
	waits := map[[2]string]bool{} // devices of the plan whose GPU is in another form, by resource and UUID
	for _, h := range s.wanted.plan.Conflicts(forms) {
		waits[[2]string{h.Resource, h.UUID}] = true
	}
	after := map[string]int{}
	for _, r := range s.wanted.plan.Resources {
		for d := range r.All() {
			if !d.Healthy {
				continue
			}
			after[r.Name]++
			if !waits[[2]string{r.Name, d.UUID}] {
				before[r.Name]++
			}
		}
	}
	for name, n := range before {
		if n > after[name] {
			return true
		}
	}
	return false
}
