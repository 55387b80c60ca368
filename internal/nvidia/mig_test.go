package nvidia

import (
	"fmt"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/simulator"
)

// TestMIGProfiles divides GPUs of all models that can be divided, and compares the names that are computed with those
// that NVIDIA's guide has for the model.
func TestMIGProfiles(t *testing.T) {
	t.Parallel()
	for node, layouts := range map[string][]string{
		"dgx-a100": {
			"1g.5gb 1g.5gb+me", "1g.10gb 2g.10gb 3g.20gb", "4g.20gb 1c.3g.20gb 2c.3g.20gb", "7g.40gb",
			"1c.7g.40gb 2c.7g.40gb 4c.7g.40gb",
		},
		"dgx-h100": {"1g.10gb 1g.10gb+me", "1g.20gb 2g.20gb 3g.40gb", "4g.40gb 3g.40gb", "7g.80gb"},
		"dgx-h200": {"1g.18gb 1g.18gb+me", "1g.35gb 2g.35gb 3g.71gb", "4g.71gb 3g.71gb", "7g.141gb"},
		"dgx-b200": {"1g.23gb 1g.23gb+me", "1g.45gb 2g.45gb 3g.90gb", "4g.90gb 3g.90gb", "7g.180gb", "1c.2g.45gb 1c.2g.45gb"},
	} {
		t.Run(node, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, node)
			for _, layout := range layouts {
				r.inject(simulator.Fault{Kind: simulator.KindMIG, GPU: "0", Profiles: strings.Fields(layout)})
				s := r.scan()
				compareWithNode(t, s, r.node)
				want := map[int]string{} // by index
				for _, m := range r.node.List()[0].MIG {
					want[m.Index] = m.Profile
				}
				got := map[int]string{}
				for _, m := range s.GPUs[0].MIGDevices {
					got[m.Index] = m.Profile
				}
				compare(t, layout, want, got)
				if len(got) != len(strings.Fields(layout)) {
					t.Errorf("%s: got %d MIG devices", layout, len(got))
				}
			}
			r.inject(simulator.Fault{Kind: simulator.KindMIG, GPU: "0"})
			if g := r.scan().GPUs[0]; g.MIG != inventory.MIGDisabled || len(g.MIGDevices) > 0 {
				t.Errorf("with MIG off: mode %v, %d MIG devices", g.MIG, len(g.MIGDevices))
			}
		})
	}
}

func TestProfileName(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		model  string
		p      profile
		memory uint64 // MiB, of the MIG device
		total  uint64 // MiB, of the GPU
		want   string
	}{
		{"A30", profile{ci: 1, gi: 1}, 5952, 24576, "1g.6gb"},
		{"A30", profile{ci: 2, gi: 2, suffix: "+me"}, 11968, 24576, "2g.12gb+me"},
		{"A30", profile{ci: 4, gi: 4}, 24125, 24576, "4g.24gb"},
		{"A100 40 GB", profile{ci: 1, gi: 1}, 4864, 40536, "1g.5gb"},
		{"A100 40 GB", profile{ci: 1, gi: 2}, 9856, 40536, "1c.2g.10gb"},
		{"A100 80 GB", profile{ci: 1, gi: 2}, 19968, 81920, "1c.2g.20gb"},
		{"H200", profile{ci: 1, gi: 1}, 16384, 143771, "1g.18gb"},
		{"RTX PRO 6000", profile{ci: 1, gi: 1, suffix: "+me.all"}, 24192, 97887, "1g.24gb+me.all"},
		{"RTX PRO 6000", profile{ci: 1, gi: 1, suffix: "-me"}, 24192, 97887, "1g.24gb-me"},
		{"RTX PRO 6000", profile{ci: 4, gi: 4, suffix: "+gfx"}, 97251, 97887, "4g.96gb+gfx"},
	} {
		if got := test.p.name(test.memory, test.total<<20); got != test.want {
			t.Errorf("%s: got %s, want %s", test.model, got, test.want)
		}
	}
}

// TestMIGUnprivileged has a process that may not ask for profiles: it learns the sizes all the same.
func TestMIGUnprivileged(t *testing.T) {
	t.Parallel()
	r := newRig(t, "a100-mig-mixed",
		simulator.Fault{Kind: simulator.KindFail, Call: "DeviceGetGpuInstanceById", Return: "NO_PERMISSION"})
	s := r.scan()
	compare(t, "MIG devices", "0=1/0:4g.40gb 1=3/0:2g.20gb 2=7/0:1g.10gb", migDevices(s.GPUs[5]))
	compare(t, "MIG devices", "0=1/0:1c.3g.40gb 1=1/1:1c.3g.40gb 2=1/2:1c.3g.40gb 3=2/0:3g.40gb", migDevices(s.GPUs[6]))
}

