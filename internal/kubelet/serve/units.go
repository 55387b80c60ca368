package serve

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// What a Set knows of units of memory. Kubelet's accounts say which units containers hold, and a
// call of Allocate says so until they do.

const (
	// unitsStay is how long after a call of Allocate the free units of the same GPU stay on offer: a
	// container may get more units than the init container of its pod whose units it takes over.
	unitsStay = time.Second
	// unitsPause is how often the accounts are read for units alone, after nothing has changed for
	// unitsQuiet.
	unitsPause = 5 * time.Second
	unitsQuiet = 10 * time.Second
)

// units are what a list knows of the units of its resource.
type units struct {
	given map[string]givenUnit // by device ID: those that the accounts need not show yet
	calls uint64               // of Allocate
	last  time.Time            // the last call
	gpu   string               // the GPU whose free units are on offer; empty for all
	// which devices of the resource are on offer, and then which of the kept ones that no container
	// holds
	offered []bool
	used    int       // how many units containers hold
	changed time.Time // when offered changed last
}

// A givenUnit is one that was given in a call of Allocate.
type givenUnit struct {
	at   time.Time
	call uint64 // each is for one container
}

// give notes that a container was given a unit in the current call of Allocate.
func (u *units) give(id string, now time.Time) {
	if u.given == nil {
		u.given = map[string]givenUnit{}
	}
	u.given[id] = givenUnit{now, u.calls}
	u.last = now
}

// see forgets given units that the accounts of e show, or that no container holds although they
// were read long after the unit was given. Without the checkpoint an init container may.
func (u *units) see(name string, e evidence) {
	for id, g := range u.given {
		_, held := e.held[deviceKey{name, id}]
		if after := e.began.Sub(g.at); held && after > 0 || after >= freeFor && !e.unreadable {
			delete(u.given, id)
		}
	}
}

// unitContainers returns who holds each unit of a resource, by device ID. Each container has a name
// of its own; the names say no more.
func (s *Set) unitContainers(l *list) map[string]string {
	all := make(map[string]string, len(l.units.given))
	for key, h := range s.told.holders {
		if key.resource == l.name {
			all[key.id] = h.pod + " " + h.container
		}
	}
	for id, g := range l.units.given {
		all[id] = fmt.Sprint(g.call)
	}
	return all
}

// isFree reports whether no container holds a unit that left the plan and is not kept, and whose
// GPU is in these units still. Its place is one of the free units of the plan then, so it is not on
// offer beside them. Where the accounts could not be read yet, any may be held.
func (s *Set) isFree(l *list, d departure, containers map[string]string) bool {
	_, named := containers[d.device.ID]
	_, held := s.told.evidence.held[deviceKey{l.name, d.device.ID}]
	return !d.kept && l.resource.UnitClients(d.device.UUID) > 0 && !named && !held && !s.told.evidence.began.IsZero()
}

// useOf returns what is known of the units of a resource that containers hold.
func (s *Set) useOf(l *list, containers map[string]string) resource.UnitUse {
	use := resource.UnitUse{Used: slices.Collect(maps.Keys(containers)), Containers: map[string]int{},
		Departing: map[string]int{},
		Kept:      map[string]int{}}
	seen := map[[2]string]bool{}
	for id, container := range containers {
		uuid, _ := resource.SplitID(id)
		if key := [2]string{uuid, container}; !seen[key] {
			seen[key] = true
			use.Containers[uuid]++
		}
	}
	for id, d := range l.departing {
		switch _, named := containers[id]; {
		case d.kept && !named:
			use.Kept[d.device.UUID]++
		case !d.kept && (named || d.counts() && !s.isFree(l, d, containers)):
			use.Departing[d.device.UUID]++
		}
	}
	return use
}

