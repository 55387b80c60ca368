package serve

import (
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// fewerWait is how long devices that are to go stay on offer at most, if nobody calls Proceed.
const fewerWait = 30 * time.Second

// waitsForTaint is why the new form of a GPU is not on offer before Proceed.
const waitsForTaint = "the node gets fewer devices, and is tainted before that"

// A waiting is a change by which a resource gets fewer devices, and which waits for Proceed.
type waiting struct {
	number uint64    // of this change, or of the last one
	since  time.Time // zero if none waits
}

// over reports whether the change has waited for long enough.
func (w waiting) over(now time.Time) bool { return !w.since.IsZero() && now.Sub(w.since) >= fewerWait }

// Fewer returns the feed of the number of the change that takes devices away and waits for Proceed;
// 0 if none waits. A change waits only where the Options say Announce, and for 30 s at most.
// Devices that are sick, or that the device plugin may not give, never wait.
func (s *Set) Fewer() *feed.Feed[uint64] { return s.fewer }

// Proceed has a change that waits go on: the lists lose the devices. A number of another change has
// no effect.
func (s *Set) Proceed(number uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiting.since.IsZero() || s.waiting.number != number {
		return
	}
	s.letGo()
	s.refresh()
	s.mayDepart()
}

// keep decides which devices that left the plan stay on offer until Proceed is called.
func (s *Set) keep() {
	var usable map[string]bool
	if s.asked.options.Announce {
		usable = s.usable()
	}
	now := s.collaborators.Clock.Now()
	switch fewer := s.asked.options.Announce && (s.forms.drain.next != "" || s.isFewer(usable)); {
	case !fewer || s.waiting.over(now):
		s.letGo()
	case s.waiting.since.IsZero():
		s.waiting = waiting{number: s.waiting.number + 1, since: now}
	}
	waits := !s.waiting.since.IsZero()
	for _, entry := range s.resources {
		for id, d := range entry.list.departing {
			d.kept = waits && d.left && usable[d.device.GPU]
			entry.list.departing[id] = d
		}
	}
	number := uint64(0)
	if waits {
		number = s.waiting.number
	}
	if s.fewer.Value() != number {
		s.fewer.Publish(number)
	}
}

// letGo has no device wait any more. Those that waited begin to depart now: kubelet may be
// allocating them.
func (s *Set) letGo() {
	s.waiting.since = time.Time{}
	if s.forms.drain.next != "" {
		s.forms.drain.begin(s.collaborators.Clock.Now())
	}
	for _, entry := range s.resources {
		for id, d := range entry.list.departing {
			if d.kept {
				d.given = time.Time{}
				d.possession = possession{allocated: entry.list.allocated[id], waits: waitsForReading}
			}
			d.left, d.kept = false, false
			entry.list.departing[id] = d
		}
	}
}

// allLeft notes that all departing devices were on offer until now: another process of this program
// may serve them.
func (l *list) allLeft() {
	for id, d := range l.departing {
		d.left = true
		l.departing[id] = d
	}
}

// usable returns the UUIDs of the GPUs whose devices in the plan are all Healthy: under no hold,
// not sick, and not of another owner.
func (s *Set) usable() map[string]bool {
	usable := map[string]bool{}
	for _, r := range s.asked.plan.Resources {
		for _, d := range r.Devices {
			before, known := usable[d.GPU]
			usable[d.GPU] = d.Healthy && (before || !known)
		}
	}
	return usable
}

// isFewer reports whether a resource has fewer devices without those that have just left the plan.
func (s *Set) isFewer(usable map[string]bool) bool {
	var forms []resource.HeldShape
	before := map[string]int{} // how many devices each resource has on offer
	for name, entry := range s.resources {
		for _, d := range entry.list.departing {
			if d.left && usable[d.device.GPU] {
				before[name]++
				forms = append(forms, d.heldForm())
			}
		}
	}
	if len(before) == 0 {
		return false
	}
	waits := map[[2]string]bool{} // devices of the plan whose GPU is in another form, by resource and UUID
	for _, h := range s.asked.plan.Conflicts(forms) {
		waits[[2]string{h.Resource, h.UUID}] = true
	}
	after := map[string]int{}
	for _, r := range s.asked.plan.Resources {
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
