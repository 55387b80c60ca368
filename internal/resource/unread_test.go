package resource_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

// TestUnreadMIGDevices: those that can be read are offered beside those that cannot; a GPU of which none can be read says why.
func TestUnreadMIGDevices(t *testing.T) {
	t.Parallel()
	unread := []inventory.LeftOut{{Index: 0, Reason: "some cannot be read"}, {Index: 1, Reason: "none can be read"}, {Index: 2, Reason: "an old one"}}
	snapshot := inventory.Snapshot{GPUs: []inventory.GPU{gpu(0, "1g.10gb"), empty(1), gpu(2)}, LeftOut: unread}
	for strategy, want := range map[resource.MIGStrategy][]string{
		resource.MIGMixed: {"nvidia.com/gpu 2", "nvidia.com/mig-1g.10gb 0:0"},
		resource.MIGNone:  {"nvidia.com/gpu 0 1 2"},
	} {
		plan := resource.New(snapshot, resource.Options{MIG: strategy})
		if diff := cmp.Diff(want, outline(plan)); diff != "" {
			t.Errorf("%v (-want +got):\n%s", strategy, diff)
		}
		if strategy == resource.MIGMixed && (len(plan.LeftOut) != 1 || !strings.Contains(plan.LeftOut[0].Reason, "none can be read")) {
			t.Errorf("left out %+v", plan.LeftOut)
		}
	}
}

// TestDeviceOfAnID: the ID alone tells the UUID, and whether the device is shared.
func TestDeviceOfAnID(t *testing.T) {
	t.Parallel()
	for id, want := range map[string]resource.Device{
		"GPU-a":            {ID: "GPU-a", UUID: "GPU-a", NUMANode: inventory.NoNUMANode},
		"GPU-a::3":         {ID: "GPU-a::3", UUID: "GPU-a", NUMANode: inventory.NoNUMANode, Sharing: resource.TimeSliced},
		"MIG-GPU-a/1/0::0": {ID: "MIG-GPU-a/1/0::0", UUID: "MIG-GPU-a/1/0", NUMANode: inventory.NoNUMANode, Sharing: resource.TimeSliced},
	} {
		if got := resource.ByID(id); got != want {
			t.Errorf("%s: %+v, want %+v", id, got, want)
		}
	}
}

// TestMostClientsOfMPS: as many replicas as MPS has clients are offered, and not one more.
func TestMostClientsOfMPS(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		major, replicas int
		offered         bool
	}{{6, 16, true}, {6, 17, false}, {7, 17, true}, {7, 48, true}, {7, 49, false}, {9, 48, true}} {
		g := gpu(0)
		g.ComputeCapability.Major = tt.major
		plan := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{g}}, resource.Options{Sharing: resource.Sharing{
			Mode: resource.MPS, Rules: []resource.SharingRule{{Name: "nvidia.com/gpu", Replicas: tt.replicas}},
		}})
		if offered := len(plan.Resources) == 1; offered != tt.offered {
			t.Errorf("%d replicas with compute capability %d: offered %v, %q", tt.replicas, tt.major, offered, plan.Warnings)
		}
	}
}
