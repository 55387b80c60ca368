package listing

import (
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const (
	// ReadInterval is how often the accounts are read while devices are retiring.
	ReadInterval = time.Second
	// unitsPause is how often the accounts are read for units alone, once nothing
	// has changed for unitsQuiet.
	unitsPause = 5 * time.Second
	unitsQuiet = 10 * time.Second
	// unservedFor is how long no plugin must be known to serve a resource before this plugin serves
	// the resource for the pods that hold its devices. A plugin that restarts, or registers with a
	// new kubelet, needs less time. The kubelet tolerates this time without a server.
	unservedFor = 10 * time.Second
	// resendSoon and resendLater are the shortest and the longest pause before lists are sent again
	// to make the kubelet write its checkpoint. The pause doubles.
	resendSoon  = time.Second
	resendLater = 30 * time.Second
)

// A Reading is one reading of the kubelet's accounts.
type Reading struct {
	holders.Account
	// Healthy are the devices that the kubelet considers healthy, by resource. Alone says that no
	// other GPU device plugin listens. Both are known only if HasUnserved.
	Healthy map[string][]string
	Alone   bool
}

// Read applies a reading of the accounts, about which h is told. It drops the retiring devices that
// no pod has held for holders.FreeFor, and adds lists for resources that nobody serves although
// pods hold their devices. outdated says that the kubelet's checkpoint may be outdated.
func (s State) Read(r Reading, h *holders.Holders, now time.Time) (next State, outdated bool) {
	n := step{s.clone(), h, now}
	since, kubelet, unserved := n.unservedSince, h.Complete().Kubelet, n.unserved
	n.unservedSince = map[string]time.Time{}
	changed := h.Tell(r.Account, now)
	if r.UnknownBecause == "" {
		if kubelet != r.Kubelet {
			since = nil
		}
		n.unserved = n.findUnserved(h)
		changed = changed || !slices.Equal(unserved, n.unserved)
		changed = n.serveUnserved(r, since) || changed
	}
	outdated = r.Unreadable || len(n.unserved) > 0
	changed = changed || s.isDue(now)
	for name, l := range n.lists {
		o, c := n.readRetiring(name, l, r.Account)
		outdated, changed = outdated || o, changed || c
		o, c = n.readUnits(name, l, r.Account)
		outdated, changed = outdated || o, changed || c
	}
	if changed {
		return n.Again(h, now), outdated
	}
	return n.State, outdated
}

// isDue reports whether time alone changes the Decision.
func (s State) isDue(now time.Time) bool {
	return s.latest != nil && !s.latest.Again.IsZero() && !now.Before(s.latest.Again)
}

// readRetiring applies an account to the retiring devices of a list. It reports whether the
// checkpoint may be outdated, and whether the list or the reasons for waiting changed.
func (n *step) readRetiring(name string, l *list, a holders.Account) (outdated, changed bool) {
	for id, d := range l.retiring {
		before, key := d, holders.Key{Resource: name, ID: id}
		outdated = outdated || a.Held[key].CheckpointOnly
		d.State = before.Read(n.holders, a, key, n.now)
		d.gpuReassigned = d.gpuReassigned && !d.State.Counts()
		dropped := d.IsOver(a.Began) && !d.isKept
		changed = changed || dropped || d.Counts() != before.Counts() ||
			d.Counts() && !d.isKept && d.WaitsFor() != before.WaitsFor()
		if l.retiring[id] = d; dropped {
			delete(l.retiring, id)
		}
	}
	return outdated, changed
}

// findUnserved returns the kubelet's devices of resources without a list: the devices on GPUs of
// the plan, and the devices that this program may have offered on other GPUs.
func (s State) findUnserved(h *holders.Holders) []resource.HeldShape {
	var unserved []resource.HeldShape
	add := func(name, id, reason string) {
		uuid, _ := resource.SplitID(id)
		if !s.Has(name) && (s.uuids[uuid] || resource.MayBeOurs(name, id)) {
			device, _ := s.plan.NodeDevice(uuid)
			unserved = append(unserved, resource.HeldShape{Resource: name, ID: id, GPU: device.GPU, Reason: reason})
		}
	}
	for key, holder := range h.Complete().Held {
		add(key.Resource, key.ID, holder.Reason())
	}
	for name, ids := range h.Complete().Listed {
		for _, id := range ids {
			if !h.IsNamed(holders.Key{Resource: name, ID: id}) {
				add(name, id, "another device plugin offers it, or did so until a short time ago")
			}
		}
	}
	order.Sort(unserved, compareForms)
	return unserved
}

// HasUnserved reports whether the kubelet has devices of resources that have no
// list and may need a list.
func (s State) HasUnserved() bool { return len(s.unserved) > 0 }

// serveUnserved adds lists for resources whose devices pods hold and which no plugin has served for
// unservedFor, if this program may have offered them: their GPUs cannot be read now, or the
// configuration has changed. So the kubelet keeps listing the devices of its pods. It reports
// whether it added lists. since says how long each resource has been known.
func (n *step) serveUnserved(r Reading, since map[string]time.Time) (added bool) {
	if !r.Alone {
		return false
	}
	ours := map[string]bool{}
	for key := range r.Held {
		uuid, _ := resource.SplitID(key.ID)
		mayBe := resource.MayBeOurs(key.Resource, key.ID) || n.uuids[uuid] && resource.IsName(key.Resource)
		before, known := ours[key.Resource]
		ours[key.Resource] = mayBe && (before || !known)
	}
	for name, ours := range ours {
		if n.Has(name) || !ours || len(r.Healthy[name]) > 0 {
			continue
		}
		began, waited := since[name]
		switch {
		case !waited:
			n.unservedSince[name] = n.now
		case n.now.Sub(began) < unservedFor:
			n.unservedSince[name] = began
		default:
			n.add(name, false, n.holders, n.now)
			added = true
		}
	}
	return added
}

// Awaits reports whether a reading of the accounts may change the lists: devices retire, containers
// hold units, or the kubelet has devices of resources without a list.
func (s State) Awaits(h *holders.Holders) bool {
	for name, l := range s.lists {
		if len(l.retiring) > 0 || l.units.used > 0 || h.Awaits(name) {
			return true
		}
	}
	return s.HasUnserved()
}

// Pause returns the pause until the next reading of the accounts, if one is awaited.
func (s State) Pause(now time.Time) time.Duration {
	pause := ReadInterval
	for _, l := range s.lists {
		switch u := l.units; {
		case len(l.retiring) > 0, s.HasUnserved():
			return ReadInterval
		case u.used == 0:
		case now.Sub(u.changed) < unitsQuiet || now.Sub(u.lastCall) < unitsQuiet:
			return ReadInterval
		default:
			pause = unitsPause
		}
	}
	return pause
}

// IsBusy reports whether the kubelet allocated a retiring device a short time ago.
func (s State) IsBusy(now time.Time) bool { return now.Sub(s.lastRegrant) < holders.FreeFor }

// A ResendPacing limits how often lists are sent again. The zero value is ready.
type ResendPacing struct {
	last  time.Time
	pause time.Duration // after last
}

// Due reports whether lists are to be sent again now. outdated says whether the checkpoint is
// outdated.
func (p *ResendPacing) Due(now time.Time, outdated bool) bool {
	due := outdated && now.Sub(p.last) >= p.pause
	switch {
	case due:
		p.last, p.pause = now, min(max(2*p.pause, resendSoon), resendLater)
	case !outdated:
		p.pause = 0
	}
	return due
}
