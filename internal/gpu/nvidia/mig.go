package nvidia

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// A migDevice is a MIG device with the inputs of the profile name. The name changes only with these
// inputs.
type migDevice struct {
	device     inventory.MIGDevice
	attributes nvml.DeviceAttributes
}

// readMIG reads the MIG mode of a GPU and its MIG devices into g.lastSeen.
func (s *scanner) readMIG(g *gpu, a *callResults) {
	before := g.lastSeen
	defer func() {
		if g.lastSeen.MIG != before.MIG || !slices.Equal(g.lastSeen.MIGDevices, before.MIGDevices) {
			g.device.forget()
		}
	}()
	g.unread = nil
	mode, ret := g.device.GetMigMode()
	switch supported := a.may("nvmlDeviceGetMigMode", ret); {
	case a.contact != inventory.ContactGood:
		return
	case !supported:
		g.lastSeen.MIG, g.lastSeen.MIGDevices, g.migDevices = inventory.MIGUnsupported, nil, nil
		return
	case mode != nvml.DEVICE_MIG_ENABLE:
		g.lastSeen.MIG, g.lastSeen.MIGDevices, g.migDevices = inventory.MIGDisabled, nil, nil
		return
	}
	g.lastSeen.MIG = inventory.MIGEnabled
	count, ret := g.device.GetMaxMigDeviceCount()
	if !a.may("nvmlDeviceGetMaxMigDeviceCount", ret) {
		return
	}
	var found []migDevice
	for i := range count {
		device, ret := g.device.GetMigDeviceHandleByIndex(i)
		if ret == nvml.ERROR_NOT_FOUND || ret == nvml.ERROR_INVALID_ARGUMENT {
			continue // no MIG device at this index
		}
		m, err := s.readMIGDevice(g, device, ret, a)
		if a.isUseless() {
			return
		}
		if errors.Is(err, errStale) {
			continue
		}
		if err != nil {
			g.unread = append(g.unread, inventory.LeftOut{
				Index:  g.lastSeen.Index,
				Reason: fmt.Sprintf("MIG device %d:%d cannot be read: %v", g.lastSeen.Index, i, err),
			})
			continue
		}
		m.device.Index = i
		found = append(found, m)
	}
	if len(found) == 0 && !g.instancesHidden.Known {
		_, ret := g.device.GetGpuInstanceByID(0)
		g.instancesHidden = inventory.Known(ret == nvml.ERROR_NO_PERMISSION)
	}
	if slices.Equal(found, g.migDevices) {
		return
	}
	g.migDevices = found
	g.lastSeen.MIGDevices = make([]inventory.MIGDevice, len(g.migDevices))
	for i, m := range g.migDevices {
		g.lastSeen.MIGDevices[i] = m.device
	}
}

// errStale is the error for the handle of a deleted MIG device: in a long session, the driver may
// still return such a handle.
var errStale = errors.New("the instance of the MIG device is gone")