// offerUnits returns which devices of a resource in units are on offer; nil for another resource.
func (s *Set) offerUnits(l *list, r resource.Resource) []bool {
	if !r.InUnits() {
		return nil
	}
	now, containers := s.collaborators.Clock.Now(), s.unitContainers(l)
	use := s.useOf(l, containers)
	offered, kept, gpu := r.OfferUnits(use, l.units.gpu, now.Sub(l.units.last) < unitsStay)
	if len(use.Kept) > 0 {
		offered = append(offered, l.offerKept(kept, containers)...)
	}
	if !slices.Equal(offered, l.units.offered) || len(containers) != l.units.used {
		l.units.changed = now
	}
	l.units.offered, l.units.gpu, l.units.used = offered, gpu, len(containers)
	return offered
}

// offerKept puts so many of the kept units that no container holds on offer, by the UUID of the
// GPU, and returns which.
func (l *list) offerKept(count map[string]int, containers map[string]string) (offered []bool) {
	for _, id := range slices.Sorted(maps.Keys(l.departing)) {
		d := l.departing[id]
		if _, named := containers[id]; named || !d.kept {
			continue
		}
		on := count[d.device.UUID] > 0
		count[d.device.UUID]--
		d.offered = d.offered && on
		l.departing[id], offered = d, append(offered, on)
	}
	return offered
}

// seeUnits takes in new evidence about the units of a list. It reports whether the checkpoint names
// containers that may have ended, and whether other units are to be on offer.
func (s *Set) seeUnits(l *list, e evidence) (outdated, changed bool) {
	r := l.views.Value().resource
	if !r.InUnits() || !e.tells() {
		return false, false
	}
	l.units.see(l.name, e)
	if e.source != (source{}) {
		for key, h := range e.held {
			outdated = outdated || h.checkpointOnly && key.resource == l.name
		}
	}
	before := l.units.offered
	return outdated, !slices.Equal(before, s.offerUnits(l, r))
}

// readPause returns how long after a reading of the accounts the next one is due.
func (s *Set) readPause() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.told.foreign) > 0 {
		return readInterval
	}
	pause, now := readInterval, s.collaborators.Clock.Now()
	for _, entry := range s.resources {
		if departing, ended := entry.list.leaving(); departing || ended {
			return readInterval
		}
		if u := entry.list.units; u.used > 0 {
			if pause = unitsPause; now.Sub(u.changed) < unitsQuiet || now.Sub(u.last) < unitsQuiet {
				return readInterval
			}
		}
	}
	return pause
}

// overbooked returns why a container cannot be given units: as many containers hold units of its
// GPU as can use it at the same time.
func (s *Set) overbooked(l *list, ids []string) string {
	containers := s.unitContainers(l)
	uuid, _ := resource.SplitID(ids[0])
	others := map[string]bool{}
	for id, container := range containers {
		if of, _ := resource.SplitID(id); of == uuid {
			others[container] = true
		}
	}
	for _, id := range ids {
		delete(others, containers[id]) // an init container of the same pod may have held it, and has ended
	}
	most := l.resource.UnitClients(uuid)
	if most == 0 || len(others) < most {
		return ""
	}
	return fmt.Sprintf("%d containers have units of GPU %s, and no more can use it at the same time; create the pod anew, so that it is "+
		"scheduled again", len(others), uuid)
}

// giveUnits notes that a container is given units, and returns why it must not be; empty if it may.
// Units of two GPUs are refused later, so nobody holds them. The accounts are read at once also
// then: such a call comes when another container has just ended.
func (s *Set) giveUnits(l *list, ids []string, now time.Time) (refusal string) {
	if !l.resource.InUnits() || len(ids) == 0 {
		return ""
	}
	s.mayDepart()
	first, _ := resource.SplitID(ids[0])
	if slices.ContainsFunc(ids, func(id string) bool { uuid, _ := resource.SplitID(id); return uuid != first }) {
		return ""
	}
	if refusal = s.overbooked(l, ids); refusal != "" {
		return refusal
	}
	l.units.calls++
	for _, id := range ids {
		device, planned := l.resource.Device(id)
		if planned && device.Healthy || l.departing[id].given.Equal(now) {
			l.units.give(id, now)
		}
	}
	return ""
}
