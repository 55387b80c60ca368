package nvidia

import (
	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// What the driver has for GPU instances and compute instances, beside what scans need. Methods are those of go-nvml, except where
// their comments say otherwise.

// A migMode is the MIG mode that is in force and the one that is pending.
type migMode struct{ current, pending int }

// GetMigModes is GetMigMode with the pending mode.
func (d device) GetMigModes() (migMode, nvml.Return) {
	return query(d, "GetMigMode", func() (migMode, nvml.Return) {
		current, pending, ret := d.handle.GetMigMode()
		return migMode{current, pending}, ret
	})
}

func (d device) GetGpuInstancePossiblePlacements(info nvml.GpuInstanceProfileInfo) ([]nvml.GpuInstancePlacement, nvml.Return) {
	return queryFor(d, "GetGpuInstancePossiblePlacements", int(info.Id), func(int) ([]nvml.GpuInstancePlacement, nvml.Return) {
		return d.handle.GetGpuInstancePossiblePlacements(&info)
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

// GetComputeInstances returns what the compute instances of a profile are.
func (i gpuInstance) GetComputeInstances(info nvml.ComputeInstanceProfileInfo) ([]nvml.ComputeInstanceInfo, nvml.Return) {
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
