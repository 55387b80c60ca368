package simulator_test

import (
	"fmt"
	"io/fs"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// profile returns what a GPU says of the profile with NVML's number.
func profile(t *testing.T, gpu nvml.Device, number int) *nvml.GpuInstanceProfileInfo {
	t.Helper()
	info, ret := gpu.GetGpuInstanceProfileInfo(number)
	must(t, "GetGpuInstanceProfileInfo", ret)
	return &info
}

// create creates a GPU instance at a place.
func create(gpu nvml.Device, info *nvml.GpuInstanceProfileInfo, start, size uint32) (nvml.GpuInstance, nvml.Return) {
	return gpu.CreateGpuInstanceWithPlacement(info, &nvml.GpuInstancePlacement{Start: start, Size: size})
}

// capacity returns how many instances of a profile there is room for.
func capacity(t *testing.T, gpu nvml.Device, info *nvml.GpuInstanceProfileInfo) int {
	t.Helper()
	count, ret := gpu.GetGpuInstanceRemainingCapacity(info)
	must(t, "GetGpuInstanceRemainingCapacity", ret)
	return count
}

// answered checks what a call answered.
func answered(t *testing.T, call string, got, want nvml.Return) {
	t.Helper()
	if got != want {
		t.Errorf("%s answered %v, want %v", call, got, want)
	}
}

func TestInstances(t *testing.T) {
	t.Parallel()
	n, lib := start(t, "dgx-h100")
	gpu := handle(t, lib, 0)
	set := listen(t, lib, gpu)
	three, two := profile(t, gpu, nvml.GPU_INSTANCE_PROFILE_3_SLICE), profile(t, gpu, nvml.GPU_INSTANCE_PROFILE_2_SLICE)
	_, ret := create(gpu, three, 0, 4)
	answered(t, "creation while the mode is off", ret, nvml.ERROR_NOT_SUPPORTED)
	activation, ret := gpu.SetMigMode(nvml.DEVICE_MIG_ENABLE)
	must(t, "SetMigMode", ret)
	must(t, "its activation", activation)
	if got := capacity(t, gpu, three); got != 2 {
		t.Errorf("room for %d instances of three slices", got)
	}
	gi, ret := create(gpu, three, 4, 4)
	must(t, "creation", ret)
	for _, wrong := range [][2]uint32{{4, 4}, {2, 4}, {0, 3}, {8, 4}} {
		_, ret = create(gpu, three, wrong[0], wrong[1])
		answered(t, fmt.Sprint("creation at ", wrong), ret, nvml.ERROR_INSUFFICIENT_RESOURCES)
	}
	_, ret = create(gpu, two, 4, 2)
	answered(t, "creation where there is one", ret, nvml.ERROR_INSUFFICIENT_RESOURCES)
	if got := capacity(t, gpu, two); got != 2 {
		t.Errorf("room for %d instances of two slices", got)
	}
	one, ret := gi.GetComputeInstanceProfileInfo(nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE,
		nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
	must(t, "GetComputeInstanceProfileInfo", ret)
	first, ret := gi.CreateComputeInstance(&one)
	must(t, "CreateComputeInstance", ret)
	second, ret := gi.CreateComputeInstanceWithPlacement(&one, &nvml.ComputeInstancePlacement{Start: 2, Size: 1})
	must(t, "CreateComputeInstanceWithPlacement", ret)
	_, ret = gi.CreateComputeInstanceWithPlacement(&one, &nvml.ComputeInstancePlacement{Start: 2, Size: 1})
	answered(t, "a compute instance where there is one", ret, nvml.ERROR_INSUFFICIENT_RESOURCES)
	if left, ret := gi.GetComputeInstanceRemainingCapacity(&one); ret != nvml.SUCCESS || left != 1 {
		t.Errorf("room for %d compute instances: %v", left, ret)
	}

	status := n.List()[0].MIG
	if len(status) != 2 || status[1].Profile != "1c.3g.40gb" || status[1].CI != 1 {
		t.Fatalf("MIG devices: %+v", status)
	}
	node := func(minor int) error {
		_, err := fs.Stat(n.Root(), fmt.Sprintf("dev/nvidia-caps/nvidia-cap%d", minor))
		return err
	}
	var minor int
	table, err := fs.ReadFile(n.Root(), "proc/driver/nvidia-caps/mig-minors")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(table), fmt.Sprintf("gpu0/gi%d/ci1/access ", status[1].GI))
	if _, err := fmt.Sscan(rest, &minor); err != nil {
		t.Fatal(err)
	}
	if err := node(minor); err != nil {
		t.Errorf("the capability of a compute instance: %v", err)
	}
	answered(t, "destruction with compute instances", gi.Destroy(), nvml.ERROR_IN_USE)
	must(t, "destruction of a compute instance", first.Destroy())
	if d, ret := gpu.GetMigDeviceHandleByIndex(0); ret != nvml.ERROR_NOT_FOUND {
		t.Errorf("MIG device 0 is there: %v, %v", d, ret)
	}
	inject(t, n, simulator.Fault{Kind: simulator.KindProcesses, GPU: status[1].UUID, Count: 1})
	answered(t, "destruction of a compute instance in use", second.Destroy(), nvml.ERROR_IN_USE)
	inject(t, n, simulator.Fault{Kind: simulator.KindProcesses, GPU: status[1].UUID})
	must(t, "destruction of a compute instance", second.Destroy())
	answered(t, "a second destruction", second.Destroy(), nvml.ERROR_NOT_FOUND)
	if err := node(minor); err == nil {
		t.Error("the capability of a compute instance that is gone is there")
	}
	must(t, "destruction", gi.Destroy())
	answered(t, "a second destruction", gi.Destroy(), nvml.ERROR_NOT_FOUND)
	events, _ := drain(set)
	if len(events) != 7 { // the mode, three creations, three destructions
		t.Errorf("%d events, want 7", len(events))
	}
}

func TestModes(t *testing.T) {
	t.Parallel()
	const on, off = nvml.DEVICE_MIG_ENABLE, nvml.DEVICE_MIG_DISABLE
	for name, tt := range map[string]struct {
		node, answer            string
		processes               uint64
		activation              nvml.Return
		mode, pending           int
		afterReset, afterReboot int
	}{
		"Ampere":                   {"dgx-a100", "", 0, nvml.SUCCESS, on, on, on, on},
		"Ampere in use":            {"dgx-a100", "", 1, nvml.ERROR_IN_USE, off, on, on, on},
		"Ampere that cannot reset": {"dgx-a100", "RESET_REQUIRED", 0, nvml.ERROR_RESET_REQUIRED, off, on, on, on},
		"Hopper":                   {"dgx-h100", "", 0, nvml.SUCCESS, on, on, off, off},
		"Hopper in use":            {"dgx-h100", "", 1, nvml.ERROR_IN_USE, off, off, off, off},
		"no multi-instance mode":   {"t4", "", 0, nvml.ERROR_NOT_SUPPORTED, 0, 0, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, lib := start(t, tt.node)
			gpu := handle(t, lib, 0)
			if tt.answer != "" {
				inject(t, n, simulator.Fault{Kind: simulator.KindAnswer, GPU: "0", Call: "DeviceSetMigMode",
					Value: tt.answer})
			}
			inject(t, n, simulator.Fault{Kind: simulator.KindProcesses, GPU: "0", Count: tt.processes})
			activation, _ := gpu.SetMigMode(on)
			answered(t, "the activation", activation, tt.activation)
			if tt.activation == nvml.ERROR_NOT_SUPPORTED {
				return
			}
			mode, pending, ret := gpu.GetMigMode()
			if ret != nvml.SUCCESS || mode != tt.mode || pending != tt.pending {
				t.Errorf("mode %d, pending %d, want %d and %d", mode, pending, tt.mode, tt.pending)
			}
			if tt.processes > 0 {
				if err := n.Inject(simulator.Fault{Kind: simulator.KindReset, GPU: "0"}); err == nil {
					t.Error("a GPU in use was reset")
				}
			}
			inject(t, n, simulator.Fault{Kind: simulator.KindProcesses, GPU: "0"})
			inject(t, n, simulator.Fault{Kind: simulator.KindReset, GPU: "0"})
			if mode, pending, _ := gpu.GetMigMode(); mode != tt.afterReset || pending != mode {
				t.Errorf("after a reset: mode %d, pending %d, want %d", mode, pending, tt.afterReset)
			}
			inject(t, n, simulator.Fault{Kind: simulator.KindReboot})
			if mode, _, _ := handle(t, open(t, n), 0).GetMigMode(); mode != tt.afterReboot {
				t.Errorf("after a restart: mode %d, want %d", mode, tt.afterReboot)
			}
		})
	}
}

