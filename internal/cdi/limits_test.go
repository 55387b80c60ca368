package cdi_test

import (
	"slices"
	"testing"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

// Every limit that a container with units can be given is in a spec, and stays there when the reserve changes.
func TestLimitsOfUnitsResolve(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles()...)
	w := wanted()
	for i := range w.Snapshot.GPUs {
		w.Snapshot.GPUs[i].MemoryBytes = 4 << 30
		w.Snapshot.GPUs[i].ComputeCapability.Major = 9
	}
	for _, reserve := range []int{0, 1024} {
		w.Plan = resource.New(w.Snapshot, resource.Options{
			Units: resource.Units{Name: "volcano.sh/gpu-mem.128Mi", Percentage: "volcano.sh/gpu-core.percentage", ReserveMiB: reserve, MPS: true},
			MIG:   resource.MIGNone, Selectors: []resource.Selector{{Models: []resource.Pattern{"*"}, Units: true}},
		})
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
	if env := h.spec(t, "memory-limit").Devices[1].ContainerEdits.Env; !slices.Equal(env, []string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=256M"}) {
		t.Errorf("the second limit is %q", env)
	}
	if (cdi.Written{}).Lacks(w)["percentage"] == "" {
		t.Error("percentages are given without a spec")
	}
}
