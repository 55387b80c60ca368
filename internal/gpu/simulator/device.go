package simulator

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// A device is a session's handle of a GPU. All handles of a session to the same GPU are equal.
type device struct {
	nvml.Device // nil: calls that the simulator does not implement panic
	session     *session
	gpu         *gpu
}

var _ nvml.Device = device{}

// ask makes a call on a GPU.
func ask[T any](d device, call string, answer func(*gpu) (T, nvml.Return)) (T, nvml.Return) {
	n := d.session.node
	n.mu.Lock()
	defer n.mu.Unlock()
	if ret := d.session.admitLocked(call, d.gpu); ret != nvml.SUCCESS {
		var none T
		return none, ret
	}
	return answer(d.gpu)
}

// pair has the results of a call with two values.
type pair[A, B any] struct {
	a A
	b B
}

// GetUUID returns the GPU's UUID.
func (d device) GetUUID() (string, nvml.Return) {
	return ask(d, "DeviceGetUUID", func(g *gpu) (string, nvml.Return) {
		return d.session.node.textLocked("DeviceGetUUID", g, nil, g.spec.UUID), nvml.SUCCESS
	})
}

// GetMinorNumber returns the N of /dev/nvidiaN.
func (d device) GetMinorNumber() (int, nvml.Return) {
	return ask(d, "DeviceGetMinorNumber", func(g *gpu) (int, nvml.Return) {
		return d.session.node.numberLocked("DeviceGetMinorNumber", g, g.spec.minor), nvml.SUCCESS
	})
}

// GetName returns the product's name.
func (d device) GetName() (string, nvml.Return) {
	return ask(d, "DeviceGetName", func(g *gpu) (string, nvml.Return) {
		return d.session.node.textLocked("DeviceGetName", g, nil, g.spec.model.Name), nvml.SUCCESS
	})
}

// GetBrand returns the product's brand.
func (d device) GetBrand() (nvml.BrandType, nvml.Return) {
	return ask(d, "DeviceGetBrand", func(g *gpu) (nvml.BrandType, nvml.Return) {
		return g.spec.model.brand, nvml.SUCCESS
	})
}

// GetAddressingMode returns how the GPU accesses memory of host processes.
func (d device) GetAddressingMode() (nvml.DeviceAddressingMode, nvml.Return) {
	return ask(d, "DeviceGetAddressingMode", func(g *gpu) (nvml.DeviceAddressingMode, nvml.Return) {
		if g.spec.model.Addressing == "" {
			return nvml.DeviceAddressingMode{}, nvml.ERROR_NOT_SUPPORTED
		}
		return nvml.DeviceAddressingMode{Value: uint32(g.spec.model.addressing)}, nvml.SUCCESS
	})
}

// GetArchitecture returns the chip's generation.
func (d device) GetArchitecture() (nvml.DeviceArchitecture, nvml.Return) {
	return ask(d, "DeviceGetArchitecture", func(g *gpu) (nvml.DeviceArchitecture, nvml.Return) {
		return nvml.DeviceArchitecture(g.spec.model.architecture), nvml.SUCCESS
	})
}

// GetCudaComputeCapability returns the CUDA compute capability.
func (d device) GetCudaComputeCapability() (int, int, nvml.Return) {
	c, ret := ask(d, "DeviceGetCudaComputeCapability", func(g *gpu) (pair[int, int], nvml.Return) {
		return pair[int, int]{g.spec.model.major, g.spec.model.minor}, nvml.SUCCESS
	})
	return c.a, c.b, ret
}

// reservedMiB is the memory reserved by the driver.
const reservedMiB = 512

// GetMemoryInfo returns the size of the memory. Used includes the memory reserved by the driver.
func (d device) GetMemoryInfo() (nvml.Memory, nvml.Return) {
	return ask(d, "DeviceGetMemoryInfo", func(g *gpu) (nvml.Memory, nvml.Return) {
		m := d.session.node.memoryLocked(g)
		return nvml.Memory{Total: m.Total, Used: m.Used + m.Reserved, Free: m.Free}, nvml.SUCCESS
	})
}

// GetMemoryInfo_v2 returns the size of the memory, with the memory reserved by the driver listed
// separately.
func (d device) GetMemoryInfo_v2() (nvml.Memory_v2, nvml.Return) {
	return ask(d, "DeviceGetMemoryInfo_v2", func(g *gpu) (nvml.Memory_v2, nvml.Return) {
		return d.session.node.memoryLocked(g), nvml.SUCCESS
	})
}