// TestMIGWithoutMemory has a GPU whose memory is not known, so that no profile has a name.
func TestMIGWithoutMemory(t *testing.T) {
	t.Parallel()
	r := newRig(t, "a100-mig-mixed",
		simulator.Fault{Kind: simulator.KindFail, GPU: "3", Call: "DeviceGetMemoryInfo", Return: "NOT_SUPPORTED"})
	s := r.scan()
	if len(s.LeftOut) != 2 || len(s.GPUs[3].MIGDevices) != 0 {
		t.Errorf("left out: %v, GPU: %+v", s.LeftOut, s.GPUs[3])
	}
}

// TestMIGWithoutPrivileges has a process without CAP_SYS_ADMIN, to which the memory of GPUs in MIG mode is not told.
func TestMIGWithoutPrivileges(t *testing.T) {
	t.Parallel()
	r := newRig(t, "a100-mig-mixed",
		simulator.Fault{Kind: simulator.KindFail, GPU: "3", Call: "DeviceGetMemoryInfo", Return: "NO_PERMISSION"})
	s := r.scan()
	if len(s.LeftOut) != 2 || len(s.GPUs[3].MIGDevices) != 0 {
		t.Errorf("left out: %v, GPU: %+v", s.LeftOut, s.GPUs[3])
	}
	for _, out := range s.LeftOut {
		const remedy = "cannot be read: no permission: add the capability SYS_ADMIN to this container (nvmlDeviceGetMemoryInfo:"
		if !strings.Contains(out.Reason, remedy) {
			t.Errorf("left out because %q, want the remedy %q", out.Reason, remedy)
		}
	}
}

// TestMIGUnreadable has MIG devices that cannot be read: they are reported, and their GPU is not to blame.
func TestMIGUnreadable(t *testing.T) {
	t.Parallel()
	r := newRig(t, "a100-mig-mixed",
		simulator.Fault{Kind: simulator.KindFail, GPU: "3", Call: "DeviceGetAttributes", Return: "UNKNOWN"})
	s := r.scan()
	compare(t, "left out", []inventory.LeftOut{
		{Index: 3, Reason: "MIG device 3:0 cannot be read: nvmlDeviceGetAttributes: ERROR_UNKNOWN"},
		{Index: 3, Reason: "MIG device 3:1 cannot be read: nvmlDeviceGetAttributes: ERROR_UNKNOWN"},
	}, s.LeftOut)
	if g := s.GPUs[3]; g.MIG != inventory.MIGEnabled || len(g.MIGDevices) > 0 {
		t.Errorf("GPU 3: mode %v, %d MIG devices", g.MIG, len(g.MIGDevices))
	}
	r.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "3"})
	compare(t, "MIG devices", "0=1/0:3g.40gb 1=2/0:3g.40gb", migDevices(r.scan().GPUs[3]))
}

// TestMIGProfilesThatAreToldInPart: a driver that answers some of the calls for a profile says its slices all the same.
func TestMIGProfilesThatAreToldInPart(t *testing.T) {
	t.Parallel()
	for call, placed := range map[string]bool{
		"GpuInstanceGetInfo": false, "GpuInstanceGetComputeInstanceById": true, "DeviceGetGpuInstanceProfileInfo": true,
		"GpuInstanceGetComputeInstanceProfileInfo": true, "ComputeInstanceGetInfo": true,
	} {
		s := newRig(t, "a100-mig-mixed", simulator.Fault{Kind: simulator.KindFail, Call: call, Return: "UNKNOWN"}).scan()
		compare(t, "MIG devices without "+call, "0=1/0:4g.40gb 1=3/0:2g.20gb 2=7/0:1g.10gb", migDevices(s.GPUs[5]))
		compare(t, "MIG devices without "+call, "0=1/0:1c.3g.40gb 1=1/1:1c.3g.40gb 2=1/2:1c.3g.40gb 3=2/0:3g.40gb", migDevices(s.GPUs[6]))
		compare(t, "places without "+call, placed, s.GPUs[5].MIGDevices[1].Placement == inventory.MIGPlacement{Profile: 14, Start: 4, Size: 2})
	}
}

