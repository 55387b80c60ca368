package nvidia_test

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/gpus"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// partitions reads the partitions of a GPU.
func (r *rig) partitions(gpu int) inventory.Partitions {
	r.t.Helper()
	p, err := r.Partitions(r.ctx, r.uuid(gpu))
	if err != nil {
		r.t.Fatal(err)
	}
	return p
}

func TestPartitions(t *testing.T) {
	t.Parallel()
	r := newRig(t, "a100-mig-mixed")
	whole := r.partitions(0)
	if whole.Mode != inventory.MIGDisabled || whole.Pending != inventory.MIGDisabled || len(whole.Instances) > 0 ||
		whole.PCIDevice != 0x20b210de {
		t.Errorf("GPU 0: %+v", whole)
	}
	if hopper := newRig(t, "dgx-h100").partitions(0); whole.Resetless || !hopper.Resetless ||
		len(hopper.Profiles) != len(whole.Profiles) {
		t.Errorf("an A100 changes its mode without a reset: %t, and a Hopper GPU: %t", whole.Resetless,
			hopper.Resetless)
	}
	half := whole.Profiles[2]
	if a := (inventory.MIGAttributes{Multiprocessors: 42, GISlices: 3, CISlices: 3, CopyEngines: 3,
		Decoders: 2}); half.Attributes != a || half.MemoryBytes != 40192<<20 {
		t.Errorf("profile %s has %+v and %d MiB, want %+v", half.Name, half.Attributes, half.MemoryBytes>>20, a)
	}
	for i := range whole.Profiles {
		whole.Profiles[i].Attributes, whole.Profiles[i].MemoryBytes = inventory.MIGAttributes{}, 0
	}
	compare(t, "profiles", []inventory.MIGProfile{
		{Name: "1g.10gb", ID: 19, Count: 7, Size: 1, Starts: []int{0, 1, 2, 3, 4, 5, 6}},
		{Name: "2g.20gb", ID: 14, Count: 3, Size: 2, Starts: []int{0, 2, 4}},
		{Name: "3g.40gb", ID: 9, Count: 2, Size: 4, Starts: []int{0, 4}},
		{Name: "4g.40gb", ID: 5, Count: 1, Size: 4, Starts: []int{0}},
		{Name: "7g.80gb", ID: 0, Count: 1, Size: 8, Starts: []int{0}},
		{Name: "1g.10gb+me", ID: 20, Count: 1, Size: 1, Starts: []int{0, 1, 2, 3, 4, 5, 6}},
		{Name: "1g.20gb", ID: 15, Count: 4, Size: 2, Starts: []int{0, 2, 4, 6}},
	}, whole.Profiles)
	one := func(slices int) []inventory.ComputeInstance { return []inventory.ComputeInstance{{Slices: slices}} }
	compare(t, "instances of GPU 4", []inventory.GPUInstance{
		{ID: 3, Profile: "2g.20gb", Start: 0, Size: 2, Computes: one(2)},
		{ID: 7, Profile: "1g.10gb", Start: 2, Size: 1, Computes: one(1)},
		{ID: 8, Profile: "1g.10gb", Start: 3, Size: 1, Computes: one(1)},
		{ID: 1, Profile: "3g.40gb", Start: 4, Size: 4, Computes: one(3)},
	}, r.partitions(4).Instances)
	compare(t, "instances of GPU 6", []inventory.GPUInstance{
		{ID: 1, Profile: "3g.40gb", Start: 0, Size: 4, Computes: []inventory.ComputeInstance{
			{ID: 0, Start: 0, Slices: 1}, {ID: 1, Start: 1, Slices: 1}, {ID: 2, Start: 2, Slices: 1},
		}},
		{ID: 2, Profile: "3g.40gb", Start: 4, Size: 4, Computes: one(3)},
	}, r.partitions(6).Instances)
	none := newRig(t, "t4").partitions
	compare(t, "partitions of a GPU without MIG", inventory.Partitions{PCIDevice: 0x1eb810de}, none(0))
}

