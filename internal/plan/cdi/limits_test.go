package cdi_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/ownprocess"
)

// hostile holds what wins where a pod sets the variables of limits itself: by CDI the limit does,
// once, whatever the pod says.
func hostile(t *testing.T, cache *cdilib.Cache) {
	t.Helper()
	for _, own := range [][]string{
		{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2G,1=4G", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100",
			"CUDA_MPS_PIPE_DIRECTORY=/nowhere"},
		{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="},
		{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=9G", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8G",
			"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=99"},
	} {
		spec := &oci.Spec{Process: &oci.Process{Env: append([]string{"NVIDIA_VISIBLE_DEVICES=all"}, own...)},
			Hooks: &oci.Hooks{}}
		if _, err := cache.InjectDevices(spec, "k8s.device-plugin.nvidia.com/memory-limit=256Mi",
			"k8s.device-plugin.nvidia.com/thread-limit=25"); err != nil {
			t.Fatal(err)
		}
		last := map[string]string{} // of two values of a variable, the last counts
		for _, e := range spec.Process.Env {
			name, value, _ := strings.Cut(e, "=")
			last[name] = value
		}
		if last["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] != "0=256M" || last["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] != "25" ||
			last["CUDA_MPS_PIPE_DIRECTORY"] != "/mps/pipe" {
			t.Errorf("a pod with %q gets %q", own, spec.Process.Env)
		}
	}
}

// Every limit that a container with units can be given is in a spec, and stays there when the
// reserve changes.
func TestLimitsOfUnitsResolve(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles()...)
	var w cdi.Wanted
	for _, reserve := range []int{0, 1024} {
		w = unitsOf(4, reserve)
		if written := h.apply(t, w); len(written.Lacks(w)) > 0 {
			t.Errorf("devices that containers cannot be given: %v", written.Lacks(w))
		}
	}
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(h.specs), cdilib.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"memory-limit=128Mi", "memory-limit=4096Mi", "thread-limit=5", "thread-limit=100"} {
		if cache.GetDevice("k8s.device-plugin.nvidia.com/"+name) == nil {
			t.Errorf("%s is in no spec", name)
		}
	}
	second := []string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=256M", "CUDA_MPS_PIPE_DIRECTORY=/mps/pipe"}
	if env := h.spec(t, "memory-limit").Devices[1].ContainerEdits.Env; !slices.Equal(env, second) {
		t.Errorf("the second limit is %q", env)
	}
	hostile(t, cache)
	if (cdi.Written{}).Lacks(w)["percentage"] == "" {
		t.Error("percentages are given without a spec")
	}
}

// unitsOf returns a node with GPUs in units of so much memory, of which no container gets the
// reserve.
func unitsOf(gib uint64, reserveMiB int) cdi.Wanted {
	w := wanted()
	for i := range w.Snapshot.GPUs {
		w.Snapshot.GPUs[i].MemoryBytes = gib << 30
		w.Snapshot.GPUs[i].ComputeCapability.Major = 9
	}
	w.Plan = resource.New(w.Snapshot, resource.Options{
		Units: resource.Units{Name: "volcano.sh/gpu-mem.128Mi", Percentage: "volcano.sh/gpu-core.percentage",
			ReserveMiB: reserveMiB, MPS: true},
		MIG: resource.MIGNone, Selectors: []resource.Selector{{Models: []resource.Pattern{"*"}, Units: true}},
	})
	return w
}

// TestLimitsOnFullDisk: GPUs with more memory come, and their limits cannot be written. A
// container that is given one of them would not start.
func TestLimitsOnFullDisk(t *testing.T) {
	t.Parallel()
	if !ownprocess.Is(t) {
		return
	}
	h := newHost(t, driverFiles()...)
	h.apply(t, unitsOf(4, 0))
	ownprocess.LimitFiles(t, 5000)
	w := unitsOf(80, 0)
	written, err := h.writer.Apply(w)
	if lacks := written.Lacks(w); err == nil || len(lacks) != 3 {
		t.Errorf("written: %v; not given out are %v, want two GPUs and percentages", err, lacks)
	}
}

// Units by the driver are given out only where NVIDIA's hook sets their limits, and each limit is
// in a spec.
func TestLimitsByTheDriver(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		driver, hook string
		v1           bool
		gone         bool // the hook is removed later
		disabled     []string
		want         string // in why the units are not given out
	}{
		"all is there": {driver: version, hook: newHook},
		"an older toolkit": {driver: version, hook: "update-ldcache",
			want: "install NVIDIA's container toolkit 1.20.1"},
		"a toolkit that goes": {driver: version, hook: newHook, gone: true, want: "which was not found"},
		"no toolkit":          {driver: version, want: "which was not found"},
		"disabled": {driver: version, hook: newHook, disabled: []string{"apply-cuda-memory-limits"},
			want: "check --nvidia-cdi-hook-path and --cdi-disable-hooks"},
		"cgroup v1": {driver: version, hook: newHook, v1: true, want: "need cgroup v2"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t, driverFiles()...)
			h.library(t, "driver-root/usr/lib/x86_64-linux-gnu/libcuda.so."+version, "libcuda.so.1")
			if tt.hook != "" {
				h.program(t, "driver-root/usr/bin/nvidia-cdi-hook", tt.hook)
			}
			if !tt.v1 {
				h.add(t, "sys/fs/cgroup/cgroup.controllers")
			}
			w := wanted()
			w.Options.DisabledHooks = tt.disabled
			w.Snapshot.GPUs[0].MemoryBytes = 4 << 30
			w.Plan = resource.New(w.Snapshot, resource.Options{
				Units: resource.Units{Name: "volcano.sh/gpu-mem.128Mi", Driver: true}, MIG: resource.MIGNone,
				Selectors: []resource.Selector{{Models: []resource.Pattern{"*"}, Units: true}},
			})
			written, err := h.writer.Apply(w)
			if tt.gone {
				if len(written.Lacks(w)) > 0 {
					t.Errorf("with the toolkit: %v", written.Lacks(w))
				}
				if err := os.Remove(filepath.Join(h.root, "driver-root/usr/bin/nvidia-cdi-hook")); err != nil {
					t.Fatal(err)
				}
				written, err = h.writer.Apply(w)
			}
			if err != nil {
				t.Fatal(err)
			}
			if why := written.Lacks(w)["GPU-a"]; (why == "") != (tt.want == "") || !strings.Contains(why, tt.want) {
				t.Errorf("units are not given out because %q, want %q", why, tt.want)
			}
			devices := h.spec(t, "driver-memory-limit").Devices
			want := []string{"NVIDIA_GPU_MEMORY_REQUEST=0", "NVIDIA_GPU_MEMORY_LIMIT=4096"}
			if len(devices) != 32 || !slices.Equal(devices[31].ContainerEdits.Env, want) {
				t.Errorf("%d limits, want 32, the last with %q", len(devices), want)
			}
			if _, err := os.Stat(filepath.Join(h.specs, "k8s.device-plugin.nvidia.com-thread-limit.json")); err == nil {
				t.Error("there are limits of threads, which only MPS has")
			}
		})
	}
}
