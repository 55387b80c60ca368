package listing

import (
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// shrinkWait is how long removed devices stay offered at most without Approve.
const shrinkWait = 30 * time.Second

// waitsForTaint is why the new form of a GPU is not offered before Approve.
const waitsForTaint = "the node gets fewer devices, and is tainted before that"

// A pendingShrink is a change that leaves a resource with fewer devices and waits for Approve.
type pendingShrink struct {
	number uint64    // of this change, or of the last one
	since  time.Time // zero if none waits
}

// overAt returns when the change has waited long enough; zero if none waits.
func (w pendingShrink) overAt() time.Time {
	if w.since.IsZero() {
		return time.Time{}
	}
	return w.since.Add(shrinkWait)
}

// isOver reports whether the change has waited long enough.
func (w pendingShrink) isOver(now time.Time) bool {
	at := w.overAt()
	return !at.IsZero() && !now.Before(at)
}

// Approve lets the pending change proceed: the lists lose the devices. The number
// of another change has no effect.
func (s State) Approve(number uint64, h *holders.Holders, now time.Time) State {
	if s.shrink.since.IsZero() || s.shrink.number != number {
		return s
	}
	n := step{s.clone(), h, now}
	n.releaseKept()
	return n.Again(h, now)
}

// keepUntilApproved decides which devices that left the plan stay offered until Approve.
func (n *step) keepUntilApproved() {
	var usable map[string]bool
	announce := n.options.AnnounceShrink
	if announce {
		usable = n.usable()
	}
	switch fewer := announce && (n.drain.next != "" || n.shrinks(usable)); {
	case !fewer || n.shrink.isOver(n.now):
		n.releaseKept()
	case n.shrink.since.IsZero():
		n.shrink = pendingShrink{number: n.shrink.number + 1, since: n.now}
	}
	waits := !n.shrink.since.IsZero()
	for _, l := range n.lists {
		for id, d := range l.retiring {
			d.isKept = waits && d.wasOffered && usable[d.device.GPU]
			l.retiring[id] = d
		}
	}
}

// releaseKept ends the wait of all devices. They begin to retire now, because the
// kubelet may be allocating them.
func (n *step) releaseKept() {
	n.shrink.since = time.Time{}
	if n.drain.next != "" {
		n.drain.begin(n.now)
	}
	for name, l := range n.lists {
		for id, d := range l.retiring {
			if d.isKept {
				d.lastGrant = time.Time{}
				d.State = n.holders.Leaves(holders.Key{Resource: name, ID: id}, true)
			}
			d.wasOffered, d.isKept = false, false
			l.retiring[id] = d
		}
	}
}

// usable returns the UUIDs of the GPUs whose planned devices are all Healthy: under
// no hold, not unhealthy, and not of another owner.
func (n *step) usable() map[string]bool {
	usable := map[string]bool{}
	for _, r := range n.plan.Resources {
		for _, d := range r.Devices {
			before, known := usable[d.GPU]
			usable[d.GPU] = d.Healthy && (before || !known)
		}
	}
	return usable
}

// shrinks reports whether a resource loses devices with the devices that have just left the plan.
func (n *step) shrinks(usable map[string]bool) bool {
	var forms []resource.HeldShape
	before := map[string]int{} // how many devices each resource offers
	for name, l := range n.lists {
		for _, d := range l.retiring {
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
	for _, h := range n.plan.Conflicts(forms) {
		waits[[2]string{h.Resource, h.UUID}] = true
	}
	after := map[string]int{}
	for _, r := range n.plan.Resources {
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
	for name, count := range before {
		if count > after[name] {
			return true
		}
	}
	return false
}
