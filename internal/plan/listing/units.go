package listing

import (
	"maps"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// This file handles units of memory. The kubelet's accounts say which units
// containers hold. A call of Allocate says so until the accounts show the units.

// unitsStay is how long the free units of the same GPU stay offered after a call of Allocate. A
// container may get more units than the init container of the same pod whose units it takes over.
const unitsStay = time.Second

// units is the state of the units of a list's resource.
type units struct {
	lastCall time.Time // the last call of Allocate that gave units
	gpu      string    // the GPU whose free units are offered; empty for all
	// which devices of the resource are offered, followed by the kept units without a container
	offered []bool
	used    int       // how many units containers hold
	changed time.Time // when offered changed last
}

// isOffered reports whether a planned device is offered. i is the position of the device in the
// resource. A unit has a rule of its own; any other device is offered while Healthy.
func (l *list) isOffered(i int, d resource.Device) bool {
	if l.resource.InUnits() {
		return l.units.offered[i]
	}
	return d.Healthy
}

// isFree reports whether no container holds a unit that left the plan and is not kept, while its
// GPU still has such units. The place of the unit is then one of the planned free units, so the
// unit itself is not offered. Before the first reading of the accounts, any unit may be held.
func (n *step) isFree(name string, l *list, d retiring, containers map[string]string) bool {
	_, named := containers[d.device.ID]
	return !d.isKept && l.resource.UnitClients(d.device.UUID) > 0 && !named &&
		!n.holders.IsNamed(holders.Key{Resource: name, ID: d.device.ID}) && !n.holders.Complete().Began.IsZero()
}

// useOf returns the known use of the units of a resource.
func (n *step) useOf(name string, l *list, containers map[string]string) resource.UnitUse {
	use := resource.UnitUse{Used: slices.Collect(maps.Keys(containers)), Containers: map[string]int{},
		Departing: map[string]int{}, Kept: map[string]int{}}
	seen := map[[2]string]bool{}
	for id, container := range containers {
		uuid, _ := resource.SplitID(id)
		if key := [2]string{uuid, container}; !seen[key] {
			seen[key] = true
			use.Containers[uuid]++
		}
	}
	for id, d := range l.retiring {
		switch _, named := containers[id]; {
		case d.isKept && !named:
			use.Kept[d.device.UUID]++
		case !d.isKept && (named || d.Counts() && !n.isFree(name, l, d, containers)):
			use.Departing[d.device.UUID]++
		}
	}
	return use
}

// offerUnits decides which units of a list are offered. It has no effect on other resources.
func (n *step) offerUnits(name string, l *list) {
	if !l.resource.InUnits() {
		l.units.used = 0
		return
	}
	containers := n.holders.Containers(name)
	use := n.useOf(name, l, containers)
	offered, kept, gpu := l.resource.OfferUnits(use, l.units.gpu, n.now.Sub(l.units.lastCall) < unitsStay)
	if len(use.Kept) > 0 {
		offered = append(offered, l.offerKept(kept, containers)...)
	}
	if !slices.Equal(offered, l.units.offered) || len(containers) != l.units.used {
		l.units.changed = n.now
	}
	l.units.offered, l.units.gpu, l.units.used = offered, gpu, len(containers)
}

// holdsOnUnits returns holds on the healthy GPUs of a list with units that are not offered.
func (n *step) holdsOnUnits(name string, l *list) (holds []resource.Hold) {
	if !l.resource.InUnits() {
		return nil
	}
	use, from := n.useOf(name, l, n.holders.Containers(name)), 0
	for _, d := range l.resource.Devices {
		count := l.resource.UnitCount(d.UUID)
		offered := l.units.offered[from : from+count]
		from += count
		if !d.Healthy || !slices.Contains(offered, false) {
			continue
		}
		h := resource.Hold{Resource: name, UUID: d.UUID, Row: resource.RowUnits}
		switch {
		case use.Containers[d.UUID] >= l.resource.UnitClients(d.UUID):
			h.Reason = "no more containers can use its GPU"
		case l.units.gpu != "" && l.units.gpu != d.UUID:
			h.Reason = "another GPU offers its free units"
		default:
			h.Reason = "containers still hold units of its GPU that left the plan"
		}
		holds = append(holds, h)
	}
	return holds
}

// offerKept offers, by the UUID of the GPU, the given number of kept units without
// a container, and returns which units are offered.
func (l *list) offerKept(count map[string]int, containers map[string]string) (offered []bool) {
	for _, id := range slices.Sorted(maps.Keys(l.retiring)) {
		d := l.retiring[id]
		if _, named := containers[id]; named || !d.isKept {
			continue
		}
		on := count[d.device.UUID] > 0
		count[d.device.UUID]--
		d.offered = d.offered && on
		l.retiring[id], offered = d, append(offered, on)
	}
	return offered
}

// readUnits applies an account to the units of a list. It reports whether the checkpoint names
// containers that may have ended, and whether other units are to be offered.
func (n *step) readUnits(name string, l *list, a holders.Account) (outdated, changed bool) {
	if !l.resource.InUnits() || !a.Tells() {
		return false, false
	}
	if a.Source != (holders.Source{}) {
		for key, h := range a.Held {
			outdated = outdated || h.CheckpointOnly && key.Resource == name
		}
	}
	before := l.units.offered
	n.offerUnits(name, l)
	return outdated, !slices.Equal(before, l.units.offered)
}

// overbooked returns why a container cannot get units: as many containers as can use its GPU at the
// same time hold units already. It returns nil if the container can.
func (n *step) overbooked(name string, l *list, ids []string) error {
	containers := n.holders.Containers(name)
	uuid, _ := resource.SplitID(ids[0])
	others := map[string]bool{}
	for id, container := range containers {
		if of, _ := resource.SplitID(id); of == uuid {
			others[container] = true
		}
	}
	for _, id := range ids {
		delete(others, containers[id]) // an init container of the same pod may have held the unit, and has ended
	}
	most := l.resource.UnitClients(uuid)
	if most == 0 || len(others) < most {
		return nil
	}
	return refuse(Withheld,
		"%d containers have units of GPU %s, and no more can use it at the same time; create the pod "+
			"again, so that the scheduler chooses again", len(others), uuid)
}

// giveUnits records that a container receives units, and returns why it must not;
// nil if it may. Units of two GPUs are refused later, so no container holds them.
func (n *step) giveUnits(name string, l *list, ids []string) error {
	if !l.resource.InUnits() || len(ids) == 0 {
		return nil
	}
	first, _ := resource.SplitID(ids[0])
	if slices.ContainsFunc(ids, func(id string) bool { uuid, _ := resource.SplitID(id); return uuid != first }) {
		return nil
	}
	if err := n.overbooked(name, l, ids); err != nil {
		return err
	}
	given := slices.DeleteFunc(slices.Clone(ids), func(id string) bool {
		device, planned := l.resource.Device(id)
		return !(planned && device.Healthy || l.retiring[id].lastGrant.Equal(n.now))
	})
	if n.holders.Occupy(name, given, n.now); len(given) > 0 {
		l.units.lastCall = n.now
	}
	return nil
}