// TestPartitionsWithoutPrivileges has a process that may not read placements, or instances.
func TestPartitionsWithoutPrivileges(t *testing.T) {
	t.Parallel()
	fail := func(call, ret string) simulator.Fault {
		return simulator.Fault{Kind: simulator.KindFail, Call: call, Return: ret}
	}
	r := newRig(t, "a100-mig-mixed", fail("DeviceGetGpuInstancePossiblePlacements", "NO_PERMISSION"))
	if p := r.partitions(4); len(p.Profiles) > 0 || len(p.Instances) != 4 {
		t.Errorf("without placements: %+v", p)
	}
	r.inject(fail("DeviceGetGpuInstances", "NO_PERMISSION"))
	if p := r.partitions(0); p.Mode != inventory.MIGDisabled {
		t.Errorf("GPU 0, whose instances need not be read: %+v", p)
	}
	if p := r.partitions(4); !strings.Contains(p.Unread, "SYS_ADMIN") || p.Mode != inventory.MIGEnabled ||
		p.PCIDevice == 0 {
		t.Errorf("without instances: %+v", p)
	}
	r.inject(fail("DeviceGetMemoryInfo", "NO_PERMISSION"))
	if p := r.partitions(4); !strings.Contains(p.Unread, "SYS_ADMIN") || len(p.Profiles) > 0 {
		t.Errorf("without the memory's size: %+v", p)
	}
}

// TestPartitionsFailOneByOne has each call fail that Partitions makes.
func TestPartitionsFailOneByOne(t *testing.T) {
	t.Parallel()
	for _, call := range []string{
		"DeviceGetPciInfo", "DeviceGetMigMode", "DeviceGetMemoryInfo", "DeviceGetGpuInstanceProfileInfo",
		"DeviceGetGpuInstances",
		"DeviceGetGpuInstancePossiblePlacements", "GpuInstanceGetInfo", "GpuInstanceGetComputeInstanceProfileInfo",
		"GpuInstanceGetComputeInstances", "ComputeInstanceGetInfo",
	} {
		r := newRig(t, "a100-mig-mixed")
		r.inject(simulator.Fault{Kind: simulator.KindFail, GPU: "4", Call: call, Return: "UNKNOWN"})
		if _, err := r.Partitions(r.ctx, r.uuid(4)); err == nil ||
			!strings.Contains(err.Error(), "nvml"+call) && call != "ComputeInstanceGetInfo" {
			t.Errorf("%s: got error %v", call, err)
		}
		r.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "4"})
		if p := r.partitions(4); len(p.Instances) != 4 {
			t.Errorf("%s: %d instances when it works again", call, len(p.Instances))
		}
	}
}

func TestProcessesOfInstances(t *testing.T) {
	t.Parallel()
	r := newRig(t, "a100-mig-mixed")
	r.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "4:1", Count: 1},
		simulator.Fault{Kind: simulator.KindProcesses, GPU: "0", Count: 1})
	var want inventory.Signal[int]
	for gpu, want := range map[int]inventory.Signal[int]{0: want, 4: inventory.Known(r.node.List()[4].MIG[1].GI)} {
		processes, err := r.Processes(r.ctx, r.uuid(gpu))
		if err != nil || len(processes) != 1 || processes[0].GI != want {
			t.Errorf("GPU %d: got %+v and error %v, want one on %+v", gpu, processes, err, want)
		}
	}
}

