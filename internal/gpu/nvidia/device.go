package nvidia

import (
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// A device is a session's handle of a GPU or MIG device. All handles of a session to the same
// device are equal. Its methods are those of nvml.Device, unless their comments differ.
type device struct {
	api    *api
	handle nvml.Device
}

func (d device) GetUUID() (string, nvml.Return) { return query(d, "GetUUID", d.handle.GetUUID) }
func (d device) GetPciInfo() (nvml.PciInfo, nvml.Return) {
	return query(d, "GetPciInfo", d.handle.GetPciInfo)
}
func (d device) GetMinorNumber() (int, nvml.Return) {
	return query(d, "GetMinorNumber", d.handle.GetMinorNumber)
}
func (d device) GetName() (string, nvml.Return) { return query(d, "GetName", d.handle.GetName) }
func (d device) GetBrand() (nvml.BrandType, nvml.Return) {
	return query(d, "GetBrand", d.handle.GetBrand)
}
func (d device) GetAddressingMode() (nvml.DeviceAddressingMode, nvml.Return) {
	return query(d, "GetAddressingMode", d.handle.GetAddressingMode)
}
func (d device) GetMemoryInfo() (nvml.Memory, nvml.Return) {
	return query(d, "GetMemoryInfo", d.handle.GetMemoryInfo)
}

func (d device) GetArchitecture() (nvml.DeviceArchitecture, nvml.Return) {
	return query(d, "GetArchitecture", d.handle.GetArchitecture)
}

func (d device) GetCudaComputeCapability() (inventory.ComputeCapability, nvml.Return) {
	return query(d, "GetCudaComputeCapability", func() (inventory.ComputeCapability, nvml.Return) {
		major, minor, ret := d.handle.GetCudaComputeCapability()
		return inventory.ComputeCapability{Major: major, Minor: minor}, ret
	})
}

// GetMigMode returns the current mode, not the pending one.
func (d device) GetMigMode() (int, nvml.Return) {
	return query(d, "GetMigMode", func() (int, nvml.Return) {
		mode, _, ret := d.handle.GetMigMode()
		return mode, ret
	})
}

func (d device) GetMaxMigDeviceCount() (int, nvml.Return) {
	count, ret := query(d, "GetMaxMigDeviceCount", d.handle.GetMaxMigDeviceCount)
	return min(count, maxMIGDevices), ret
}

func (d device) GetMigDeviceHandleByIndex(index int) (device, nvml.Return) {
	handle, ret := queryFor(d, "GetMigDeviceHandleByIndex", index, d.handle.GetMigDeviceHandleByIndex)
	return device{d.api, handle}, ret
}

func (d device) GetGpuInstanceID() (int, nvml.Return) {
	return query(d, "GetGpuInstanceId", d.handle.GetGpuInstanceId)
}
func (d device) GetComputeInstanceID() (int, nvml.Return) {
	return query(d, "GetComputeInstanceId", d.handle.GetComputeInstanceId)
}

func (d device) GetAttributes() (nvml.DeviceAttributes, nvml.Return) {
	return query(d, "GetAttributes", d.handle.GetAttributes)
}

func (d device) GetGpuInstanceProfileInfo(number int) (nvml.GpuInstanceProfileInfo, nvml.Return) {
	return queryFor(d, "GetGpuInstanceProfileInfo", number, d.handle.GetGpuInstanceProfileInfo)
}

func (d device) GetGpuInstanceByID(id int) (gpuInstance, nvml.Return) {
	handle, ret := queryFor(d, "GetGpuInstanceById", id, d.handle.GetGpuInstanceById)
	return gpuInstance{d.api, handle}, ret
}

// A gpuInstance is a session's handle of a GPU instance.
type gpuInstance struct {
	api    *api
	handle nvml.GpuInstance
}

func (i gpuInstance) GetInfo() (nvml.GpuInstanceInfo, nvml.Return) {
	return invoke(i.api, "nvmlGpuInstanceGetInfo", i.handle.GetInfo)
}

func (i gpuInstance) GetComputeInstanceProfileInfo(number, engines int) (nvml.ComputeInstanceProfileInfo, nvml.Return) {
	const function = "nvmlGpuInstanceGetComputeInstanceProfileInfo"
	return invoke(i.api, function, func() (nvml.ComputeInstanceProfileInfo, nvml.Return) {
		return i.handle.GetComputeInstanceProfileInfo(number, engines)
	})
}

// FindComputeInstance looks up a compute instance by ID.
func (i gpuInstance) FindComputeInstance(id int) nvml.Return {
	_, ret := invoke(i.api, "nvmlGpuInstanceGetComputeInstanceById", func() (nvml.ComputeInstance, nvml.Return) {
		return i.handle.GetComputeInstanceById(id)
	})
	return ret
}

// GetComputeInstanceInfo returns the description of the compute instance with an ID.
func (i gpuInstance) GetComputeInstanceInfo(id int) (nvml.ComputeInstanceInfo, nvml.Return) {
	const function = "nvmlGpuInstanceGetComputeInstanceById"
	ci, ret := invoke(i.api, function, func() (nvml.ComputeInstance, nvml.Return) {
		return i.handle.GetComputeInstanceById(id)
	})
	if ret != nvml.SUCCESS {
		return nvml.ComputeInstanceInfo{}, ret
	}
	return invoke(i.api, "nvmlComputeInstanceGetInfo", ci.GetInfo)
}

func (d device) GetNvLinkState(lane int) (nvml.EnableState, nvml.Return) {
	return queryFor(d, "GetNvLinkState", lane, d.handle.GetNvLinkState)
}

func (d device) GetNvLinkVersion(lane int) (uint32, nvml.Return) {
	return queryFor(d, "GetNvLinkVersion", lane, d.handle.GetNvLinkVersion)
}

func (d device) GetNvLinkRemoteDeviceType(lane int) (nvml.IntNvLinkDeviceType, nvml.Return) {
	return queryFor(d, "GetNvLinkRemoteDeviceType", lane, d.handle.GetNvLinkRemoteDeviceType)
}

func (d device) GetNvLinkRemotePciInfo(lane int) (nvml.PciInfo, nvml.Return) {
	return queryFor(d, "GetNvLinkRemotePciInfo", lane, d.handle.GetNvLinkRemotePciInfo)
}

func (d device) GetTopologyCommonAncestor(other device) (nvml.GpuTopologyLevel, nvml.Return) {
	return query(d, "GetTopologyCommonAncestor", func() (nvml.GpuTopologyLevel, nvml.Return) {
		return d.handle.GetTopologyCommonAncestor(other.handle)
	})
}

// GetFieldValue is GetFieldValues for one field.
func (d device) GetFieldValue(field int) (nvml.FieldValue, nvml.Return) {
	return d.GetScopedFieldValue(field, 0)
}

// A remapping has the state of remapped memory rows: done, pending and failed.
type remapping struct {
	correctable, uncorrectable int
	pending, failed            bool
}

func (d device) GetRemappedRows() (remapping, nvml.Return) {
	return query(d, "GetRemappedRows", func() (remapping, nvml.Return) {
		correctable, uncorrectable, pending, failed, ret := d.handle.GetRemappedRows()
		return remapping{correctable, uncorrectable, pending, failed}, ret
	})
}

// GetUncorrectedErrors is GetTotalEccErrors for uncorrected errors since the driver was loaded or
// the GPU was reset.
func (d device) GetUncorrectedErrors() (uint64, nvml.Return) {
	return query(d, "GetTotalEccErrors", func() (uint64, nvml.Return) {
		return d.handle.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
	})
}

func (d device) GetUnrepairableMemoryFlag() (nvml.UnrepairableMemoryStatus_v1, nvml.Return) {
	return query(d, "GetUnrepairableMemoryFlag_v1", d.handle.GetUnrepairableMemoryFlag_v1)
}

func (d device) GetSramEccErrorStatus() (nvml.EccSramErrorStatus, nvml.Return) {
	return query(d, "GetSramEccErrorStatus", d.handle.GetSramEccErrorStatus)
}

// GetGpuFabricInfo returns the fabric state from the newest version of the function in the driver.
func (d device) GetGpuFabricInfo() (nvml.GpuFabricInfo_v3, nvml.Return) {
	info, ret := query(d, "GetGpuFabricInfoV", func() (nvml.GpuFabricInfo_v3, nvml.Return) {
		info, ret := d.handle.GetGpuFabricInfoV().V3()
		if ret == nvml.ERROR_ARGUMENT_VERSION_MISMATCH || ret == nvml.ERROR_INVALID_ARGUMENT { // before R580
			var v2 nvml.GpuFabricInfo_v2
			v2, ret = d.handle.GetGpuFabricInfoV().V2()
			info = nvml.GpuFabricInfo_v3{
				ClusterUuid: v2.ClusterUuid, CliqueId: v2.CliqueId, State: v2.State, Status: v2.Status,
				HealthMask: v2.HealthMask,
			}
		}
		return info, ret
	})
	if ret != nvml.ERROR_FUNCTION_NOT_FOUND {
		return info, ret
	}
	return query(d, "GetGpuFabricInfo", func() (nvml.GpuFabricInfo_v3, nvml.Return) {
		v1, ret := d.handle.GetGpuFabricInfo()
		return nvml.GpuFabricInfo_v3{ClusterUuid: v1.ClusterUuid, CliqueId: v1.CliqueId, State: v1.State,
			Status: v1.Status}, ret
	})
}

func (d device) GetRetiredPagesPendingStatus() (nvml.EnableState, nvml.Return) {
	return query(d, "GetRetiredPagesPendingStatus", d.handle.GetRetiredPagesPendingStatus)
}

func (d device) GetRepairStatus() (nvml.RepairStatus, nvml.Return) {
	return query(d, "GetRepairStatus", d.handle.GetRepairStatus)
}

func (d device) GetPcieReplayCounter() (int, nvml.Return) {
	return query(d, "GetPcieReplayCounter", d.handle.GetPcieReplayCounter)
}

func (d device) GetPersistenceMode() (nvml.EnableState, nvml.Return) {
	return query(d, "GetPersistenceMode", d.handle.GetPersistenceMode)
}

// GetTotalEnergyConsumption returns millijoules since the driver was loaded.
func (d device) GetTotalEnergyConsumption() (uint64, nvml.Return) {
	return query(d, "GetTotalEnergyConsumption", d.handle.GetTotalEnergyConsumption)
}

// GetCurrentClocksEventReasons uses the old function name before R535. CUDA 14 will drop the old
// name.
func (d device) GetCurrentClocksEventReasons() (uint64, nvml.Return) {
	reasons, ret := query(d, "GetCurrentClocksEventReasons", d.handle.GetCurrentClocksEventReasons)
	if ret == nvml.ERROR_FUNCTION_NOT_FOUND {
		return query(d, "GetCurrentClocksThrottleReasons", d.handle.GetCurrentClocksThrottleReasons)
	}
	return reasons, ret
}

func (d device) GetComputeRunningProcesses() ([]nvml.ProcessInfo, nvml.Return) {
	return invoke(d.api, "nvmlDeviceGetComputeRunningProcesses", func() ([]nvml.ProcessInfo, nvml.Return) {
		return computeProcesses(d.handle)
	})
}

// GetPowerManagementLimit returns mW.
func (d device) GetPowerManagementLimit() (uint32, nvml.Return) {
	return query(d, "GetPowerManagementLimit", d.handle.GetPowerManagementLimit)
}

// GetPowerManagementDefaultLimit returns mW.
func (d device) GetPowerManagementDefaultLimit() (uint32, nvml.Return) {
	return query(d, "GetPowerManagementDefaultLimit", d.handle.GetPowerManagementDefaultLimit)
}

// GetApplicationsClock returns MHz. CUDA 14 will drop it.
func (d device) GetApplicationsClock(clock nvml.ClockType) (uint32, nvml.Return) {
	return queryFor(d, "GetApplicationsClock", int(clock), func(int) (uint32, nvml.Return) {
		return d.handle.GetApplicationsClock(clock)
	})
}

// GetDefaultApplicationsClock returns MHz. CUDA 14 will drop it.
func (d device) GetDefaultApplicationsClock(clock nvml.ClockType) (uint32, nvml.Return) {
	return queryFor(d, "GetDefaultApplicationsClock", int(clock), func(int) (uint32, nvml.Return) {
		return d.handle.GetDefaultApplicationsClock(clock)
	})
}

// ResetApplicationsClocks resets the application clocks. CUDA 14 will drop it.
func (d device) ResetApplicationsClocks() nvml.Return {
	return command(d, "ResetApplicationsClocks", d.handle.ResetApplicationsClocks)
}

func (d device) ClearEccErrorCounts(counter nvml.EccCounterType) nvml.Return {
	return command(d, "ClearEccErrorCounts", func() nvml.Return { return d.handle.ClearEccErrorCounts(counter) })
}

// GetMemoryLimits returns the memory limits of a cgroup, by its directory, since R615.
func (d device) GetMemoryLimits(cgroup string) (nvml.MemoryLimits_v1, nvml.Return) {
	return invoke(d.api, "nvmlDeviceGetMemoryLimits_v1", func() (nvml.MemoryLimits_v1, nvml.Return) {
		return d.handle.GetMemoryLimits_v1(cgroup)
	})
}

func (d device) GetComputeMode() (nvml.ComputeMode, nvml.Return) {
	return invoke(d.api, "nvmlDeviceGetComputeMode", d.handle.GetComputeMode)
}

// GetVirtualizationMode returns whether the GPU is virtual, or belongs to a hypervisor.
func (d device) GetVirtualizationMode() (nvml.GpuVirtualizationMode, nvml.Return) {
	return query(d, "GetVirtualizationMode", d.handle.GetVirtualizationMode)
}

func (d device) SetComputeMode(mode nvml.ComputeMode) nvml.Return {
	return command(d, "SetComputeMode", func() nvml.Return { return d.handle.SetComputeMode(mode) })
}

func (d device) GetSupportedEventTypes() (uint64, nvml.Return) {
	return query(d, "GetSupportedEventTypes", d.handle.GetSupportedEventTypes)
}

func (d device) RegisterEvents(mask uint64, set nvml.EventSet) nvml.Return {
	return command(d, "RegisterEvents", func() nvml.Return { return d.handle.RegisterEvents(mask, set) })
}