// readMIGDevice reads a MIG device of g. ret is the return code for the handle.
func (s *scanner) readMIGDevice(g *gpu, device device, ret nvml.Return, a *callResults) (migDevice, error) {
	// The failure of one MIG device says nothing about the GPU, unless the GPU is gone.
	failed := func(call string, ret nvml.Return) error {
		a.extra(call, ret)
		return withCapability(failure(call, ret))
	}
	if err := failed("nvmlDeviceGetMigDeviceHandleByIndex", ret); err != nil {
		return migDevice{}, err
	}
	var m migDevice
	if m.device.UUID, ret = device.GetUUID(); ret != nvml.SUCCESS {
		return migDevice{}, failed("nvmlDeviceGetUUID", ret)
	}
	if m.device.GI, ret = device.GetGpuInstanceID(); ret != nvml.SUCCESS {
		return migDevice{}, failed("nvmlDeviceGetGpuInstanceId", ret)
	}
	if m.device.CI, ret = device.GetComputeInstanceID(); ret != nvml.SUCCESS {
		return migDevice{}, failed("nvmlDeviceGetComputeInstanceId", ret)
	}
	if m.attributes, ret = device.GetAttributes(); ret != nvml.SUCCESS {
		return migDevice{}, failed("nvmlDeviceGetAttributes", ret)
	}
	if g.lastSeen.MemoryBytes == 0 {
		ret := cmp.Or(g.memory, nvml.ERROR_NOT_SUPPORTED)
		// Every profile name needs the memory size.
		return migDevice{}, withCapability(failure("nvmlDeviceGetMemoryInfo", ret))
	}
	m.device.MemoryBytes = m.attributes.MemorySizeMB << 20
	m.device.Attributes = inventory.MIGAttributes{
		Multiprocessors: int(m.attributes.MultiprocessorCount),
		GISlices:        int(m.attributes.GpuInstanceSliceCount), CISlices: int(m.attributes.ComputeInstanceSliceCount),
		CopyEngines: int(m.attributes.SharedCopyEngineCount), Decoders: int(m.attributes.SharedDecoderCount),
		Encoders: int(m.attributes.SharedEncoderCount), JPEGs: int(m.attributes.SharedJpegCount),
		OFAs: int(m.attributes.SharedOfaCount),
	}
	m.device.GICap, m.device.CICap = s.capabilities(g.lastSeen.Minor, m.device.GI, m.device.CI)
	gi, ret := instanceOf(g, &m)
	g.instancesHidden = inventory.Known(ret == nvml.ERROR_NO_PERMISSION)
	// otherwise the driver may hide all instances from this process
	if g.instancesShown = g.instancesShown || ret == nvml.SUCCESS; ret == nvml.ERROR_NOT_FOUND && g.instancesShown {
		return migDevice{}, errStale
	}
	// a new instance may have all numbers of a deleted one, and another profile
	for _, k := range g.migDevices {
		if k.device.UUID == m.device.UUID && k.device.GI == m.device.GI && k.device.CI == m.device.CI &&
			k.attributes == m.attributes && k.device.Placement == m.device.Placement {
			m.device.Profile = k.device.Profile
			return m, nil
		}
	}
	p := profile{ci: int(m.attributes.ComputeInstanceSliceCount), gi: int(m.attributes.GpuInstanceSliceCount)}
	if ret == nvml.SUCCESS {
		p = profileOf(g, gi, m, p)
	}
	m.device.Profile = p.name(m.attributes.MemorySizeMB, g.lastSeen.MemoryBytes)
	return m, nil
}

// A profile is the size of a MIG device: compute slices of the compute instance and of the GPU
// instance, and the extras of the GPU instance ("+me").
type profile struct {
	ci, gi int
	suffix string
}

// name returns the profile's name. The gigabytes are the eighths of the GPU's memory used by the
// MIG device, in whole GiB rounded up: the formula of all NVIDIA tools.
func (p profile) name(memoryMiB, gpuMemoryBytes uint64) string {
	eighths := math.Ceil(float64(memoryMiB<<20) / float64(gpuMemoryBytes) * 8)
	gib := math.Round(eighths / 8 * math.Ceil(float64(gpuMemoryBytes)/(1<<30)))
	if p.ci == p.gi {
		return fmt.Sprintf("%dg.%.0fgb%s", p.gi, gib, p.suffix)
	}
	return fmt.Sprintf("%dc.%dg.%.0fgb%s", p.ci, p.gi, gib, p.suffix)
}

// instanceOf returns the GPU instance of a MIG device and sets the placement, or ERROR_NOT_FOUND if
// the instance or its compute instance is missing. It needs a privileged process.
func instanceOf(g *gpu, m *migDevice) (gi gpuInstance, ret nvml.Return) {
	if gi, ret = g.device.GetGpuInstanceByID(m.device.GI); ret != nvml.SUCCESS {
		return gi, ret
	}
	if gi.FindComputeInstance(m.device.CI) == nvml.ERROR_NOT_FOUND {
		return gi, nvml.ERROR_NOT_FOUND
	}
	info, ret := gi.GetInfo()
	if ret != nvml.SUCCESS {
		return gi, ret
	}
	m.device.Placement = inventory.MIGPlacement{
		Profile: int(info.ProfileId), Start: int(info.Placement.Start), Size: int(info.Placement.Size),
	}
	return gi, nvml.SUCCESS
}

