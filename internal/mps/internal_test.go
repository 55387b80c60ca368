package mps

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

func TestGroupsOfAPlan(t *testing.T) {
	t.Parallel()
	gpu := func(uuid string, index int, state inventory.State, capability inventory.ComputeCapability) inventory.GPU {
		return inventory.GPU{
			UUID: uuid, Index: index, MemoryBytes: 80 << 30, ComputeCapability: capability, Health: inventory.Health{State: state},
		}
	}
	hopper, volta := inventory.ComputeCapability{Major: 9}, inventory.ComputeCapability{Major: 7}
	snapshot := inventory.Snapshot{GPUs: []inventory.GPU{
		gpu("GPU-a", 0, inventory.Healthy, hopper), gpu("GPU-b", 1, inventory.Unhealthy, hopper),
		gpu("GPU-c", 2, inventory.Healthy, hopper), gpu("GPU-d", 3, inventory.Lost, hopper), gpu("GPU-e", 4, inventory.Healthy, volta),
	}}
	share := func(mode resource.SharingMode) resource.Plan {
		return resource.New(snapshot, resource.Options{Sharing: resource.Sharing{Mode: mode, Rules: []resource.SharingRule{
			{Name: "nvidia.com/gpu", Devices: []resource.Ref{"0", "1"}, Replicas: 17},
			{Name: "nvidia.com/gpu", Devices: []resource.Ref{"2", "3"}, Rename: "nvidia.com/gpu.shared", Replicas: 2},
			{Name: "nvidia.com/gpu", Devices: []resource.Ref{"4"}, Rename: "nvidia.com/volta", Replicas: 17}, // more than it has clients
		}}})
	}
	want := []Group{
		{Resource: "nvidia.com/gpu", GPUs: []GPU{
			{UUID: "GPU-a", MemoryBytes: 80 << 30, Replicas: 17}, {UUID: "GPU-b", MemoryBytes: 80 << 30, Replicas: 17},
		}},
		{Resource: "nvidia.com/gpu.shared", GPUs: []GPU{{UUID: "GPU-c", MemoryBytes: 80 << 30, Replicas: 2}}},
	}
	if diff := cmp.Diff(want, Groups(snapshot, share(resource.MPS))); diff != "" {
		t.Errorf("groups (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]Group{}, Groups(snapshot, share(resource.TimeSliced))); diff != "" {
		t.Errorf("groups of time-slicing (-want +got):\n%s", diff)
	}
}

func TestReadingAnswers(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		read       func(string) string
		text, want string
	}{
		{percentage, "33", "33"}, {percentage, "33.0", "33"}, {percentage, "Invalid", ""}, {percentage, "", ""},
		{memory, "20480M", "20G"}, {memory, "20G", "20G"}, {memory, "20000M", "19G"}, {memory, "512M", "512M"},
		{memory, "Default limit: 512 M", "512M"}, {memory, "Memory limit is not set", ""},
	} {
		if got := tt.read(tt.text); got != tt.want {
			t.Errorf("%q is read as %q, want %q", tt.text, got, tt.want)
		}
	}
}