// GetMemoryLimits_v1 returns the limits of a cgroup of this machine: the line "nvidia/<PCI address>
// <bytes>" of the file dmem.max in its directory, as in the kernel's controller for other drivers;
// without the file, no limits.
func (d device) GetMemoryLimits_v1(cgroup string) (nvml.MemoryLimits_v1, nvml.Return) {
	return ask(d, "DeviceGetMemoryLimits_v1", func(g *gpu) (nvml.MemoryLimits_v1, nvml.Return) {
		limits := nvml.MemoryLimits_v1{NameSpace: cgroup, HardLimit: nvml.DEVICE_MEMORY_LIMIT_MAX}
		if _, err := os.Stat(cgroup); err != nil {
			return limits, nvml.ERROR_OPERATING_SYSTEM
		}
		text, _ := os.ReadFile(filepath.Join(cgroup, "dmem.max"))
		for line := range strings.Lines(string(text)) {
			if bytes, is := strings.CutPrefix(strings.TrimSpace(line), "nvidia/"+g.spec.BDF+" "); is {
				limits.HardLimit, _ = strconv.ParseUint(bytes, 10, 64)
			}
		}
		return limits, nvml.SUCCESS
	})
}

// GetPciInfo returns the PCI address.
func (d device) GetPciInfo() (nvml.PciInfo, nvml.Return) {
	return ask(d, "DeviceGetPciInfo", func(g *gpu) (nvml.PciInfo, nvml.Return) {
		return g.spec.pci, nvml.SUCCESS
	})
}

// GetComputeRunningProcesses returns the injected processes.
func (d device) GetComputeRunningProcesses() ([]nvml.ProcessInfo, nvml.Return) {
	return ask(d, "DeviceGetComputeRunningProcesses", func(g *gpu) ([]nvml.ProcessInfo, nvml.Return) {
		list := make([]nvml.ProcessInfo, g.processes)
		for i := range list {
			list[i] = nvml.ProcessInfo{
				Pid: uint32(100000 + i), UsedGpuMemory: 1 << 30, GpuInstanceId: unattributed,
				ComputeInstanceId: unattributed,
			}
		}
		for _, c := range g.layout.devices {
			list = append(list, c.runningLocked()...)
		}
		return list, nvml.SUCCESS
	})
}

// GetComputeMode returns which processes may compute on the GPU.
func (d device) GetComputeMode() (nvml.ComputeMode, nvml.Return) {
	return ask(d, "DeviceGetComputeMode", func(g *gpu) (nvml.ComputeMode, nvml.Return) {
		return g.computeMode, nvml.SUCCESS
	})
}

// SetComputeMode sets which processes may compute on the GPU.
func (d device) SetComputeMode(mode nvml.ComputeMode) nvml.Return {
	_, ret := ask(d, "DeviceSetComputeMode", func(g *gpu) (struct{}, nvml.Return) {
		if mode < 0 || mode >= nvml.COMPUTEMODE_COUNT {
			return struct{}{}, nvml.ERROR_INVALID_ARGUMENT
		}
		g.computeMode = nvml.ComputeMode(d.session.node.numberLocked("DeviceSetComputeMode", g, int(mode)))
		return struct{}{}, nvml.SUCCESS
	})
	return ret
}

// GetPersistenceMode returns whether the driver keeps the GPU initialised while no process uses it.
func (d device) GetPersistenceMode() (nvml.EnableState, nvml.Return) {
	return ask(d, "DeviceGetPersistenceMode", func(g *gpu) (nvml.EnableState, nvml.Return) {
		if g.transient {
			return nvml.FEATURE_DISABLED, nvml.SUCCESS
		}
		return nvml.FEATURE_ENABLED, nvml.SUCCESS
	})
}

// usualClock is the default clock of a GPU in MHz.
const usualClock = 1410

func (d device) powerLimit(g *gpu, m moment) (uint32, nvml.Return) {
	return uint32(d.session.node.numberLocked("DeviceGetPowerManagementLimit", g, int(m.watts*1000))), nvml.SUCCESS
}

// GetPowerManagementLimit returns the power limit in mW.
func (d device) GetPowerManagementLimit() (uint32, nvml.Return) {
	return askMoment(d, "DeviceGetPowerManagementLimit", d.powerLimit)
}

// GetEnforcedPowerLimit returns the effective power limit in mW: here the configured limit.
func (d device) GetEnforcedPowerLimit() (uint32, nvml.Return) {
	return askMoment(d, "DeviceGetEnforcedPowerLimit", d.powerLimit)
}

// GetPowerManagementDefaultLimit returns the default power limit in mW.
func (d device) GetPowerManagementDefaultLimit() (uint32, nvml.Return) {
	return askMoment(d, "DeviceGetPowerManagementDefaultLimit", func(_ *gpu, m moment) (uint32, nvml.Return) {
		return uint32(m.watts * 1000), nvml.SUCCESS
	})
}

// GetApplicationsClock returns a clock in MHz.
func (d device) GetApplicationsClock(nvml.ClockType) (uint32, nvml.Return) {
	const call = "DeviceGetApplicationsClock"
	return ask(d, call, func(g *gpu) (uint32, nvml.Return) {
		return uint32(d.session.node.numberLocked(call, g, usualClock)), nvml.SUCCESS
	})
}

