package mps_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// Each GPU in units has a control daemon of its own, without limits. A lost GPU has no daemon.
func TestGroupsOfUnits(t *testing.T) {
	t.Parallel()
	var s inventory.Snapshot
	for i, state := range []inventory.State{inventory.Healthy, inventory.Unhealthy, inventory.Lost} {
		s.GPUs = append(s.GPUs, inventory.GPU{UUID: "GPU-" + string(rune('a'+i)), Index: i, MemoryBytes: 3 << 30,
			ComputeCapability: inventory.ComputeCapability{Major: 9}, Health: inventory.Health{State: state}})
	}
	plan := resource.New(s, resource.Options{
		Units:     resource.Units{Name: "volcano.sh/gpu-mem.1Gi", MPS: true},
		Selectors: []resource.Selector{{Models: []resource.Pattern{"*"}, Units: true}},
	})
	want := []mps.Group{
		{Resource: "gpu.GPU-a", GPUs: []mps.GPU{{UUID: "GPU-a", Replicas: 1}}, Unlimited: true},
		{Resource: "gpu.GPU-b", GPUs: []mps.GPU{{UUID: "GPU-b", Replicas: 1}}, Unlimited: true},
	}
	if diff := cmp.Diff(want, mps.Groups(s, plan)); diff != "" {
		t.Errorf("groups (-want +got):\n%s", diff)
	}
}
