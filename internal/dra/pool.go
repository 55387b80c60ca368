package dra

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// undivided is why a GPU in MIG mode is not a device.
const undivided = "MIG is enabled on it, but it has no MIG devices; create MIG devices, or turn MIG mode off"

// The API server refuses a slice with more devices of which one has a taint. A slice holds the GPUs of eight numbers, each with eight
// devices at most: no GPU can be divided further.
const (
	MaxSlice     = 64
	gpusOfSlice  = 8
	devicesOfGPU = MaxSlice / gpusOfSlice
)

// New returns the devices of a node whose owners are OwnedByDRA or LeavesDRA. The numbers have all of its GPUs. Of a stale Snapshot it
// returns what was there last; a Snapshot of a node that was never looked at is for nobody.
func New(s inventory.Snapshot, node string, numbers Numbers, owners Owners) Pool {
	p := Pool{Name: node}
	for _, out := range s.LeftOut {
		p.LeftOut = append(p.LeftOut, fmt.Sprintf("GPU %d: %s", out.Index, out.Reason))
	}
	links := newLinks(s.GPUs, numbers)
	gpus := slices.Clone(s.GPUs)
	slices.SortStableFunc(gpus, func(a, b inventory.GPU) int {
		return cmp.Or(
			cmp.Compare(numbers[a.UUID]/gpusOfSlice, numbers[b.UUID]/gpusOfSlice),
			cmp.Compare(links.place(a), links.place(b)),
			cmp.Compare(numbers[a.UUID], numbers[b.UUID]))
	})
	last := -1
	for _, g := range gpus {
		if !owners[g.UUID].InSlice() {
			continue
		}
		devices, leftOut := devices(g, s.Driver, numbers[g.UUID], links)
		if owners[g.UUID] == LeavesDRA {
			for i := range devices {
				devices[i].Taints = append(devices[i].Taints, Taint{Key: TaintLeaving, Effect: "NoSchedule"})
			}
		}
		p.LeftOut = append(p.LeftOut, leftOut...)
		if at := numbers[g.UUID] / gpusOfSlice; at != last && len(devices) > 0 {
			p.Slices, last = append(p.Slices, Slice{}), at
		}
		if len(devices) > 0 {
			slice := &p.Slices[len(p.Slices)-1]
			slice.Devices = append(slice.Devices, devices...)
		}
	}
	if len(p.Slices) == 0 {
		p.Slices = []Slice{{Devices: []Device{}}}
	}
	return p
}

// devices returns the devices of a GPU, and what is not one and why.
func devices(g inventory.GPU, driver inventory.Driver, number int, links links) (found []Device, leftOut []string) {
	if g.MIG != inventory.MIGEnabled {
		return []Device{wholeGPU(g, driver, number, links)}, nil
	}
	if len(g.MIGDevices) == 0 {
		return nil, []string{fmt.Sprintf("GPU %d (%s): %s", g.Index, g.UUID, undivided)}
	}
	migs := slices.Clone(g.MIGDevices)
	slices.SortStableFunc(migs, func(a, b inventory.MIGDevice) int {
		return cmp.Or(cmp.Compare(a.Placement.Start, b.Placement.Start), cmp.Compare(a.CI, b.CI), cmp.Compare(a.Index, b.Index))
	})
	names := map[string]bool{}
	for _, m := range migs {
		name, reason := migName(number, m)
		switch {
		case reason == "" && names[name]:
			reason = fmt.Sprintf("another MIG device is called %s, too", name)
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