// GetDefaultApplicationsClock returns the default clock in MHz.
func (d device) GetDefaultApplicationsClock(nvml.ClockType) (uint32, nvml.Return) {
	return ask(d, "DeviceGetDefaultApplicationsClock", func(*gpu) (uint32, nvml.Return) {
		return usualClock, nvml.SUCCESS
	})
}

// ResetApplicationsClocks does nothing: the simulator has no clocks.
func (d device) ResetApplicationsClocks() nvml.Return {
	_, ret := ask(d, "DeviceResetApplicationsClocks", func(*gpu) (struct{}, nvml.Return) {
		return struct{}{}, nvml.SUCCESS
	})
	return ret
}

// GetTopologyCommonAncestor returns the common ancestor with another GPU in the PCIe tree.
func (d device) GetTopologyCommonAncestor(other nvml.Device) (nvml.GpuTopologyLevel, nvml.Return) {
	return ask(d, "DeviceGetTopologyCommonAncestor", func(g *gpu) (nvml.GpuTopologyLevel, nvml.Return) {
		o, ok := other.(device)
		switch {
		case !ok || o.session != d.session:
			return 0, nvml.ERROR_INVALID_ARGUMENT
		case o.gpu.isLost:
			return 0, nvml.ERROR_GPU_IS_LOST
		case o.gpu == g:
			return nvml.TOPOLOGY_INTERNAL, nvml.SUCCESS
		}
		return commonAncestor(g.spec.PCIe, o.gpu.spec.PCIe), nvml.SUCCESS
	})
}

// askLink makes a call on one NVLink of a GPU.
func askLink[T any](d device, call string, link int, answer func(*gpu, linkEnd) (T, nvml.Return)) (T, nvml.Return) {
	return ask(d, call, func(g *gpu) (T, nvml.Return) {
		var none T
		switch links := g.spec.model.NVLink.Links; {
		case links == 0:
			return none, nvml.ERROR_NOT_SUPPORTED
		case link < 0 || link >= links:
			return none, nvml.ERROR_INVALID_ARGUMENT
		}
		return answer(g, d.session.node.profile.ends[g.slot][link])
	})
}

// activeLocked reports whether an NVLink of a GPU works: both ends exist, and no fault has cut it.
func (n *Node) activeLocked(g *gpu, link int, end linkEnd) bool {
	if !end.exists || g.cut[link] {
		return false
	}
	return end.device == nvml.NVLINK_DEVICE_TYPE_SWITCH || !n.gpus[end.gpu].isLost && !n.gpus[end.gpu].cut[end.link]
}

// GetNvLinkState returns whether an NVLink works.
func (d device) GetNvLinkState(link int) (nvml.EnableState, nvml.Return) {
	return askLink(d, "DeviceGetNvLinkState", link, func(g *gpu, end linkEnd) (nvml.EnableState, nvml.Return) {
		if d.session.node.activeLocked(g, link, end) {
			return nvml.FEATURE_ENABLED, nvml.SUCCESS
		}
		return nvml.FEATURE_DISABLED, nvml.SUCCESS
	})
}

// GetNvLinkVersion returns NVML's number for the version of an NVLink.
func (d device) GetNvLinkVersion(link int) (uint32, nvml.Return) {
	return askLink(d, "DeviceGetNvLinkVersion", link, func(g *gpu, _ linkEnd) (uint32, nvml.Return) {
		return uint32(nvlinkVersions[g.spec.model.NVLink.Version]), nvml.SUCCESS
	})
}

// GetNvLinkRemoteDeviceType returns the type of the device at the other end of an NVLink.
func (d device) GetNvLinkRemoteDeviceType(link int) (nvml.IntNvLinkDeviceType, nvml.Return) {
	type kind = nvml.IntNvLinkDeviceType
	return askLink(d, "DeviceGetNvLinkRemoteDeviceType", link, func(_ *gpu, end linkEnd) (kind, nvml.Return) {
		if !end.exists {
			return nvml.NVLINK_DEVICE_TYPE_UNKNOWN, nvml.ERROR_NOT_SUPPORTED
		}
		return end.device, nvml.SUCCESS
	})
}

// GetNvLinkRemotePciInfo returns the PCI address of the device at the other end of an NVLink.
func (d device) GetNvLinkRemotePciInfo(link int) (nvml.PciInfo, nvml.Return) {
	return askLink(d, "DeviceGetNvLinkRemotePciInfo", link, func(_ *gpu, end linkEnd) (nvml.PciInfo, nvml.Return) {
		if !end.exists {
			return nvml.PciInfo{}, nvml.ERROR_NOT_SUPPORTED
		}
		return end.pci, nvml.SUCCESS
	})
}
