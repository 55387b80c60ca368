package simulator

import (
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// A gpuInstanceHandle is a session's handle of a GPU instance.
type gpuInstanceHandle struct {
	nvml.GpuInstance // nil
	session          *session
	gpu              *gpu
	gi               *gpuInstance
}

// A computeInstanceHandle is a session's handle of a compute instance.
type computeInstanceHandle struct {
	nvml.ComputeInstance // nil
	session              *session
	gpu                  *gpu
	inst                 *computeInstance
}

var (
	_ nvml.GpuInstance     = gpuInstanceHandle{}
	_ nvml.ComputeInstance = computeInstanceHandle{}
)

// askGI makes a call on a GPU instance. The handle becomes invalid with the layout.
func askGI[T any](h gpuInstanceHandle, call string, answer func() (T, nvml.Return)) (T, nvml.Return) {
	return ask(device{session: h.session, gpu: h.gpu}, call, func(g *gpu) (T, nvml.Return) {
		if !slices.Contains(g.layout.instances, h.gi) {
			var none T
			return none, nvml.ERROR_NOT_FOUND
		}
		return answer()
	})
}

// GetGpuInstanceProfileInfo returns the description of a GPU instance profile, by NVML's number.
func (d device) GetGpuInstanceProfileInfo(number int) (nvml.GpuInstanceProfileInfo, nvml.Return) {
	return ask(d, "DeviceGetGpuInstanceProfileInfo", func(g *gpu) (nvml.GpuInstanceProfileInfo, nvml.Return) {
		if number < 0 || number >= nvml.GPU_INSTANCE_PROFILE_COUNT {
			return nvml.GpuInstanceProfileInfo{}, nvml.ERROR_INVALID_ARGUMENT
		}
		for _, p := range g.spec.model.MIG {
			if p.number == number {
				return nvml.GpuInstanceProfileInfo{
					Id: p.ID, SliceCount: uint32(p.slices), InstanceCount: uint32(p.Count),
					MultiprocessorCount: p.SMs, CopyEngineCount: p.CopyEngines, DecoderCount: p.Decoders,
					JpegCount: p.JPEGs,
					OfaCount:  p.OFAs, MemorySizeMB: p.MemoryMiB,
				}, nvml.SUCCESS
			}
		}
		return nvml.GpuInstanceProfileInfo{}, nvml.ERROR_NOT_SUPPORTED
	})
}

// profileLocked returns the profile with the driver's ID.
func (g *gpu) profileLocked(id uint32) (MIGProfile, bool) {
	i := slices.IndexFunc(g.spec.model.MIG, func(p MIGProfile) bool { return p.ID == id })
	if i < 0 {
		return MIGProfile{}, false
	}
	return g.spec.model.MIG[i], true
}

// GetGpuInstancePossiblePlacements returns all placements of a profile, free or not.
func (d device) GetGpuInstancePossiblePlacements(
	info *nvml.GpuInstanceProfileInfo,
) ([]nvml.GpuInstancePlacement, nvml.Return) {
	const call = "DeviceGetGpuInstancePossiblePlacements"
	return ask(d, call, func(g *gpu) ([]nvml.GpuInstancePlacement, nvml.Return) {
		p, ok := g.profileLocked(info.Id)
		if !ok {
			return nil, nvml.ERROR_NOT_SUPPORTED
		}
		var list []nvml.GpuInstancePlacement
		for _, start := range p.starts {
			list = append(list, nvml.GpuInstancePlacement{Start: uint32(start), Size: uint32(p.memory)})
		}
		return list, nvml.SUCCESS
	})
}

// GetGpuInstances returns the GPU instances of a profile.
func (d device) GetGpuInstances(info *nvml.GpuInstanceProfileInfo) ([]nvml.GpuInstance, nvml.Return) {
	return ask(d, "DeviceGetGpuInstances", func(g *gpu) ([]nvml.GpuInstance, nvml.Return) {
		if !g.mig {
			return nil, nvml.ERROR_NOT_SUPPORTED
		}
		var list []nvml.GpuInstance
		for _, gi := range g.layout.instances {
			if gi.profile.ID == info.Id {
				list = append(list, gpuInstanceHandle{session: d.session, gpu: g, gi: gi})
			}
		}
		return list, nvml.SUCCESS
	})
}

// GetGpuInstanceById returns the GPU instance with an ID.
func (d device) GetGpuInstanceById(id int) (nvml.GpuInstance, nvml.Return) {
	return ask(d, "DeviceGetGpuInstanceById", func(g *gpu) (nvml.GpuInstance, nvml.Return) {
		for _, gi := range g.layout.instances {
			if gi.id == id {
				return gpuInstanceHandle{session: d.session, gpu: g, gi: gi}, nvml.SUCCESS
			}
		}
		return nil, nvml.ERROR_NOT_FOUND
	})
}

// GetInfo returns the ID and placement of the instance.
func (h gpuInstanceHandle) GetInfo() (nvml.GpuInstanceInfo, nvml.Return) {
	return askGI(h, "GpuInstanceGetInfo", func() (nvml.GpuInstanceInfo, nvml.Return) {
		return nvml.GpuInstanceInfo{
			Device: device{session: h.session, gpu: h.gpu}, Id: uint32(h.gi.id), ProfileId: h.gi.profile.ID,
			Placement: nvml.GpuInstancePlacement{Start: uint32(h.gi.start), Size: uint32(h.gi.profile.memory)},
		}, nvml.SUCCESS
	})
}

// computeSlices are the compute slices of the compute instance profiles, by NVML's number, which is
// also the ID here.
var computeSlices = map[int]int{
	nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE: 1, nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE: 2,
	nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE: 3, nvml.COMPUTE_INSTANCE_PROFILE_4_SLICE: 4,
	nvml.COMPUTE_INSTANCE_PROFILE_6_SLICE: 6, nvml.COMPUTE_INSTANCE_PROFILE_7_SLICE: 7,
	nvml.COMPUTE_INSTANCE_PROFILE_8_SLICE: 8,
}

// GetComputeInstanceProfileInfo returns the description of a compute instance profile in this GPU
// instance.
func (h gpuInstanceHandle) GetComputeInstanceProfileInfo(
	number, engines int,
) (nvml.ComputeInstanceProfileInfo, nvml.Return) {
	type info = nvml.ComputeInstanceProfileInfo
	return askGI(h, "GpuInstanceGetComputeInstanceProfileInfo", func() (info, nvml.Return) {
		p, n := h.gi.profile, computeSlices[number]
		switch {
		case number < 0 || number >= nvml.COMPUTE_INSTANCE_PROFILE_COUNT,
			engines != nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED:
			return info{}, nvml.ERROR_INVALID_ARGUMENT
		case n == 0 || n > p.slices:
			return info{}, nvml.ERROR_NOT_SUPPORTED
		}
		return info{
			Id: uint32(number), SliceCount: uint32(n), InstanceCount: uint32(p.slices / n),
			MultiprocessorCount: p.SMs * uint32(n) / uint32(p.slices), SharedCopyEngineCount: p.CopyEngines,
			SharedDecoderCount: p.Decoders, SharedJpegCount: p.JPEGs, SharedOfaCount: p.OFAs,
		}, nvml.SUCCESS
	})
}

// GetComputeInstances returns the compute instances of a profile.
func (h gpuInstanceHandle) GetComputeInstances(
	info *nvml.ComputeInstanceProfileInfo,
) ([]nvml.ComputeInstance, nvml.Return) {
	return askGI(h, "GpuInstanceGetComputeInstances", func() ([]nvml.ComputeInstance, nvml.Return) {
		var list []nvml.ComputeInstance
		for _, c := range h.gi.computes {
			if c.slices == computeSlices[int(info.Id)] {
				list = append(list, computeInstanceHandle{session: h.session, gpu: h.gpu, inst: c})
			}
		}
		return list, nvml.SUCCESS
	})
}

// GetComputeInstanceById returns the compute instance with an ID.
func (h gpuInstanceHandle) GetComputeInstanceById(id int) (nvml.ComputeInstance, nvml.Return) {
	return askGI(h, "GpuInstanceGetComputeInstanceById", func() (nvml.ComputeInstance, nvml.Return) {
		for _, c := range h.gi.computes {
			if c.id == id {
				return computeInstanceHandle{session: h.session, gpu: h.gpu, inst: c}, nvml.SUCCESS
			}
		}
		return nil, nvml.ERROR_NOT_FOUND
	})
}

// GetInfo returns the ID and placement of the instance.
func (h computeInstanceHandle) GetInfo() (nvml.ComputeInstanceInfo, nvml.Return) {
	gi := gpuInstanceHandle{session: h.session, gpu: h.gpu, gi: h.inst.gi}
	return askGI(gi, "ComputeInstanceGetInfo", func() (nvml.ComputeInstanceInfo, nvml.Return) {
		info := nvml.ComputeInstanceInfo{
			Device: device{session: h.session, gpu: h.gpu}, GpuInstance: gi, Id: uint32(h.inst.id),
			Placement: nvml.ComputeInstancePlacement{Start: uint32(h.inst.start), Size: uint32(h.inst.slices)},
		}
		for number, n := range computeSlices {
			if n == h.inst.slices {
				info.ProfileId = uint32(number)
			}
		}
		return info, nvml.SUCCESS
	})
}
