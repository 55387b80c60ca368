package simulator

import (
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// A migDevice is a session's handle of a MIG device. NVML calls for GPUs only are not supported.
type migDevice struct {
	nvml.Device // nil: calls that the simulator does not implement panic
	session     *session
	gpu         *gpu
	index       int
}

var _ nvml.Device = migDevice{}

// askMIG makes a call on a MIG device. If another MIG device gets the index, the handle refers to
// that device, as in the driver.
func askMIG[T any](d migDevice, call string, answer func(*gpu, *computeInstance) (T, nvml.Return)) (T, nvml.Return) {
	return ask(device{session: d.session, gpu: d.gpu}, call, func(g *gpu) (T, nvml.Return) {
		at := slices.IndexFunc(g.layout.devices, func(c *computeInstance) bool { return c.index == d.index })
		if at < 0 {
			var none T
			return none, nvml.ERROR_NOT_FOUND
		}
		return answer(g, g.layout.devices[at])
	})
}

// GetMigMode returns the current and the pending MIG mode.
func (d device) GetMigMode() (int, int, nvml.Return) {
	modes, ret := ask(d, "DeviceGetMigMode", func(g *gpu) (pair[int, int], nvml.Return) {
		if len(g.spec.model.MIG) == 0 {
			return pair[int, int]{}, nvml.ERROR_NOT_SUPPORTED
		}
		number := map[bool]int{true: nvml.DEVICE_MIG_ENABLE, false: nvml.DEVICE_MIG_DISABLE}
		return pair[int, int]{number[g.mig], number[g.pending]}, nvml.SUCCESS
	})
	return modes.a, modes.b, ret
}

// GetMaxMigDeviceCount returns the maximum number of MIG devices.
func (d device) GetMaxMigDeviceCount() (int, nvml.Return) {
	return ask(d, "DeviceGetMaxMigDeviceCount", func(g *gpu) (int, nvml.Return) {
		count := 0
		for _, p := range g.spec.model.MIG {
			count = max(count, p.Count)
		}
		return d.session.node.numberLocked("DeviceGetMaxMigDeviceCount", g, count), nvml.SUCCESS
	})
}

// GetMigDeviceHandleByIndex returns a MIG device of the GPU.
func (d device) GetMigDeviceHandleByIndex(index int) (nvml.Device, nvml.Return) {
	return ask(d, "DeviceGetMigDeviceHandleByIndex", func(g *gpu) (nvml.Device, nvml.Return) {
		all := g.layout.devices
		switch {
		case len(g.spec.model.MIG) == 0:
			return nil, nvml.ERROR_NOT_SUPPORTED
		case index < 0:
			return nil, nvml.ERROR_INVALID_ARGUMENT
		}
		if !slices.ContainsFunc(all, func(c *computeInstance) bool { return c.index == index }) {
			return nil, nvml.ERROR_NOT_FOUND
		}
		return migDevice{session: d.session, gpu: g, index: index}, nvml.SUCCESS
	})
}

// GetUUID returns the MIG device's UUID.
func (d migDevice) GetUUID() (string, nvml.Return) {
	return askMIG(d, "DeviceGetUUID", func(g *gpu, c *computeInstance) (string, nvml.Return) {
		return d.session.node.textLocked("DeviceGetUUID", g, c, d.session.node.uuidLocked(g, c)), nvml.SUCCESS
	})
}

// GetName returns the product's name and the size.
func (d migDevice) GetName() (string, nvml.Return) {
	return askMIG(d, "DeviceGetName", func(g *gpu, c *computeInstance) (string, nvml.Return) {
		return fmt.Sprintf("%s MIG %s", g.spec.model.Name, c.name()), nvml.SUCCESS
	})
}

// GetGpuInstanceId returns the ID of the GPU instance.
func (d migDevice) GetGpuInstanceId() (int, nvml.Return) {
	return askMIG(d, "DeviceGetGpuInstanceId", func(_ *gpu, c *computeInstance) (int, nvml.Return) {
		return c.gi.id, nvml.SUCCESS
	})
}

// GetComputeInstanceId returns the ID of the compute instance in its GPU instance.
func (d migDevice) GetComputeInstanceId() (int, nvml.Return) {
	return askMIG(d, "DeviceGetComputeInstanceId", func(_ *gpu, c *computeInstance) (int, nvml.Return) {
		return c.id, nvml.SUCCESS
	})
}

// GetMemoryInfo returns the size of the GPU instance's memory.
func (d migDevice) GetMemoryInfo() (nvml.Memory, nvml.Return) {
	return askMIG(d, "DeviceGetMemoryInfo", func(g *gpu, c *computeInstance) (nvml.Memory, nvml.Return) {
		m := d.session.node.instanceMemoryLocked(g, c.gi)
		return nvml.Memory{Total: m.Total, Used: m.Used, Free: m.Free}, nvml.SUCCESS
	})
}

// GetMemoryInfo_v2 returns the size of the GPU instance's memory.
func (d migDevice) GetMemoryInfo_v2() (nvml.Memory_v2, nvml.Return) {
	return askMIG(d, "DeviceGetMemoryInfo_v2", func(g *gpu, c *computeInstance) (nvml.Memory_v2, nvml.Return) {
		return d.session.node.instanceMemoryLocked(g, c.gi), nvml.SUCCESS
	})
}

// GetAttributes returns the resources of the MIG device.
func (d migDevice) GetAttributes() (nvml.DeviceAttributes, nvml.Return) {
	return askMIG(d, "DeviceGetAttributes", func(_ *gpu, c *computeInstance) (nvml.DeviceAttributes, nvml.Return) {
		p := c.gi.profile
		return nvml.DeviceAttributes{
			MultiprocessorCount:   p.SMs * uint32(c.slices) / uint32(p.slices),
			SharedCopyEngineCount: p.CopyEngines, SharedDecoderCount: p.Decoders, SharedJpegCount: p.JPEGs,
			SharedOfaCount: p.OFAs, GpuInstanceSliceCount: uint32(p.slices),
			ComputeInstanceSliceCount: uint32(c.slices),
			MemorySizeMB:              p.MemoryMiB,
		}, nvml.SUCCESS
	})
}

// GetComputeRunningProcesses returns the processes injected into the MIG device.
func (d migDevice) GetComputeRunningProcesses() ([]nvml.ProcessInfo, nvml.Return) {
	running := func(_ *gpu, c *computeInstance) ([]nvml.ProcessInfo, nvml.Return) {
		return c.runningLocked(), nvml.SUCCESS
	}
	return askMIG(d, "DeviceGetComputeRunningProcesses", running)
}

// runningLocked returns the processes on a MIG device.
func (c *computeInstance) runningLocked() []nvml.ProcessInfo {
	var list []nvml.ProcessInfo
	for i := range c.processes {
		list = append(list, nvml.ProcessInfo{
			Pid: uint32(200000 + 1000*c.index + i), UsedGpuMemory: 1 << 30,
			GpuInstanceId: uint32(c.gi.id), ComputeInstanceId: uint32(c.id),
		})
	}
	return list
}