// TestInstancesAreLost restarts a node, and resets a GPU, with instances on it.
func TestInstancesAreLost(t *testing.T) {
	t.Parallel()
	for node, mode := range map[string]int{"a100-mig-mixed": nvml.DEVICE_MIG_ENABLE,
		"h100-mig-1g": nvml.DEVICE_MIG_DISABLE} {
		n, lib := start(t, node)
		gpu := handle(t, lib, 3)
		if activation, ret := gpu.SetMigMode(nvml.DEVICE_MIG_DISABLE); ret != nvml.SUCCESS ||
			activation != nvml.ERROR_IN_USE {
			t.Errorf("%s: the mode is switched off although there are instances: %v, %v", node, activation, ret)
		}
		must(t, "SetMigMode", second2(gpu.SetMigMode(nvml.DEVICE_MIG_ENABLE)))
		inject(t, n, simulator.Fault{Kind: simulator.KindReset, GPU: "3"})
		if got := n.List(); len(got[3].MIG) > 0 || len(got[2].MIG)+len(got[4].MIG) == 0 {
			t.Errorf("%s: after a reset of one GPU: %+v", node, got)
		}
		inject(t, n, simulator.Fault{Kind: simulator.KindReboot})
		for _, s := range n.List() {
			if len(s.MIG) > 0 {
				t.Errorf("%s: GPU %d has MIG devices after a restart", node, s.Index)
			}
		}
		if got, _, _ := handle(t, open(t, n), 3).GetMigMode(); got != mode {
			t.Errorf("%s: mode %d after a restart, want %d", node, got, mode)
		}
	}
}

