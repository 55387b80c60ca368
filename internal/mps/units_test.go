package mps_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// A resource has one group with the GPUs that its clients share. A lost GPU, and one with more memory
// limits than clients, is in no group.
func TestGroupsOfAPlan(t *testing.T) {
	t.Parallel()
	hopper, pascal := inventory.ComputeCapability{Major: 9}, inventory.ComputeCapability{Major: 6}
	var s inventory.Snapshot
	for i, g := range []struct {
		state      inventory.State
		capability inventory.ComputeCapability
	}{{inventory.Healthy, hopper}, {inventory.Unhealthy, hopper}, {inventory.Healthy, hopper}, {inventory.Lost, hopper},
		{inventory.Healthy, pascal}} {
		s.GPUs = append(s.GPUs, inventory.GPU{UUID: "GPU-" + string(rune('a'+i)), Index: i, MemoryBytes: 80 << 30,
			ComputeCapability: g.capability, Health: inventory.Health{State: g.state}})
	}
	for mode, want := range map[resource.SharingMode][]mps.Group{
		resource.MPS:        {group(one, gpu("a", 80, 17), gpu("b", 80, 17)), group(two, gpu("c", 80, 2))},
		resource.TimeSliced: {},
	} {
		plan := resource.New(s, resource.Options{Sharing: resource.Sharing{Mode: mode, Rules: []resource.SharingRule{
			{Name: one, Devices: []resource.Ref{"0", "1"}, Replicas: 17},
			{Name: one, Devices: []resource.Ref{"2", "3"}, Rename: two, Replicas: 2},
			{Name: one, Devices: []resource.Ref{"4"}, Rename: "nvidia.com/pascal", Replicas: 17},
		}}})
		if diff := cmp.Diff(want, mps.Groups(s, plan)); diff != "" {
			t.Errorf("groups of %v (-want +got):\n%s", mode, diff)
		}
	}
}

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
