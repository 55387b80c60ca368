package resource

import (
	"cmp"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
)

// A Row is the place of a kind of hold in the order of all reasons that keep a
// device from pods: its row in the table of ADR 76. Of several holds on a device,
// the hold with the lowest row counts.
type Row int

// The rows with holds.
const (
	RowOwner  Row = iota + 2 // pods get the GPU by claims
	_                        // the health of the device, which is no hold
	RowMPS                   // the MPS control daemon does not run
	RowDriver                // the configuration does not accept the version of the driver
	RowCUDA                  // CUDA is not proven on the device
	RowGPU                   // the GPU is being divided or reset, or the driver is being changed
	RowFiles                 // the CDI spec or the device node is missing
	RowUVM                   // the device node nvidia-uvm is missing
	RowForm                  // the GPU may be in use in another form
	RowTaint                 // the form before stays offered until the Node has its taint
	RowGrowth                // the GPU was offered in another form a moment ago
	RowUnits                 // another GPU offers its free units, or no more containers can use the GPU
)

// IsRoutine reports whether the holds of a row are part of normal operation:
// nothing is missing, and nobody waits for their end.
func (r Row) IsRoutine() bool { return r == RowOwner || r == RowUnits }

// A Hold makes devices of a plan temporarily not allocatable.
type Hold struct {
	// Resource is the resource of the devices; empty for any.
	Resource string
	// UUID is the UUID of the GPU or MIG device. The hold applies to all its
	// replicas, or to units that a rule of their own withholds.
	UUID string
	// Reason is a sentence without a full stop.
	Reason string
	// Row orders the holds on a device.
	Row Row
	// Spared is the number of Healthy replicas, from the first, to which the hold
	// does not apply.
	Spared int
	// Hidden devices are in no list. Others stay in their lists as Unhealthy.
	Hidden bool
	// Node reports whether the reason is a missing device node.
	Node bool
	// Waits says that another reason keeps the device from pods and counts first:
	// the device is not Healthy, another hold has a lower row, or the device is
	// hidden. Under sets it in Plan.Holds.
	Waits bool
}

// A GPUHold makes the devices of a GPU temporarily not allocatable, except those of
// some GPU instances.
type GPUHold struct {
	// Reason is a sentence without a full stop; empty if there is no hold.
	Reason string
	// Kept are the IDs of the GPU instances whose devices stay allocatable.
	Kept []int
}

// UnderGPUs returns the plan with holds on GPUs, by UUID. Devices of a GPU without
// an entry are in no list: nothing has been decided about the GPU yet.
func (p Plan) UnderGPUs(holds map[string]GPUHold) Plan {
	var list []Hold
	for _, r := range p.Resources {
		for _, d := range r.Devices {
			h, decided := holds[d.GPU]
			switch {
			case d.Sharing == Percentage:
			case !decided:
				list = append(list,
					Hold{Resource: r.Name, UUID: d.UUID, Reason: "it is not known yet how its GPU is to be divided",
						Row: RowGPU, Hidden: true})
			case h.Reason != "" && !slices.Contains(h.Kept, d.GI):
				list = append(list, Hold{Resource: r.Name, UUID: d.UUID, Reason: h.Reason, Row: RowGPU})
			}
		}
	}
	return p.Under(list)
}

// compareHolds orders the holds on one device: the first one counts.
func compareHolds(a, b Hold) int {
	if a.Hidden != b.Hidden {
		if a.Hidden {
			return -1
		}
		return 1
	}
	return cmp.Compare(a.Row, b.Row)
}

// Under returns the plan with further holds on its devices. Of the holds on a
// device, a hidden one counts, otherwise the one with the lowest row, and among
// equals the first. Of several of the given holds on a device, the plan gets only
// the one that counts; a hold for one resource precedes a hold for all.
func (p Plan) Under(holds []Hold) Plan {
	if len(holds) == 0 {
		return p
	}
	type key struct{ resource, uuid string }
	of := map[key]Hold{}
	for _, h := range holds {
		if before, twice := of[key{h.Resource, h.UUID}]; !twice || h.Hidden && !before.Hidden {
			of[key{h.Resource, h.UUID}] = h
		}
	}
	all := map[key][]Hold{} // the holds on each device, without Waits
	held := map[key]bool{}  // devices that a hold of p keeps from pods
	for _, h := range p.Holds {
		held[key{h.Resource, h.UUID}] = held[key{h.Resource, h.UUID}] || !h.Waits
		h.Waits = false
		all[key{h.Resource, h.UUID}] = append(all[key{h.Resource, h.UUID}], h)
	}
	next := Plan{LeftOut: slices.Clone(p.LeftOut), Warnings: slices.Clone(p.Warnings), Holds: slices.Clone(p.Holds),
		node: p.node}
	sick, spared, leftOut := map[key]bool{}, map[key]int{}, map[string]bool{}
	for _, r := range p.Resources {
		devices, changed := make([]Device, 0, len(r.Devices)), false
		for _, d := range r.Devices {
			k := key{r.Name, d.UUID}
			h, here := of[k]
			if every, anywhere := of[key{"", d.UUID}]; anywhere && (!here || every.Hidden && !h.Hidden) {
				h, here = every, true
			}
			if !here {
				devices = append(devices, d)
				continue
			}
			if h.Resource, h.UUID, h.Waits = r.Name, d.UUID, false; !slices.Contains(all[k], h) {
				all[k], next.Holds = append(all[k], h), append(next.Holds, h)
				order.Sort(all[k], compareHolds)
			}
			sick[k] = !d.Healthy && !held[k]
			switch first := all[k][0]; {
			case first.Hidden:
				changed = true
				if !leftOut[d.UUID] {
					leftOut[d.UUID] = true
					next.LeftOut = append(next.LeftOut, LeftOut{UUID: d.UUID, Index: d.Index, Reason: first.Reason})
					next.Warnings = append(next.Warnings, notOffered(d.Index, d.UUID, first.Reason))
				}
				continue
			case sick[k]:
			case d.Healthy && spared[k] < first.Spared:
				spared[k]++
			default:
				changed = changed || d.Healthy || d.Reason != first.Reason
				d.Healthy, d.Reason = false, first.Reason
			}
			devices = append(devices, d)
		}
		switch {
		case !changed:
			next.Resources = append(next.Resources, r)
		case len(devices) > 0:
			next.Resources = append(next.Resources, r.with(devices))
		}
	}
	for i, h := range next.Holds {
		k := key{h.Resource, h.UUID}
		if isSick, changed := sick[k]; changed {
			h.Waits = false
			next.Holds[i].Waits = h != all[k][0] || isSick && !h.Hidden
		}
	}
	order.Sort(next.Holds, func(a, b Hold) int { return cmp.Compare(a.Row, b.Row) })
	order.Sort(next.LeftOut, func(a, b LeftOut) int { return compareIndex(a.Index, b.Index) })
	return next
}
