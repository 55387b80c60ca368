package holders

import (
	"fmt"
	"maps"
	"time"
)

const (
	// FreeFor is how long no pod must be known to hold a device that left the plan, before the list
	// drops the device. The kubelet crashes when the last list lacks a device that the kubelet is
	// allocating or that a pod holds. During an allocation, the kubelet's checkpoint does not name
	// the pod yet. An allocation takes much less than FreeFor.
	FreeFor = 10 * time.Second
	// unreadableFor is how long the kubelet's checkpoint must be unreadable, while the kubelet
	// runs, before a device about which nothing is known no longer counts as held.
	unreadableFor = 10 * time.Second
)

// Holders are the holders of all devices, as far as known: the grants of this process, and what the
// kubelet's accounts said. New returns Holders about which no account was read.
type Holders struct {
	grants         map[Key]grant
	occupied       map[Key]occupation // units that the accounts need not show yet
	containers     uint64             // numbers the containers that received units
	complete       Account            // the last one that left nothing unknown
	named          map[Key]Holder     // as far as the accounts told last
	unreadable     Lasting            // the checkpoint cannot be read
	noPodResources bool               // PodResources cannot be asked
}

// A grant is what this process knows about one device.
type grant struct {
	asked time.Time // when the kubelet last asked for the device; zero if it never did
	given time.Time // when the device was last given to a pod; zero if it never was
	// confirmedBy has named a holder of the device through PodResources, while no
	// list offered the device, since the kubelet last asked for it.
	confirmedBy Source
}

// An occupation is a unit that a container got.
type occupation struct {
	at        time.Time
	container uint64
}

// New returns Holders without grants and accounts.
func New() *Holders {
	return &Holders{grants: map[Key]grant{}, occupied: map[Key]occupation{}}
}

// Ask records that the kubelet asks for a device.
func (h *Holders) Ask(device Key, now time.Time) {
	g := h.grants[device]
	g.asked, g.confirmedBy = now, Source{}
	h.grants[device] = g
}

// Give records that a pod gets a device that the kubelet has asked for.
func (h *Holders) Give(device Key, now time.Time) {
	g := h.grants[device]
	g.given = now
	h.grants[device] = g
}

// Occupy records that one container gets the units with these IDs.
func (h *Holders) Occupy(resource string, ids []string, now time.Time) {
	h.containers++
	for _, id := range ids {
		h.occupied[Key{resource, id}] = occupation{now, h.containers}
	}
}

// Begin records the checkpoint as it was before anything was offered.
func (h *Holders) Begin(a Account) { h.complete, h.named = a, a.Held }

// Tell records a reading of the accounts. It reports whether that changed which warnings apply.
func (h *Holders) Tell(a Account, now time.Time) (changed bool) {
	silence, asked := h.unreadable.Reason, !h.noPodResources
	h.unreadable.Update(a.Unreadable, now, unreadableFor, a.UnknownBecause)
	h.noPodResources = a.NoPodResources
	if a.Tells() {
		h.named = map[Key]Holder{}
		maps.Copy(h.named, a.Held)
		for key, holder := range h.complete.Held {
			if _, named := a.Held[key]; a.Unreadable && holder.CheckpointOnly && !named {
				h.named[key] = holder // it may be an init container, which PodResources leaves out
			}
		}
		// A unit without a container long after its grant is free. Without the
		// checkpoint, an init container may hold it.
		maps.DeleteFunc(h.occupied, func(key Key, o occupation) bool {
			_, held := a.Held[key]
			after := a.Began.Sub(o.at)
			return held && after > 0 || after >= FreeFor && !a.Unreadable
		})
	}
	if a.UnknownBecause == "" {
		h.complete = a
	}
	return h.unreadable.Reason != silence || h.noPodResources == asked
}

// Complete returns the last account that left nothing unknown.
func (h *Holders) Complete() Account { return h.complete }

// Silence returns why the accounts cannot be read, once they have been unreadable
// long enough to count; empty before.
func (h *Holders) Silence() string { return h.unreadable.Reason }

// EndSilence forgets how long the accounts have been unreadable, because nobody
// waits for them. It reports whether that had counted.
func (h *Holders) EndSilence() (counted bool) {
	counted = h.unreadable.Counts()
	h.unreadable = Lasting{}
	return counted
}

// NoPodResources reports whether PodResources cannot be asked.
func (h *Holders) NoPodResources() bool { return h.noPodResources }

// Leaves returns the state of a device that leaves the plan. Without wasOffered, no
// pod can hold the device.
func (h *Holders) Leaves(device Key, wasOffered bool) State {
	s := State{lastAllocate: h.grants[device].given, waitsFor: waitsForReading}
	if !wasOffered {
		s.holding = unheld
	}
	return s
}

// IsNamed reports whether the last complete account names a holder of a device.
func (h *Holders) IsNamed(device Key) bool {
	_, named := h.complete.Held[device]
	return named
}

// IsHeld reports whether a pod is known to hold a device: the last complete account
// names the pod, or need not name it yet.
func (h *Holders) IsHeld(device Key) bool {
	given := h.grants[device].given
	return h.IsNamed(device) || !given.IsZero() && h.complete.Began.Sub(given) < FreeFor
}

// Containers returns the container that holds each unit of a resource, by device
// ID. The names only tell containers apart.
func (h *Holders) Containers(resource string) map[string]string {
	all := map[string]string{}
	for key, holder := range h.named {
		if key.Resource == resource {
			all[key.ID] = holder.Pod + " " + holder.Container
		}
	}
	for key, o := range h.occupied {
		if key.Resource == resource {
			all[key.ID] = fmt.Sprint(o.container)
		}
	}
	return all
}

// Awaits reports whether the accounts need not show units of a resource yet.
func (h *Holders) Awaits(resource string) bool {
	for key := range h.occupied {
		if key.Resource == resource {
			return true
		}
	}
	return false
}
