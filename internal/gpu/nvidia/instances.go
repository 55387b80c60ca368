package nvidia

import (
	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Functions for GPU instances and compute instances that scans do not use. Methods are those of
// go-nvml, unless their comments differ.

// A migMode has the current and the pending MIG mode.
type migMode struct{ current, pending int }

// GetMigModes is GetMigMode with the pending mode.
func (d device) GetMigModes() (migMode, nvml.Return) {
	return query(d, "GetMigMode", func() (migMode, nvml.Return) {
		current, pending, ret := d.handle.GetMigMode()
		return migMode{current, pending}, ret
	})
}

func (d device) GetGpuInstancePossiblePlacements(
	info nvml.GpuInstanceProfileInfo,
) ([]nvml.GpuInstancePlacement, nvml.Return) {
	return queryFor(d, "GetGpuInstancePossiblePlacements", int(info.Id),
		func(int) ([]nvml.GpuInstancePlacement, nvml.Return) {
			return possiblePlacements(d.handle, &info)
		})
}

// GetGpuInstances returns the GPU instances of a profile.
func (d device) GetGpuInstances(info nvml.GpuInstanceProfileInfo) ([]gpuInstance, nvml.Return) {
	info.InstanceCount = min(info.InstanceCount, maxMIGDevices)
	handles, ret := invoke(d.api, "nvmlDeviceGetGpuInstances", func() ([]nvml.GpuInstance, nvml.Return) {
		return d.handle.GetGpuInstances(&info)
	})
	instances := make([]gpuInstance, len(handles))
	for i, handle := range handles {
		instances[i] = gpuInstance{d.api, handle}
	}
	return instances, ret
}

// GetComputeInstances returns the descriptions of the compute instances of a profile.
func (i gpuInstance) GetComputeInstances(
	info nvml.ComputeInstanceProfileInfo,
) ([]nvml.ComputeInstanceInfo, nvml.Return) {
	info.InstanceCount = min(info.InstanceCount, maxMIGDevices)
	handles, ret := invoke(i.api, "nvmlGpuInstanceGetComputeInstances", func() ([]nvml.ComputeInstance, nvml.Return) {
		return i.handle.GetComputeInstances(&info)
	})
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	instances := make([]nvml.ComputeInstanceInfo, len(handles))
	for n, handle := range handles {
		if instances[n], ret = invoke(i.api, "nvmlComputeInstanceGetInfo", handle.GetInfo); ret != nvml.SUCCESS {
			return nil, ret
		}
	}
	return instances, nvml.SUCCESS
}

// SetMigMode returns first the result of activating the mode.
func (d device) SetMigMode(mode int) (activation, ret nvml.Return) {
	activation, ret = invoke(d.api, "nvmlDeviceSetMigMode",
		func() (nvml.Return, nvml.Return) { return d.handle.SetMigMode(mode) })
	d.forget()
	return activation, ret
}

// CreateGpuInstance is CreateGpuInstanceWithPlacement for the ID of a profile.
func (d device) CreateGpuInstance(profile int, placement nvml.GpuInstancePlacement) (gpuInstance, nvml.Return) {
	handle, ret := invoke(d.api, "nvmlDeviceCreateGpuInstanceWithPlacement", func() (nvml.GpuInstance, nvml.Return) {
		return d.handle.CreateGpuInstanceWithPlacement(&nvml.GpuInstanceProfileInfo{Id: uint32(profile)}, &placement)
	})
	return gpuInstance{d.api, handle}, ret
}

func (i gpuInstance) Destroy() nvml.Return {
	return act(i.api, "nvmlGpuInstanceDestroy", i.handle.Destroy)
}

// CreateComputeInstance creates an instance and returns the description. The placement is the given
// one, or the driver's choice if the driver refuses the given one.
func (i gpuInstance) CreateComputeInstance(
	profile nvml.ComputeInstanceProfileInfo, placement nvml.ComputeInstancePlacement,
) (nvml.ComputeInstanceInfo, nvml.Return) {
	const placed = "nvmlGpuInstanceCreateComputeInstanceWithPlacement"
	handle, ret := invoke(i.api, placed, func() (nvml.ComputeInstance, nvml.Return) {
		return i.handle.CreateComputeInstanceWithPlacement(&profile, &placement)
	})
	switch ret {
	case nvml.ERROR_FUNCTION_NOT_FOUND, nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_INVALID_ARGUMENT,
		nvml.ERROR_INSUFFICIENT_RESOURCES:
		handle, ret = invoke(i.api, "nvmlGpuInstanceCreateComputeInstance", func() (nvml.ComputeInstance, nvml.Return) {
			return i.handle.CreateComputeInstance(&profile)
		})
	default: // created, or no other placement is better
	}
	if ret != nvml.SUCCESS {
		return nvml.ComputeInstanceInfo{}, ret
	}
	return invoke(i.api, "nvmlComputeInstanceGetInfo", handle.GetInfo)
}

// DestroyComputeInstance destroys the compute instance with an ID.
func (i gpuInstance) DestroyComputeInstance(id int) nvml.Return {
	const find = "nvmlGpuInstanceGetComputeInstanceById"
	ci, ret := invoke(i.api, find, func() (nvml.ComputeInstance, nvml.Return) {
		return i.handle.GetComputeInstanceById(id)
	})
	if ret != nvml.SUCCESS {
		return ret
	}
	return act(i.api, "nvmlComputeInstanceDestroy", ci.Destroy)
}