// second2 returns the second of two answers.
func second2(_, ret nvml.Return) nvml.Return { return ret }

// TestRepartitioningFailsAndHangs has each call fail, and hang.
func TestRepartitioningFailsAndHangs(t *testing.T) {
	for call, do := range map[string]func(t *testing.T, gpu nvml.Device, gi nvml.GpuInstance,
		ci nvml.ComputeInstance) nvml.Return{
		"DeviceSetMigMode": func(_ *testing.T, gpu nvml.Device, _ nvml.GpuInstance,
			_ nvml.ComputeInstance) nvml.Return {
			return second2(gpu.SetMigMode(nvml.DEVICE_MIG_ENABLE))
		},
		"DeviceCreateGpuInstance": func(t *testing.T, gpu nvml.Device, _ nvml.GpuInstance,
			_ nvml.ComputeInstance) nvml.Return {
			return second(gpu.CreateGpuInstance(profile(t, gpu, nvml.GPU_INSTANCE_PROFILE_1_SLICE)))
		},
		"DeviceCreateGpuInstanceWithPlacement": func(t *testing.T, gpu nvml.Device, _ nvml.GpuInstance,
			_ nvml.ComputeInstance) nvml.Return {
			return second(create(gpu, profile(t, gpu, nvml.GPU_INSTANCE_PROFILE_1_SLICE), 0, 1))
		},
		"DeviceGetGpuInstanceRemainingCapacity": func(t *testing.T, gpu nvml.Device, _ nvml.GpuInstance,
			_ nvml.ComputeInstance) nvml.Return {
			return second(gpu.GetGpuInstanceRemainingCapacity(profile(t, gpu, nvml.GPU_INSTANCE_PROFILE_1_SLICE)))
		},
		"DeviceGetGpuInstancePossiblePlacements": func(t *testing.T, gpu nvml.Device, _ nvml.GpuInstance,
			_ nvml.ComputeInstance) nvml.Return {
			return second(gpu.GetGpuInstancePossiblePlacements(profile(t, gpu, nvml.GPU_INSTANCE_PROFILE_1_SLICE)))
		},
		"DeviceGetGpuInstances": func(t *testing.T, gpu nvml.Device, _ nvml.GpuInstance,
			_ nvml.ComputeInstance) nvml.Return {
			return second(gpu.GetGpuInstances(profile(t, gpu, nvml.GPU_INSTANCE_PROFILE_1_SLICE)))
		},
		"GpuInstanceCreateComputeInstance": func(_ *testing.T, _ nvml.Device, gi nvml.GpuInstance,
			_ nvml.ComputeInstance) nvml.Return {
			return second(gi.CreateComputeInstance(&nvml.ComputeInstanceProfileInfo{}))
		},
		"GpuInstanceCreateComputeInstanceWithPlacement": func(_ *testing.T, _ nvml.Device, gi nvml.GpuInstance,
			_ nvml.ComputeInstance) nvml.Return {
			placement := nvml.ComputeInstancePlacement{Start: 2, Size: 1}
			return second(gi.CreateComputeInstanceWithPlacement(&nvml.ComputeInstanceProfileInfo{}, &placement))
		},
		"GpuInstanceGetComputeInstanceRemainingCapacity": func(_ *testing.T, _ nvml.Device, gi nvml.GpuInstance,
			_ nvml.ComputeInstance) nvml.Return {
			return second(gi.GetComputeInstanceRemainingCapacity(&nvml.ComputeInstanceProfileInfo{}))
		},
		"GpuInstanceGetComputeInstancePossiblePlacements": func(_ *testing.T, _ nvml.Device, gi nvml.GpuInstance,
			_ nvml.ComputeInstance) nvml.Return {
			return second(gi.GetComputeInstancePossiblePlacements(&nvml.ComputeInstanceProfileInfo{}))
		},
		"GpuInstanceGetComputeInstances": func(_ *testing.T, _ nvml.Device, gi nvml.GpuInstance,
			_ nvml.ComputeInstance) nvml.Return {
			return second(gi.GetComputeInstances(&nvml.ComputeInstanceProfileInfo{}))
		},
		"GpuInstanceDestroy": func(_ *testing.T, _ nvml.Device, gi nvml.GpuInstance,
			ci nvml.ComputeInstance) nvml.Return {
			ci.Destroy()
			return gi.Destroy()
		},
		"ComputeInstanceDestroy": func(_ *testing.T, _ nvml.Device, _ nvml.GpuInstance,
			ci nvml.ComputeInstance) nvml.Return {
			return ci.Destroy()
		},
	} {
		t.Run(call, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n, lib := start(t, "dgx-h100")
				gpu := handle(t, lib, 0)
				must(t, "SetMigMode", second2(gpu.SetMigMode(nvml.DEVICE_MIG_ENABLE)))
				gi, ret := create(gpu, profile(t, gpu, nvml.GPU_INSTANCE_PROFILE_3_SLICE), 4, 4)
				must(t, "creation", ret)
				ci, ret := gi.CreateComputeInstance(&nvml.ComputeInstanceProfileInfo{})
				must(t, "CreateComputeInstance", ret)
				inject(t, n, simulator.Fault{Kind: simulator.KindFail, GPU: "0", Call: call, Return: "UNKNOWN"})
				before := fmt.Sprint(n.List()[0].MIG)
				if call != "GpuInstanceDestroy" { // which needs its compute instance gone
					answered(t, "the call that fails", do(t, gpu, gi, ci), nvml.ERROR_UNKNOWN)
					if after := fmt.Sprint(n.List()[0].MIG); after != before {
						t.Errorf("a call that failed changed %s to %s", before, after)
					}
				}
				inject(t, n, simulator.Fault{Kind: simulator.KindRestore, GPU: "0"})
				inject(t, n, simulator.Fault{Kind: simulator.KindHang, GPU: "0", Call: call})
				answers := make(chan nvml.Return, 1)
				go func() { answers <- do(t, gpu, gi, ci) }()
				time.Sleep(time.Hour)
				select {
				case ret := <-answers:
					t.Errorf("the call answered %v in spite of the hang", ret)
				default:
					inject(t, n, simulator.Fault{Kind: simulator.KindRestore, GPU: "0"})
					must(t, "the call that hung", <-answers)
				}
			})
		})
	}
}