// profileOf returns the profile of a MIG device of a GPU instance. If the driver has profiles
// unknown to this program, it returns fallback, which lacks the suffix.
func profileOf(g *gpu, gi gpuInstance, m migDevice, fallback profile) profile {
	ciInfo, ret := gi.GetComputeInstanceInfo(m.device.CI)
	if ret != nvml.SUCCESS {
		return fallback
	}
	for number, p := range gpuInstanceProfiles {
		if info, ret := g.device.GetGpuInstanceProfileInfo(number); ret != nvml.SUCCESS ||
			int(info.Id) != m.device.Placement.Profile {
			continue
		}
		for number, slices := range computeInstanceProfiles {
			info, ret := gi.GetComputeInstanceProfileInfo(number, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
			if ret == nvml.SUCCESS && info.Id == ciInfo.ProfileId {
				return profile{ci: slices, gi: p.gi, suffix: p.suffix}
			}
		}
	}
	return fallback
}

// gpuInstanceProfiles are the GPU instance profiles by NVML's numbers.
var gpuInstanceProfiles = [nvml.GPU_INSTANCE_PROFILE_COUNT]profile{
	nvml.GPU_INSTANCE_PROFILE_1_SLICE:        {gi: 1},
	nvml.GPU_INSTANCE_PROFILE_2_SLICE:        {gi: 2},
	nvml.GPU_INSTANCE_PROFILE_3_SLICE:        {gi: 3},
	nvml.GPU_INSTANCE_PROFILE_4_SLICE:        {gi: 4},
	nvml.GPU_INSTANCE_PROFILE_6_SLICE:        {gi: 6},
	nvml.GPU_INSTANCE_PROFILE_7_SLICE:        {gi: 7},
	nvml.GPU_INSTANCE_PROFILE_8_SLICE:        {gi: 8},
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1:   {gi: 1, suffix: "+me"},
	nvml.GPU_INSTANCE_PROFILE_2_SLICE_REV1:   {gi: 2, suffix: "+me"},
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV2:   {gi: 1},
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_GFX:    {gi: 1, suffix: "+gfx"},
	nvml.GPU_INSTANCE_PROFILE_2_SLICE_GFX:    {gi: 2, suffix: "+gfx"},
	nvml.GPU_INSTANCE_PROFILE_3_SLICE_GFX:    {gi: 3, suffix: "+gfx"},
	nvml.GPU_INSTANCE_PROFILE_4_SLICE_GFX:    {gi: 4, suffix: "+gfx"},
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_NO_ME:  {gi: 1, suffix: "-me"},
	nvml.GPU_INSTANCE_PROFILE_2_SLICE_NO_ME:  {gi: 2, suffix: "-me"},
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME: {gi: 1, suffix: "+me.all"},
	nvml.GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME: {gi: 2, suffix: "+me.all"},
}

// computeInstanceProfiles are the slices of the compute instance profiles by NVML's numbers.
var computeInstanceProfiles = [nvml.COMPUTE_INSTANCE_PROFILE_COUNT]int{
	nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE:      1,
	nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE:      2,
	nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE:      3,
	nvml.COMPUTE_INSTANCE_PROFILE_4_SLICE:      4,
	nvml.COMPUTE_INSTANCE_PROFILE_6_SLICE:      6,
	nvml.COMPUTE_INSTANCE_PROFILE_7_SLICE:      7,
	nvml.COMPUTE_INSTANCE_PROFILE_8_SLICE:      8,
	nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1: 1,
	nvml.COMPUTE_INSTANCE_PROFILE_7_SLICE_NVL:  7,
}