// TestPlacementsAreNVIDIAs compares the simulator's placements with those of the mock GPUs in
// NVIDIA's go-nvml. Its mocks of Hopper and Blackwell differ from what these GPUs' drivers print:
// there a 3g takes three memory slices, and nothing takes eight.
func TestPlacementsAreNVIDIAs(t *testing.T) {
	t.Parallel()
	const nodeOfA30 = `{description: "Four A30, none of them divided into instances", driver: 580.95.05, cuda: "13.0",
model: a30-pcie-24gb, gpus: [{bdf: "0000:17:00.0", pcie: 0/0/0}]}`
	for node, mock := range map[string]gpus.Config{
		"dgx-a100": gpus.A100_SXM4_40GB, "a100-mig-mixed": gpus.A100_SXM4_80GB, nodeOfA30: gpus.A30_PCIE_24GB,
	} {
		r := newRig(t, node)
		lib := r.node.NVML()
		if ret := lib.Init(); ret != nvml.SUCCESS {
			t.Fatal(ret)
		}
		device, ret := lib.DeviceGetHandleByIndex(0)
		if ret != nvml.SUCCESS {
			t.Fatal(ret)
		}
		have := r.partitions(0).Profiles
		found := 0
		for number, placements := range mock.MIGProfiles.GpuInstancePlacements {
			var starts []int
			for _, p := range placements {
				starts = append(starts, int(p.Start))
			}
			info, ret := device.GetGpuInstanceProfileInfo(number)
			at := slices.IndexFunc(have, func(p inventory.MIGProfile) bool {
				return ret == nvml.SUCCESS && p.ID == int(info.Id)
			})
			if at < 0 {
				t.Errorf("%s: the simulator has no profile with NVML's number %d", mock.Name, number)
				continue
			}
			found++
			compare(t, mock.Name+" "+have[at].Name, starts, have[at].Starts)
			compare(t, "its size", int(placements[0].Size), have[at].Size)
			compare(t, "its count", int(mock.MIGProfiles.GpuInstanceProfiles[number].InstanceCount), have[at].Count)
		}
		lib.Shutdown()
		if found < 5 {
			t.Errorf("%s: %d profiles were compared", mock.Name, found)
		}
	}
}

// TestPlacementsThatCannotBe: places beyond 64 memory slices are a mistake of the driver.
func TestPlacementsThatCannotBe(t *testing.T) {
	t.Parallel()
	for placement, want := range map[nvml.GpuInstancePlacement]bool{
		{Start: 0, Size: 8}: true, {Start: 9, Size: 3}: true, {Start: 63, Size: 1}: true,
		{Start: 0, Size: 0}: false, {Start: 64, Size: 1}: false, {Start: 0, Size: 65}: false, {Start: math.MaxUint32,
			Size: 2}: false,
	} {
		r := newRigWith(t, "a100-mig-mixed", hook(hookedLibrary{device: func(_ int, d nvml.Device) nvml.Device {
			return numberedDevice{d, placement}
		}}))
		if _, err := r.Partitions(r.ctx, r.uuid(0)); (err == nil) != want {
			t.Errorf("%+v: %v", placement, err)
		}
	}
}

// A numberedDevice has every profile that NVML has a number for, with that number as its ID, and no
// instances. Each profile has an eighth of the GPU's memory.
type numberedDevice struct {
	nvml.Device
	place nvml.GpuInstancePlacement
}

func (d numberedDevice) GetGpuInstanceProfileInfo(number int) (nvml.GpuInstanceProfileInfo, nvml.Return) {
	memory, ret := d.GetMemoryInfo()
	return nvml.GpuInstanceProfileInfo{Id: uint32(number), InstanceCount: 1, MemorySizeMB: memory.Total >> 23}, ret
}

func (d numberedDevice) GetGpuInstancePossiblePlacements(
	*nvml.GpuInstanceProfileInfo,
) ([]nvml.GpuInstancePlacement, nvml.Return) {
	return []nvml.GpuInstancePlacement{d.place}, nvml.SUCCESS
}

// TestProfilesByNumber: NVML's numbers of profiles say how many slices they have, and what besides.
func TestProfilesByNumber(t *testing.T) {
	t.Parallel()
	r := newRigWith(t, "dgx-h100", hook(hookedLibrary{device: func(_ int, d nvml.Device) nvml.Device {
		return numberedDevice{d, nvml.GpuInstancePlacement{Size: 1}}
	}}))
	got := map[int]string{}
	for _, p := range r.partitions(0).Profiles {
		got[p.ID] = p.Name
	}
	compare(t, "profiles", map[int]string{
		nvml.GPU_INSTANCE_PROFILE_1_SLICE: "1g.10gb", nvml.GPU_INSTANCE_PROFILE_2_SLICE: "2g.10gb",
		nvml.GPU_INSTANCE_PROFILE_3_SLICE: "3g.10gb",
		nvml.GPU_INSTANCE_PROFILE_4_SLICE: "4g.10gb", nvml.GPU_INSTANCE_PROFILE_6_SLICE: "6g.10gb",
		nvml.GPU_INSTANCE_PROFILE_7_SLICE: "7g.10gb",
		nvml.GPU_INSTANCE_PROFILE_8_SLICE: "8g.10gb", nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1: "1g.10gb+me",
		nvml.GPU_INSTANCE_PROFILE_2_SLICE_REV1: "2g.10gb+me", nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV2: "1g.10gb",
		nvml.GPU_INSTANCE_PROFILE_1_SLICE_GFX: "1g.10gb+gfx", nvml.GPU_INSTANCE_PROFILE_2_SLICE_GFX: "2g.10gb+gfx",
		nvml.GPU_INSTANCE_PROFILE_3_SLICE_GFX: "3g.10gb+gfx", nvml.GPU_INSTANCE_PROFILE_4_SLICE_GFX: "4g.10gb+gfx",
		nvml.GPU_INSTANCE_PROFILE_1_SLICE_NO_ME: "1g.10gb-me", nvml.GPU_INSTANCE_PROFILE_2_SLICE_NO_ME: "2g.10gb-me",
		nvml.GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME: "1g.10gb+me.all",
		nvml.GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME: "2g.10gb+me.all",
	}, got)
}