// TestProfilesByNumber: NVML's numbers of profiles say how many slices they have, and what besides.
func TestProfilesByNumber(t *testing.T) {
	t.Parallel()
	for number, want := range [nvml.GPU_INSTANCE_PROFILE_COUNT]profile{
		nvml.GPU_INSTANCE_PROFILE_1_SLICE: {0, 1, ""}, nvml.GPU_INSTANCE_PROFILE_2_SLICE: {0, 2, ""}, nvml.GPU_INSTANCE_PROFILE_3_SLICE: {0, 3, ""},
		nvml.GPU_INSTANCE_PROFILE_4_SLICE: {0, 4, ""}, nvml.GPU_INSTANCE_PROFILE_6_SLICE: {0, 6, ""}, nvml.GPU_INSTANCE_PROFILE_7_SLICE: {0, 7, ""},
		nvml.GPU_INSTANCE_PROFILE_8_SLICE: {0, 8, ""}, nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1: {0, 1, "+me"},
		nvml.GPU_INSTANCE_PROFILE_2_SLICE_REV1: {0, 2, "+me"}, nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV2: {0, 1, ""},
		nvml.GPU_INSTANCE_PROFILE_1_SLICE_GFX: {0, 1, "+gfx"}, nvml.GPU_INSTANCE_PROFILE_2_SLICE_GFX: {0, 2, "+gfx"},
		nvml.GPU_INSTANCE_PROFILE_3_SLICE_GFX: {0, 3, "+gfx"}, nvml.GPU_INSTANCE_PROFILE_4_SLICE_GFX: {0, 4, "+gfx"},
		nvml.GPU_INSTANCE_PROFILE_1_SLICE_NO_ME: {0, 1, "-me"}, nvml.GPU_INSTANCE_PROFILE_2_SLICE_NO_ME: {0, 2, "-me"},
		nvml.GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME: {0, 1, "+me.all"}, nvml.GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME: {0, 2, "+me.all"},
	} {
		if got := gpuInstanceProfiles[number]; got != want {
			t.Errorf("GPU instance profile %d is %+v, want %+v", number, got, want)
		}
	}
	for number, want := range [nvml.COMPUTE_INSTANCE_PROFILE_COUNT]int{
		nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE: 1, nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE: 2, nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE: 3,
		nvml.COMPUTE_INSTANCE_PROFILE_4_SLICE: 4, nvml.COMPUTE_INSTANCE_PROFILE_6_SLICE: 6, nvml.COMPUTE_INSTANCE_PROFILE_7_SLICE: 7,
		nvml.COMPUTE_INSTANCE_PROFILE_8_SLICE: 8, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1: 1, nvml.COMPUTE_INSTANCE_PROFILE_7_SLICE_NVL: 7,
	} {
		if got := computeInstanceProfiles[number]; got != want {
			t.Errorf("compute instance profile %d has %d slices, want %d", number, got, want)
		}
	}
}

// An emptyDevice says of an index without MIG device that it is out of range.
type emptyDevice struct{ nvml.Device }

func (d emptyDevice) GetMigDeviceHandleByIndex(index int) (nvml.Device, nvml.Return) {
	mig, ret := d.Device.GetMigDeviceHandleByIndex(index)
	if ret == nvml.ERROR_NOT_FOUND {
		ret = nvml.ERROR_INVALID_ARGUMENT
	}
	return mig, ret
}

func TestMIGIndexesWithoutDevice(t *testing.T) {
	t.Parallel()
	s := newRigWith(t, "a100-mig-mixed", hook(hookedLibrary{device: func(_ int, d nvml.Device) nvml.Device { return emptyDevice{d} }})).scan()
	compare(t, "left out", 0, len(s.LeftOut))
	compare(t, "MIG devices", "0=1/0:3g.40gb 1=2/0:3g.40gb", migDevices(s.GPUs[3]))
}

// TestMIGDevicesWhileTheirGPUFails: they are as they were last seen.
func TestMIGDevicesWhileTheirGPUFails(t *testing.T) {
	t.Parallel()
	for _, call := range []string{"DeviceGetMigMode", "DeviceGetMaxMigDeviceCount", "DeviceGetMigDeviceHandleByIndex", "DeviceGetMemoryInfo"} {
		for _, ret := range []string{"UNKNOWN", "GPU_IS_LOST", "RESET_REQUIRED"} {
			if call == "DeviceGetMigDeviceHandleByIndex" && ret == "UNKNOWN" {
				continue // says something of that MIG device only
			}
			r := newRig(t, "a100-mig-mixed")
			r.inject(simulator.Fault{Kind: simulator.KindFail, GPU: "3", Call: call, Return: ret})
			g := r.scan().GPUs[3]
			compare(t, call+" "+ret, "enabled 0=1/0:3g.40gb 1=2/0:3g.40gb", fmt.Sprint(g.MIG, " ", migDevices(g)))
		}
	}
}
