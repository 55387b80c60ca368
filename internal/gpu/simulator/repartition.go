package simulator

import (
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// resets reports whether a reset changes the GPU's MIG mode and keeps it, as on Ampere. Later
// generations change the mode without a reset, and lose it with a reset.
func (g *gpu) resets() bool { return g.spec.model.architecture <= nvml.DEVICE_ARCH_AMPERE }

// busy reports whether processes compute on the GPU or a part of it, or have it open.
func (g *gpu) busy() bool {
	return g.processes > 0 || len(g.clients) > 0 ||
		slices.ContainsFunc(g.layout.devices, func(c *computeInstance) bool { return c.processes > 0 })
}

// reset applies a reset or a restart of the node to the MIG mode. All instances are lost.
func (g *gpu) reset() {
	g.mig = g.pending && g.resets()
	g.pending, g.layout = g.mig, layout{}
}

// openLocked reports whether a session other than own is open, or registered for events of the GPU.
// The driver then does not reset the GPU.
func (n *Node) openLocked(g *gpu, own *session) bool {
	for s := range n.sets {
		if s.masks[g] != 0 {
			return true
		}
	}
	return len(n.sessions) > 1 || !own.open
}

// SetMigMode sets the mode, and returns first the result of the activation. The mode is not
// activated while the GPU is in use or has instances. On Ampere the mode is then pending, and also
// while another session has the GPU open. In a virtual machine GPUs are not reset.
func (d device) SetMigMode(mode int) (nvml.Return, nvml.Return) {
	n := d.session.node
	activation, ret := ask(d, "DeviceSetMigMode", func(g *gpu) (nvml.Return, nvml.Return) {
		wanted := mode == nvml.DEVICE_MIG_ENABLE
		activation := nvml.SUCCESS
		switch answer := returns[n.textLocked("DeviceSetMigMode", g, nil, "")]; {
		case len(g.spec.model.MIG) == 0:
			return nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_NOT_SUPPORTED
		case mode != nvml.DEVICE_MIG_ENABLE && mode != nvml.DEVICE_MIG_DISABLE:
			return nvml.ERROR_INVALID_ARGUMENT, nvml.ERROR_INVALID_ARGUMENT
		case g.mig == wanted:
		case answer != nvml.SUCCESS:
			activation = answer
		case g.busy() || len(g.layout.instances) > 0 || g.resets() && n.openLocked(g, d.session):
			activation = nvml.ERROR_IN_USE
		case g.resets() && n.profile.VirtualMachine:
			activation = nvml.ERROR_NOT_SUPPORTED
		}
		if activation == nvml.SUCCESS || g.resets() {
			g.pending = wanted
		}
		if activation == nvml.SUCCESS && g.mig != wanted {
			if g.resets() {
				g.readings = readings{aggregateErrors: g.aggregateErrors}
			}
			g.mig = wanted
			n.repartitionedLocked(g)
		}
		return activation, nvml.SUCCESS
	})
	return activation, ret
}

// repartitionedLocked sends the event of changed instances of a GPU.
func (n *Node) repartitionedLocked(g *gpu) {
	n.deliverLocked(g, nvml.EventMigConfigChange, 0, unattributed, unattributed)
	n.changeLocked()
}

// room reports whether the GPU has room for an instance of a profile at a memory slice.
func (g *gpu) room(p MIGProfile, start int) bool {
	same := 0
	for _, gi := range g.layout.instances {
		if gi.profile.Name == p.Name {
			same++
		}
		if lacksEngines(gi.profile.Name, p.Name) {
			return false
		}
	}
	return same < p.Count && slices.Contains(p.starts, start) && free(g.layout.instances, start, p.memory)
}

// lacksEngines reports whether one of two instances takes the media engines needed by the other.
func lacksEngines(a, b string) bool {
	engines := func(name string) string { return strings.TrimLeft(name, "0123456789.gb") }
	a, b = engines(a), engines(b)
	return a == "+me.all" && b != "-me" || b == "+me.all" && a != "-me" || a == "+me" && b == "+me"
}

// GetGpuInstanceRemainingCapacity returns how many more instances of a profile fit now.
func (d device) GetGpuInstanceRemainingCapacity(info *nvml.GpuInstanceProfileInfo) (int, nvml.Return) {
	return ask(d, "DeviceGetGpuInstanceRemainingCapacity", func(g *gpu) (int, nvml.Return) {
		p, ok := g.profileLocked(info.Id)
		if !g.mig || !ok {
			return 0, nvml.ERROR_NOT_SUPPORTED
		}
		count := p.Count
		for _, gi := range g.layout.instances {
			if gi.profile.Name == p.Name {
				count--
			}
		}
		rooms := 0
		for _, start := range p.starts {
			if g.room(p, start) {
				rooms++
			}
		}
		return min(count, rooms), nvml.SUCCESS
	})
}

// CreateGpuInstance creates an instance at the first free placement.
func (d device) CreateGpuInstance(info *nvml.GpuInstanceProfileInfo) (nvml.GpuInstance, nvml.Return) {
	return d.create("DeviceCreateGpuInstance", info.Id, func(g *gpu, p MIGProfile) (int, bool) {
		at := slices.IndexFunc(p.starts, func(start int) bool { return g.room(p, start) })
		if at < 0 {
			return 0, false
		}
		return p.starts[at], true
	})
}

// CreateGpuInstanceWithPlacement creates an instance at a placement.
func (d device) CreateGpuInstanceWithPlacement(
	info *nvml.GpuInstanceProfileInfo, placement *nvml.GpuInstancePlacement,
) (nvml.GpuInstance, nvml.Return) {
	return d.create("DeviceCreateGpuInstanceWithPlacement", info.Id, func(g *gpu, p MIGProfile) (int, bool) {
		start := int(placement.Start)
		return start, int(placement.Size) == p.memory && g.room(p, start)
	})
}

// create creates a GPU instance at the placement returned by place.
func (d device) create(
	call string, profile uint32, place func(*gpu, MIGProfile) (int, bool),
) (nvml.GpuInstance, nvml.Return) {
	return ask(d, call, func(g *gpu) (nvml.GpuInstance, nvml.Return) {
		p, ok := g.profileLocked(profile)
		if !g.mig || !ok {
			return nil, nvml.ERROR_NOT_SUPPORTED
		}
		start, ok := place(g, p)
		if !ok {
			return nil, nvml.ERROR_INSUFFICIENT_RESOURCES
		}
		gi := &gpuInstance{profile: p, start: start, id: firstInstanceID[g.spec.model.MemorySlices/p.memory]}
		for slices.ContainsFunc(g.layout.instances, func(o *gpuInstance) bool { return o.id == gi.id }) {
			gi.id++
		}
		g.layout.instances = append(slices.Clone(g.layout.instances), gi)
		slices.SortFunc(g.layout.instances, func(a, b *gpuInstance) int { return a.id - b.id })
		d.session.node.repartitionedLocked(g)
		return gpuInstanceHandle{session: d.session, gpu: g, gi: gi}, nvml.SUCCESS
	})
}

// Destroy destroys the GPU instance, unless it has a compute instance, or a performance monitoring
// sample refers to it.
func (h gpuInstanceHandle) Destroy() nvml.Return {
	_, ret := askGI(h, "GpuInstanceDestroy", func() (struct{}, nvml.Return) {
		for _, pinned := range h.session.node.pins {
			if pinned == h.gi {
				return struct{}{}, nvml.ERROR_IN_USE
			}
		}
		if len(h.gi.computes) > 0 {
			return struct{}{}, nvml.ERROR_IN_USE
		}
		h.gpu.layout.instances = slices.DeleteFunc(slices.Clone(h.gpu.layout.instances),
			func(o *gpuInstance) bool { return o == h.gi })
		h.session.node.repartitionedLocked(h.gpu)
		return struct{}{}, nvml.SUCCESS
	})
	return ret
}

// computeStarts returns the possible first compute slices of compute instances of a size.
func (gi *gpuInstance) computeStarts(size int) []int {
	step := 1
	for step < size {
		step *= 2
	}
	var starts []int
	for start := 0; size > 0 && start+size <= gi.profile.slices; start += step {
		starts = append(starts, start)
	}
	return starts
}

// roomFor reports whether the GPU instance has room for a compute instance at a compute slice.
func (gi *gpuInstance) roomFor(start, size int) bool {
	return slices.Contains(gi.computeStarts(size), start) &&
		!slices.ContainsFunc(gi.computes, func(c *computeInstance) bool {
			return c.start < start+size && start < c.start+c.slices
		})
}

// GetComputeInstancePossiblePlacements returns all placements of a compute instance profile, free
// or not.
func (h gpuInstanceHandle) GetComputeInstancePossiblePlacements(
	info *nvml.ComputeInstanceProfileInfo,
) ([]nvml.ComputeInstancePlacement, nvml.Return) {
	const call = "GpuInstanceGetComputeInstancePossiblePlacements"
	return askGI(h, call, func() ([]nvml.ComputeInstancePlacement, nvml.Return) {
		var list []nvml.ComputeInstancePlacement
		size := computeSlices[int(info.Id)]
		for _, start := range h.gi.computeStarts(size) {
			list = append(list, nvml.ComputeInstancePlacement{Start: uint32(start), Size: uint32(size)})
		}
		return list, nvml.SUCCESS
	})
}

// GetComputeInstanceRemainingCapacity returns how many more compute instances of a profile fit now.
func (h gpuInstanceHandle) GetComputeInstanceRemainingCapacity(
	info *nvml.ComputeInstanceProfileInfo,
) (int, nvml.Return) {
	return askGI(h, "GpuInstanceGetComputeInstanceRemainingCapacity", func() (int, nvml.Return) {
		rooms, size := 0, computeSlices[int(info.Id)]
		for _, start := range h.gi.computeStarts(size) {
			if h.gi.roomFor(start, size) {
				rooms++
			}
		}
		return rooms, nvml.SUCCESS
	})
}

// CreateComputeInstance creates a compute instance at the first free placement.
func (h gpuInstanceHandle) CreateComputeInstance(
	info *nvml.ComputeInstanceProfileInfo,
) (nvml.ComputeInstance, nvml.Return) {
	return h.create("GpuInstanceCreateComputeInstance", info.Id, func(size int) int {
		return slices.IndexFunc(h.gi.computeStarts(size), func(start int) bool { return h.gi.roomFor(start, size) })
	})
}

// CreateComputeInstanceWithPlacement creates a compute instance at a placement.
func (h gpuInstanceHandle) CreateComputeInstanceWithPlacement(
	info *nvml.ComputeInstanceProfileInfo, placement *nvml.ComputeInstancePlacement,
) (nvml.ComputeInstance, nvml.Return) {
	return h.create("GpuInstanceCreateComputeInstanceWithPlacement", info.Id, func(size int) int {
		if int(placement.Size) != size || !h.gi.roomFor(int(placement.Start), size) {
			return -1
		}
		return slices.Index(h.gi.computeStarts(size), int(placement.Start))
	})
}

// create creates a compute instance at the placement returned by place, by its position among all
// placements of its size.
func (h gpuInstanceHandle) create(
	call string, profile uint32, place func(size int) int,
) (nvml.ComputeInstance, nvml.Return) {
	return askGI(h, call, func() (nvml.ComputeInstance, nvml.Return) {
		size := computeSlices[int(profile)]
		at := place(size)
		if at < 0 {
			return nil, nvml.ERROR_INSUFFICIENT_RESOURCES
		}
		c := &computeInstance{gi: h.gi, start: h.gi.computeStarts(size)[at], slices: size}
		for slices.ContainsFunc(h.gi.computes, func(o *computeInstance) bool { return o.id == c.id }) {
			c.id++
		}
		h.gi.computes = append(slices.Clone(h.gi.computes), c)
		h.gpu.layout.add(c, h.gpu.spec.UUID)
		h.session.node.repartitionedLocked(h.gpu)
		return computeInstanceHandle{session: h.session, gpu: h.gpu, inst: c}, nvml.SUCCESS
	})
}

// Destroy destroys the compute instance, unless a process computes on it.
func (h computeInstanceHandle) Destroy() nvml.Return {
	gi := gpuInstanceHandle{session: h.session, gpu: h.gpu, gi: h.inst.gi}
	_, ret := askGI(gi, "ComputeInstanceDestroy", func() (struct{}, nvml.Return) {
		other := func(o *computeInstance) bool { return o == h.inst }
		switch {
		case !slices.Contains(h.inst.gi.computes, h.inst):
			return struct{}{}, nvml.ERROR_NOT_FOUND
		case h.inst.processes > 0:
			return struct{}{}, nvml.ERROR_IN_USE
		}
		h.inst.gi.computes = slices.DeleteFunc(slices.Clone(h.inst.gi.computes), other)
		h.gpu.layout.devices = slices.DeleteFunc(slices.Clone(h.gpu.layout.devices), other)
		h.session.node.repartitionedLocked(h.gpu)
		return struct{}{}, nvml.SUCCESS
	})
	return ret
}