// A dividedDevice tells less of its profiles.
type dividedDevice struct {
	nvml.Device
	without uint32 // the ID of a profile
	count   *uint32
	memory  bool
	info    nvml.Return // of that profile
	places  nvml.Return // of it
}

func (d dividedDevice) GetMemoryInfo() (nvml.Memory, nvml.Return) {
	memory, ret := d.Device.GetMemoryInfo()
	if !d.memory {
		memory.Total = 0
	}
	return memory, ret
}

func (d dividedDevice) GetGpuInstanceProfileInfo(number int) (nvml.GpuInstanceProfileInfo, nvml.Return) {
	info, ret := d.Device.GetGpuInstanceProfileInfo(number)
	if d.count != nil && info.Id == d.without {
		info.InstanceCount = *d.count
	}
	if d.info != nvml.SUCCESS && info.Id == d.without {
		return nvml.GpuInstanceProfileInfo{}, d.info
	}
	return info, ret
}

func (d dividedDevice) GetGpuInstancePossiblePlacements(
	info *nvml.GpuInstanceProfileInfo,
) ([]nvml.GpuInstancePlacement, nvml.Return) {
	if d.places != nvml.SUCCESS && info.Id == d.without {
		return nil, d.places
	}
	return d.Device.GetGpuInstancePossiblePlacements(info)
}

// TestPartitionsThatAreToldInPart: profiles that no instance can have are none; where the place of
// one is not told, there are no profiles.
func TestPartitionsThatAreToldInPart(t *testing.T) {
	t.Parallel()
	none, many := uint32(0), uint32(1000)
	for name, tt := range map[string]struct {
		device   dividedDevice
		profiles int
		count    int // of the first
	}{
		"no places of the first": {dividedDevice{without: 19, places: nvml.ERROR_NO_PERMISSION, memory: true}, 0,
			0},
		"no places of the last": {dividedDevice{without: 15, places: nvml.ERROR_NOT_SUPPORTED, memory: true}, 0,
			0},
		"places that nobody knows": {dividedDevice{without: 15, places: nvml.ERROR_FUNCTION_NOT_FOUND, memory: true},
			0, 0},
		"a profile it does not have": {dividedDevice{without: 15, info: nvml.ERROR_NOT_SUPPORTED, memory: true}, 6, 7},
		"a number without a profile": {dividedDevice{without: 15, info: nvml.ERROR_INVALID_ARGUMENT, memory: true}, 6,
			7},
		"a function it does not have": {
			dividedDevice{without: 15, info: nvml.ERROR_FUNCTION_NOT_FOUND, memory: true}, 6, 7,
		},
		"no instances of the last":   {dividedDevice{without: 15, count: &none, memory: true}, 6, 7},
		"a thousand of the first":    {dividedDevice{without: 19, count: &many, memory: true}, 7, maxMIGDevices},
		"a GPU of an unknown memory": {dividedDevice{without: 99}, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRigWith(t, "a100-mig-mixed", hook(hookedLibrary{device: func(_ int, d nvml.Device) nvml.Device {
				tt.device.Device = d
				return tt.device
			}}))
			p := r.partitions(0)
			compare(t, "profiles", tt.profiles, len(p.Profiles))
			if tt.profiles > 0 {
				compare(t, "instances of the first", tt.count, p.Profiles[0].Count)
			}
		})
	}
}
