package listing

import (
	"maps"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// A List is the list of one resource. It is immutable.
type List struct {
	// Resource is the resource of the plan with its holds; without devices if the plan lacks it.
	Resource resource.Resource
	// Entries are what the kubelet is told: the planned devices, and then the
	// retiring devices by ID.
	Entries []Entry
	// Unoffered counts the units of healthy GPUs that are not offered.
	Unoffered int
	retiring  map[string]retiring
}

// An Entry is a device in a list.
type Entry struct {
	ID      string
	Healthy bool
	Nodes   []int64 // the NUMA nodes; nil if none is known
}

func (e Entry) equal(other Entry) bool {
	return e.ID == other.ID && e.Healthy == other.Healthy && slices.Equal(e.Nodes, other.Nodes)
}

// Same reports whether two lists have the same entries.
func (l List) Same(other List) bool { return slices.EqualFunc(l.Entries, other.Entries, Entry.equal) }

// list makes the list of the resource with its holds, and of the retiring devices.
// withheld has the UUIDs of the devices whose GPU counts as held in another form.
func (n *step) list(name string, l *list, r resource.Resource, withheld map[string]bool) List {
	l.resource = r
	n.offerUnits(name, l)
	made := List{Resource: r, retiring: l.retiring}
	planned := make([]Entry, 0, len(l.devices))
	numa, nodes := -1, []int64(nil) // devices share the nodes: there may be thousands
	for device := range r.All() {
		if device.NUMANode != numa {
			numa, nodes = device.NUMANode, near(device, nil)
		}
		if !withheld[device.UUID] {
			l.everOffered[device.UUID] = true
		}
		on := l.isOffered(len(planned), device)
		if device.Healthy && !on {
			made.Unoffered++
		}
		planned = append(planned, Entry{device.ID, on, nodes})
	}
	left := make([]Entry, 0, len(l.retiring))
	for _, id := range slices.Sorted(maps.Keys(l.retiring)) {
		d := l.retiring[id]
		left = append(left, Entry{id, d.offered, near(d.device, d.nodes)})
	}
	made.Entries = append(leaveRoom(planned, left, l.listedBefore()), left...)
	l.devices, l.adoptedIDs = made.Entries, nil
	return made
}

// near returns the given NUMA nodes, or else the NUMA node of the device; nil if there are none.
func near(d resource.Device, nodes []int64) []int64 {
	if len(nodes) == 0 && d.NUMANode >= 0 { // negative: not known
		return []int64{int64(d.NUMANode)}
	}
	return nodes
}

// leaveRoom removes planned devices from the end until the list with the retiring devices is short
// enough for the kubelet. Devices in the kubelet's last list stay, because the kubelet may be
// allocating them. The removed devices are listed once retiring devices were dropped.
func leaveRoom(planned, left []Entry, isListed func(id string) bool) []Entry {
	excess := -resource.MaxList
	for _, devices := range [...][]Entry{planned, left} {
		for _, d := range devices {
			excess += resource.ListBytes(d.ID, d.Healthy, d.Nodes)
		}
	}
	for i := len(planned) - 1; i >= 0 && excess > 0; i-- {
		if d := planned[i]; !isListed(d.ID) {
			excess -= resource.ListBytes(d.ID, d.Healthy, d.Nodes)
			planned = slices.Delete(planned, i, i+1)
		}
	}
	return planned
}

// listedBefore returns a function that reports whether the list last received by
// the kubelet has a device.
func (l *list) listedBefore() func(id string) bool {
	ids, devices := l.adoptedIDs, l.devices
	return func(id string) bool {
		if ids == nil { // needed only if a list is too long
			ids = map[string]bool{}
			for _, d := range devices {
				ids[d.ID] = true
			}
		}
		return ids[id]
	}
}