// TestRandomInstances creates and destroys instances at random. No two are ever on one slice, the
// remaining capacity is right about whether one more can be created, and a place is refused only
// where an instance is, or where the profile has none.
func TestRandomInstances(t *testing.T) {
	t.Parallel()
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		node := []string{"dgx-h100", "dgx-a100", "dgx-b200"}[seed%3]
		_, lib := start(t, node)
		gpu := handle(t, lib, 0)
		must(t, "SetMigMode", second2(gpu.SetMigMode(nvml.DEVICE_MIG_ENABLE)))
		numbers := []int{
			nvml.GPU_INSTANCE_PROFILE_1_SLICE, nvml.GPU_INSTANCE_PROFILE_2_SLICE, nvml.GPU_INSTANCE_PROFILE_3_SLICE,
			nvml.GPU_INSTANCE_PROFILE_4_SLICE, nvml.GPU_INSTANCE_PROFILE_7_SLICE,
			nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1,
			nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV2,
		}
		var there []nvml.GpuInstance
		for range 40 {
			if len(there) > 0 && r.IntN(3) == 0 {
				i := r.IntN(len(there))
				must(t, "destruction", there[i].Destroy())
				there = append(there[:i], there[i+1:]...)
				continue
			}
			info := profile(t, gpu, numbers[r.IntN(len(numbers))])
			room := capacity(t, gpu, info)
			gi, ret := gpu.CreateGpuInstance(info)
			if (ret == nvml.SUCCESS) != (room > 0) {
				t.Fatalf("seed %d: there is room for %d, and the creation answered %v", seed, room, ret)
			}
			if ret == nvml.SUCCESS {
				there = append(there, gi)
			}
			taken, ids := map[uint32]bool{}, map[uint32]bool{}
			for _, gi := range there {
				info, ret := gi.GetInfo()
				must(t, "GetInfo", ret)
				if ids[info.Id] {
					t.Fatalf("seed %d: two instances with ID %d", seed, info.Id)
				}
				ids[info.Id] = true
				for s := info.Placement.Start; s < info.Placement.Start+info.Placement.Size; s++ {
					if taken[s] || s >= 8 {
						t.Fatalf("seed %d: two instances on slice %d", seed, s)
					}
					taken[s] = true
				}
			}
		}
	}
}
