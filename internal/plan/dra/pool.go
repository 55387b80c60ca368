package dra

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// noDevices is why a GPU in MIG mode is not a device.
const noDevices = "MIG is enabled on it, but it has no MIG devices; create MIG devices, or turn MIG mode off"

// The API server refuses more devices in a slice with a taint. A slice has the GPUs of eight
// numbers, each with at most eight devices: no GPU can be divided further.
const (
	MaxSlice     = 64
	gpusOfSlice  = 8
	devicesOfGPU = MaxSlice / gpusOfSlice
)

// New returns the devices of a node whose owners are OwnedByDRA or LeavesDRA. The numbers must have
// all GPUs. Without divisions, no MIG devices are created for claims. Counters come first: a device
// is never published before its counters. A stale Snapshot gives the devices of the last successful
// scan. A Snapshot of Generation 0 is not allowed.
func New(s inventory.Snapshot, node string, numbers Numbers, owners Owners, divisions Divisions) Pool {
	p := Pool{Name: node, LinksDue: s.LinksDue}
	var whole, counted shelf[Device]
	var counters shelf[CounterSet]
	for _, out := range s.LeftOut {
		p.LeftOut = append(p.LeftOut, fmt.Sprintf("GPU %d: %s", out.Index, out.Reason))
	}
	links := newLinks(s.GPUs, numbers, divisions)
	gpus := slices.Clone(s.GPUs)
	order.Sort(gpus, func(a, b inventory.GPU) int {
		return cmp.Or(
			cmp.Compare(numbers[a.UUID]/gpusOfSlice, numbers[b.UUID]/gpusOfSlice),
			cmp.Compare(links.place(a), links.place(b)),
			cmp.Compare(numbers[a.UUID], numbers[b.UUID]))
	})
	for _, g := range gpus {
		if !owners[g.UUID].InSlice() {
			continue
		}
		number := numbers[g.UUID]
		division, divided := divisions[g.UUID], divisions.divides(g)
		var devices []Device
		var leftOut []string
		var set CounterSet
		if divided {
			devices, set, leftOut = partitions(g, s.Driver, number, division)
			if division.Switched {
				devices, divided = append([]Device{undivided(g, s.Driver, number, links, set)}, devices...),
					len(devices) > 0
			}
		} else {
			devices, leftOut = fixedDevices(g, s.Driver, number, links, division)
		}
		if owners[g.UUID] == LeavesDRA {
			for i := range devices {
				devices[i].Taints = append(devices[i].Taints, Taint{Key: TaintLeaving, Effect: "NoSchedule"})
			}
		}
		p.LeftOut = append(p.LeftOut, leftOut...)
		switch {
		case len(devices) == 0:
		case divided:
			counters.add(number/gpusOfCounters, set)
			counted.add(number/gpusOfPartitions, devices...)
		default:
			whole.add(number/gpusOfSlice, devices...)
		}
	}
	for _, sets := range counters.parts {
		p.Slices = append(p.Slices, Slice{SharedCounters: sets})
	}
	for _, devices := range append(whole.parts, counted.parts...) {
		p.Slices = append(p.Slices, Slice{Devices: devices})
	}
	if len(p.Slices) == 0 {
		p.Slices = []Slice{{Devices: []Device{}}}
	}
	return p
}

// A shelf has the contents of slices, each for a group of GPUs.
type shelf[T any] struct {
	parts [][]T
	last  int
}

// add adds to the slice of a group. Members of a group must be added one after the other.
func (s *shelf[T]) add(group int, content ...T) {
	if len(s.parts) == 0 || s.last != group {
		s.parts, s.last = append(s.parts, nil), group
	}
	last := &s.parts[len(s.parts)-1]
	*last = append(*last, content...)
}

// fixedDevices returns the devices of a GPU published unchanged, and omitted devices with reasons.
func fixedDevices(g inventory.GPU, driver inventory.Driver, number int, links links, division Divided) (found []Device,
	leftOut []string) {
	if division.Fixed != "" {
		leftOut = append(leftOut, fmt.Sprintf("GPU %d (%s): no MIG devices are created for claims: %s", g.Index, g.UUID,
			division.Fixed))
	}
	if g.MIG != inventory.MIGEnabled {
		return []Device{wholeGPU(g, driver, number, links)}, leftOut
	}
	if len(g.MIGDevices) == 0 {
		return nil, append(leftOut, fmt.Sprintf("GPU %d (%s): %s", g.Index, g.UUID, noDevices))
	}
	migs := slices.Clone(g.MIGDevices)
	order.Sort(migs, func(a, b inventory.MIGDevice) int {
		return cmp.Or(cmp.Compare(a.Placement.Start, b.Placement.Start), cmp.Compare(a.CI, b.CI),
			cmp.Compare(a.Index, b.Index))
	})
	names := map[string]bool{}
	for _, m := range migs {
		name, reason := migName(number, m)
		switch {
		case division.own(m):
			reason = "it was created for a claim, and is removed with the claim"
		case reason == "" && names[name]:
			reason = fmt.Sprintf("another MIG device has the name %s", name)
		case reason == "" && len(found) == devicesOfGPU:
			reason = fmt.Sprintf("a GPU can have %d devices at most", devicesOfGPU)
		}
		if reason != "" {
			leftOut = append(leftOut, fmt.Sprintf("MIG device %d:%d (%s): %s", g.Index, m.Index, m.UUID, reason))
			continue
		}
		names[name] = true
		found = append(found, migDevice(name, g, m, driver))
	}
	return found, leftOut
}
