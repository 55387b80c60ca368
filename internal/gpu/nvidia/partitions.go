package nvidia

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Partitions returns the MIG layout of a GPU of an earlier Scan of this session, with the supported
// profiles. If the driver hides profiles or placements from this process, Profiles is empty. If the
// driver hides instances, Unread says so. The error wraps inventory.ErrNoAnswer if the driver did
// not answer before the deadline of ctx.
func (s *Session) Partitions(ctx context.Context, uuid string) (inventory.Partitions, error) {
	return ask(ctx, s, "read the MIG instances of", uuid, partitions)
}

func partitions(gpu device) (inventory.Partitions, error) {
	var p inventory.Partitions
	pci, ret := gpu.GetPciInfo()
	if err := failure("nvmlDeviceGetPciInfo", ret); err != nil {
		return p, err
	}
	p.PCIDevice, p.PCISubsystem = pci.PciDeviceId, pci.PciSubSystemId
	modes, ret := gpu.GetMigModes()
	switch err := failure("nvmlDeviceGetMigMode", ret); {
	case errors.Is(err, inventory.ErrNotSupported):
		return p, nil
	case err != nil:
		return p, err
	}
	p.Mode, p.Pending, p.Resetless = modeOf(modes.current), modeOf(modes.pending), resetless(gpu)
	profiles, err := readProfiles(gpu)
	complete := true
	for _, known := range profiles {
		p.Profiles = append(p.Profiles, known.MIGProfile)
		complete = complete && len(known.Starts) > 0
	}
	if !complete {
		p.Profiles = nil
	}
	if err == nil && p.Mode == inventory.MIGEnabled {
		p.Instances, err = readInstances(gpu, profiles)
	}
	switch {
	case !errors.Is(err, inventory.ErrNoPermission):
		return p, err
	case p.Mode == inventory.MIGEnabled:
		p.Unread = "the instances cannot be read: " + err.Error()
	}
	return p, nil
}

// modeOf returns a MIG mode.
func modeOf(mode int) inventory.MIGMode {
	if mode == nvml.DEVICE_MIG_ENABLE {
		return inventory.MIGEnabled
	}
	return inventory.MIGDisabled
}

// A knownProfile is a MIGProfile with the arguments for NVML calls.
type knownProfile struct {
	inventory.MIGProfile
	info nvml.GpuInstanceProfileInfo
}

// readProfiles reads the profiles of GPU instances, without placements if the driver hides them.
func readProfiles(gpu device) ([]knownProfile, error) {
	memory, ret := gpu.GetMemoryInfo()
	if err := failure("nvmlDeviceGetMemoryInfo", ret); err != nil {
		return nil, withCapability(err)
	}
	var profiles []knownProfile
	for number, size := range gpuInstanceProfiles {
		info, ret := gpu.GetGpuInstanceProfileInfo(number)
		switch {
		case ret == nvml.ERROR_NOT_SUPPORTED || ret == nvml.ERROR_INVALID_ARGUMENT ||
			ret == nvml.ERROR_FUNCTION_NOT_FOUND:
			continue // unknown to this GPU or driver
		case ret != nvml.SUCCESS:
			return nil, withCapability(failure("nvmlDeviceGetGpuInstanceProfileInfo", ret))
		case memory.Total == 0 || info.InstanceCount == 0:
			continue
		}
		size.ci = size.gi
		known := knownProfile{info: info, MIGProfile: inventory.MIGProfile{
			Name: size.name(info.MemorySizeMB, memory.Total), ID: int(info.Id), Count: int(min(info.InstanceCount,
				maxMIGDevices)),
			MemoryBytes: info.MemorySizeMB << 20,
			Attributes: inventory.MIGAttributes{
				Multiprocessors: int(info.MultiprocessorCount), GISlices: size.gi, CISlices: size.gi,
				CopyEngines: int(info.CopyEngineCount),
				Decoders:    int(info.DecoderCount), Encoders: int(info.EncoderCount), JPEGs: int(info.JpegCount),
				OFAs: int(info.OfaCount),
			},
		}}
		placements, ret := gpu.GetGpuInstancePossiblePlacements(info)
		switch {
		case ret == nvml.ERROR_NO_PERMISSION || ret == nvml.ERROR_NOT_SUPPORTED || ret == nvml.ERROR_FUNCTION_NOT_FOUND:
		case ret != nvml.SUCCESS:
			return nil, failure("nvmlDeviceGetGpuInstancePossiblePlacements", ret)
		}
		for _, place := range placements {
			if err := possible(place); err != nil {
				return nil, err
			}
			known.Size = int(place.Size)
			known.Starts = append(known.Starts, int(place.Start))
		}
		slices.Sort(known.Starts)
		profiles = append(profiles, known)
	}
	return profiles, nil
}

// maxMemorySlices is a limit above the memory slices of any GPU.
const maxMemorySlices = 64

// possible returns an error for an impossible placement.
func possible(p nvml.GpuInstancePlacement) error {
	if p.Size == 0 || p.Size > maxMemorySlices || p.Start > maxMemorySlices-p.Size {
		return fmt.Errorf("the driver reports a GPU instance with %d memory slices starting at slice %d", p.Size,
			p.Start)
	}
	return nil
}

// readInstances reads the GPU instances of all profiles of the GPU.
func readInstances(gpu device, profiles []knownProfile) ([]inventory.GPUInstance, error) {
	var instances []inventory.GPUInstance
	for _, p := range profiles {
		found, ret := gpu.GetGpuInstances(p.info)
		if err := failure("nvmlDeviceGetGpuInstances", ret); err != nil {
			return nil, withCapability(err)
		}
		for _, handle := range found {
			info, ret := handle.GetInfo()
			if err := failure("nvmlGpuInstanceGetInfo", ret); err != nil {
				return nil, withCapability(err)
			}
			if err := possible(info.Placement); err != nil {
				return nil, err
			}
			i := inventory.GPUInstance{
				ID: int(info.Id), Profile: p.Name, Start: int(info.Placement.Start), Size: int(info.Placement.Size),
			}
			var err error
			if i.Computes, err = readComputes(handle); err != nil {
				return nil, err
			}
			instances = append(instances, i)
		}
	}
	order.Sort(instances, func(a, b inventory.GPUInstance) int { return a.Start - b.Start })
	return instances, nil
}

// readComputes reads the compute instances of a GPU instance.
func readComputes(gi gpuInstance) ([]inventory.ComputeInstance, error) {
	var computes []inventory.ComputeInstance
	for number, size := range computeInstanceProfiles {
		info, ret := gi.GetComputeInstanceProfileInfo(number, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		switch {
		case ret == nvml.ERROR_NOT_SUPPORTED || ret == nvml.ERROR_INVALID_ARGUMENT:
			continue // unknown to this GPU instance or driver
		case ret != nvml.SUCCESS:
			return nil, withCapability(failure("nvmlGpuInstanceGetComputeInstanceProfileInfo", ret))
		case info.InstanceCount == 0:
			continue
		}
		found, ret := gi.GetComputeInstances(info)
		if err := failure("nvmlGpuInstanceGetComputeInstances", ret); err != nil {
			return nil, withCapability(err)
		}
		for _, c := range found {
			computes = append(computes, inventory.ComputeInstance{ID: int(c.Id), Start: int(c.Placement.Start),
				Slices: size})
		}
	}
	order.Sort(computes, func(a, b inventory.ComputeInstance) int { return a.Start - b.Start })
	return computes, nil
}
