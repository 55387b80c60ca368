package nvidia_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// TestMIGProfiles divides GPUs of all models that can be divided, and compares the names that are
// computed with those that NVIDIA's guide has for the model.
func TestMIGProfiles(t *testing.T) {
	t.Parallel()
	for node, layouts := range map[string][]string{
		"dgx-a100": {
			"1g.5gb 1g.5gb+me", "1g.10gb 2g.10gb 3g.20gb", "4g.20gb 1c.3g.20gb 2c.3g.20gb", "7g.40gb",
			"1c.7g.40gb 2c.7g.40gb 4c.7g.40gb",
		},
		"dgx-h100": {"1g.10gb 1g.10gb+me", "1g.20gb 2g.20gb 3g.40gb", "4g.40gb 3g.40gb", "7g.80gb"},
		"dgx-h200": {"1g.18gb 1g.18gb+me", "1g.35gb 2g.35gb 3g.71gb", "4g.71gb 3g.71gb", "7g.141gb"},
		"dgx-b200": {"1g.23gb 1g.23gb+me", "1g.45gb 2g.45gb 3g.90gb", "4g.90gb 3g.90gb", "7g.180gb",
			"1c.2g.45gb 1c.2g.45gb"},
		"a30-x4": {"1g.6gb 1g.6gb+me", "2g.12gb+me 2g.12gb", "1c.2g.12gb 1c.2g.12gb", "4g.24gb"},
		"rtx-pro-6000-x8": {
			"1g.24gb 1g.24gb+me", "1g.24gb+me.all 1g.24gb-me", "2g.48gb 1g.24gb+gfx", "4g.96gb", "4g.96gb+gfx",
		},
	} {
		bubble(t, node, func(t *testing.T) {
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

// TestMIGUnprivileged has a process that may not ask for profiles: it learns the sizes all the
// same.
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

// TestMIGWithoutPrivileges has a process without CAP_SYS_ADMIN, to which the memory of GPUs in MIG
// mode is not told.
func TestMIGWithoutPrivileges(t *testing.T) {
	t.Parallel()
	r := newRig(t, "a100-mig-mixed",
		simulator.Fault{Kind: simulator.KindFail, GPU: "3", Call: "DeviceGetMemoryInfo", Return: "NO_PERMISSION"})
	s := r.scan()
	if len(s.LeftOut) != 2 || len(s.GPUs[3].MIGDevices) != 0 {
		t.Errorf("left out: %v, GPU: %+v", s.LeftOut, s.GPUs[3])
	}
	for _, out := range s.LeftOut {
		const remedy = "cannot be read: no permission: add the capability SYS_ADMIN to this container " +
			"(nvmlDeviceGetMemoryInfo:"
		if !strings.Contains(out.Reason, remedy) {
			t.Errorf("left out because %q, want the remedy %q", out.Reason, remedy)
		}
	}
}

// TestMIGUnreadable has MIG devices that cannot be read: they are reported, and their GPU is not to
// blame.
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

// TestMIGProfilesThatAreToldInPart: a driver that answers some of the calls for a profile says its
// slices all the same.
func TestMIGProfilesThatAreToldInPart(t *testing.T) {
	t.Parallel()
	for call, placed := range map[string]bool{
		"GpuInstanceGetInfo": false, "GpuInstanceGetComputeInstanceById": true, "DeviceGetGpuInstanceProfileInfo": true,
		"GpuInstanceGetComputeInstanceProfileInfo": true, "ComputeInstanceGetInfo": true,
	} {
		s := newRig(t, "a100-mig-mixed", simulator.Fault{Kind: simulator.KindFail, Call: call,
			Return: "UNKNOWN"}).scan()
		compare(t, "MIG devices without "+call, "0=1/0:4g.40gb 1=3/0:2g.20gb 2=7/0:1g.10gb", migDevices(s.GPUs[5]))
		compare(t, "MIG devices without "+call, "0=1/0:1c.3g.40gb 1=1/1:1c.3g.40gb 2=1/2:1c.3g.40gb 3=2/0:3g.40gb",
			migDevices(s.GPUs[6]))
		compare(t, "places without "+call, placed,
			s.GPUs[5].MIGDevices[1].Placement == inventory.MIGPlacement{Profile: 14, Start: 4, Size: 2})
	}
}

// TestMIGDevicesThatAreGone: a handle that the driver goes on giving is no MIG device once its
// instance is gone.
func TestMIGDevicesThatAreGone(t *testing.T) {
	t.Parallel()
	for _, call := range []string{"DeviceGetGpuInstanceById", "GpuInstanceGetComputeInstanceById"} {
		r := newRig(t, "a100-mig-mixed")
		r.scan()
		r.inject(simulator.Fault{Kind: simulator.KindFail, GPU: "3", Call: call, Return: "NOT_FOUND"})
		s := r.scan()
		compare(t, "MIG devices without "+call, "", migDevices(s.GPUs[3]))
		compare(t, "left out", 0, len(s.LeftOut))
		early := newRig(t, "a100-mig-mixed", simulator.Fault{Kind: simulator.KindFail, GPU: "3", Call: call,
			Return: "NOT_FOUND"})
		compare(t, "MIG devices where no instance was ever told of", 2, len(early.scan().GPUs[3].MIGDevices))
		compare(t, "MIG devices of another GPU", "0=1/0:4g.40gb 1=3/0:2g.20gb 2=7/0:1g.10gb+me", migDevices(s.GPUs[5]))
	}
}

// TestMIGInstancesThatTheDriverDoesNotTell: a process without rights cannot see whether the
// instance of a handle is there still. Once instances were made or destroyed, and two looks have
// found the same ones, it asks for a new session, which does not ask for another.
func TestMIGInstancesThatTheDriverDoesNotTell(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		before, after []string
		told, renewed bool
	}{
		"destroyed":              {before: []string{"3g.40gb", "3g.40gb"}, after: []string{"3g.40gb"}, renewed: true},
		"the first one":          {after: []string{"3g.40gb"}, renewed: true},
		"the mode is off":        {before: []string{"3g.40gb"}},
		"nothing has changed":    {before: []string{"3g.40gb"}, after: []string{"3g.40gb"}},
		"told of instances":      {before: []string{"3g.40gb", "3g.40gb"}, after: []string{"3g.40gb"}, told: true},
		"told of the first ones": {after: []string{"3g.40gb"}, told: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, "dgx-h100")
			divide := func(profiles []string) {
				r.inject(simulator.Fault{Kind: simulator.KindMIG, GPU: "3", Profiles: profiles})
			}
			r.made(3, inventory.MIGStep{Action: inventory.MIGEnable})
			if !tt.told {
				r.inject(simulator.Fault{Kind: simulator.KindFail, Call: "DeviceGetGpuInstanceById",
					Return: "NO_PERMISSION"})
			}
			if tt.before != nil {
				divide(tt.before)
			}
			reopen := func() {
				t.Helper()
				if err := r.Close(r.ctx); err != nil {
					t.Fatal(err)
				}
				s, err := r.driver.Open(r.ctx)
				if err != nil {
					t.Fatal(err)
				}
				r.Session = s
			}
			reopen()
			r.scan()
			divide(tt.after)
			r.scan() // more may follow
			_, err := r.Scan(r.ctx)
			if errors.Is(err, inventory.ErrNewSession) != tt.renewed {
				t.Fatalf("got error %v, want a new session: %v", err, tt.renewed)
			}
			if tt.renewed {
				reopen()
			}
			for range 3 {
				compare(t, "MIG devices", len(tt.after), len(r.scan().GPUs[3].MIGDevices))
			}
		})
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
	s := newRigWith(t, "a100-mig-mixed", hook(hookedLibrary{device: func(_ int,
		d nvml.Device) nvml.Device {
		return emptyDevice{d}
	}})).scan()
	compare(t, "left out", 0, len(s.LeftOut))
	compare(t, "MIG devices", "0=1/0:3g.40gb 1=2/0:3g.40gb", migDevices(s.GPUs[3]))
}

// TestMIGDevicesWhileTheirGPUFails: they are as they were last seen.
func TestMIGDevicesWhileTheirGPUFails(t *testing.T) {
	t.Parallel()
	for _, call := range []string{"DeviceGetMigMode", "DeviceGetMaxMigDeviceCount", "DeviceGetMigDeviceHandleByIndex",
		"DeviceGetMemoryInfo"} {
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
