package resource

import "slices"

// A Hold makes devices of a plan temporarily not allocatable.
type Hold struct {
	// Resource is the resource of the devices; empty for any.
	Resource string
	// UUID is the UUID of the GPU or MIG device. The hold applies to all its replicas.
	UUID string
	// Reason is a sentence without a full stop.
	Reason string
	// Hidden devices are in no list. Others stay in their lists as Unhealthy.
	Hidden bool
	// Node reports whether the reason is a missing device node.
	Node bool
	// Waits says that another reason keeps the device from pods and counts first: the device is not
	// Healthy, an earlier hold applies, or the device is hidden. Under sets it in Plan.Holds.
	Waits bool
}

// A GPUHold makes the devices of a GPU temporarily not allocatable, except those of some GPU
// instances.
type GPUHold struct {
	// Reason is a sentence without a full stop; empty if there is no hold.
	Reason string
	// Kept are the IDs of the GPU instances whose devices stay allocatable.
	Kept []int
}

// UnderGPUs returns the plan with holds on GPUs, by UUID. Devices of a GPU without an entry are in
// no list: nothing has been decided about the GPU yet.
func (p Plan) UnderGPUs(holds map[string]GPUHold) Plan {
	var list []Hold
	for _, r := range p.Resources {
		for _, d := range r.Devices {
			h, decided := holds[d.GPU]
			switch {
			case d.Sharing == Percentage:
			case !decided:
				list = append(list, Hold{Resource: r.Name, UUID: d.UUID, Reason: "it is not known yet how its GPU is to be divided",
					Hidden: true})
			case h.Reason != "" && !slices.Contains(h.Kept, d.GI):
				list = append(list, Hold{Resource: r.Name, UUID: d.UUID, Reason: h.Reason})
			}
		}
	}
	return p.Under(list)
}

// Under returns the plan with holds on its devices. Of several holds on a device a hidden one
// counts, otherwise the first.
func (p Plan) Under(holds []Hold) Plan {
	if len(holds) == 0 {
		return p
	}
	of := map[[2]string]Hold{} // by resource and UUID
	for _, h := range holds {
		key := [2]string{h.Resource, h.UUID}
		if before, twice := of[key]; !twice || h.Hidden && !before.Hidden {
			of[key] = h
		}
	}
	held := Plan{LeftOut: slices.Clone(p.LeftOut), Warnings: slices.Clone(p.Warnings), Holds: slices.Clone(p.Holds),
		node: p.node}
	leftOut := map[string]bool{}
	for _, r := range p.Resources {
		devices, changed := make([]Device, 0, len(r.Devices)), false
		for _, d := range r.Devices {
			h, here := of[[2]string{r.Name, d.UUID}]
			if every, anywhere := of[[2]string{"", d.UUID}]; anywhere && (!here || every.Hidden && !h.Hidden) {
				h, here = every, true
			}
			h.Resource, h.UUID, h.Waits = r.Name, d.UUID, !d.Healthy && !h.Hidden
			same := func(other Hold) bool { other.Waits = h.Waits; return other == h }
			if here && !slices.ContainsFunc(held.Holds, same) {
				held.Holds = append(held.Holds, h)
			}
			switch {
			case here && h.Hidden:
				changed = true
				for i, other := range held.Holds {
					held.Holds[i].Waits = other.Waits || !same(other) && other.Resource == r.Name && other.UUID == d.UUID
				}
				if !leftOut[d.UUID] {
					leftOut[d.UUID] = true
					held.LeftOut = append(held.LeftOut, LeftOut{UUID: d.UUID, Index: d.Index, Reason: h.Reason})
					held.Warnings = append(held.Warnings, notOffered(d.Index, d.UUID, h.Reason))
				}
				continue
			case here && d.Healthy:
				d.Healthy, d.Reason, changed = false, h.Reason, true
			}
			devices = append(devices, d)
		}
		switch {
		case !changed:
			held.Resources = append(held.Resources, r)
		case len(devices) > 0:
			held.Resources = append(held.Resources, r.with(devices))
		}
	}
	slices.SortStableFunc(held.LeftOut, func(a, b LeftOut) int { return compareIndex(a.Index, b.Index) })
	return held
}
