package resource_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// TestUnreadMIGDevices: those that can be read are offered beside those that cannot; a GPU of which
// none can be read says why.
func TestUnreadMIGDevices(t *testing.T) {
	t.Parallel()
	unread := []inventory.LeftOut{{Index: 0, Reason: "some cannot be read"}, {Index: 1, Reason: "none can be read"},
		{Index: 2, Reason: "an old one"}}
	snapshot := inventory.Snapshot{GPUs: []inventory.GPU{gpu(0, "1g.10gb"), empty(1), gpu(2)}, LeftOut: unread}
	for strategy, want := range map[resource.MIGStrategy][]string{
		resource.MIGMixed: {"nvidia.com/gpu 2", "nvidia.com/mig-1g.10gb 0:0"},
		resource.MIGNone:  {"nvidia.com/gpu 0 1 2"},
	} {
		plan := resource.New(snapshot, resource.Options{MIG: strategy})
		if diff := cmp.Diff(want, outline(plan)); diff != "" {
			t.Errorf("%v (-want +got):\n%s", strategy, diff)
		}
		if strategy == resource.MIGMixed && (len(plan.LeftOut) != 1 ||
			!strings.Contains(plan.LeftOut[0].Reason, "none can be read")) {
			t.Errorf("left out %+v", plan.LeftOut)
		}
	}
}

// TestDeviceOfAnID: the ID alone tells the UUID, and whether the device is shared.
func TestDeviceOfAnID(t *testing.T) {
	t.Parallel()
	for id, want := range map[string]resource.Device{
		"GPU-a":    {ID: "GPU-a", UUID: "GPU-a", NUMANode: inventory.NoNUMANode},
		"GPU-a::3": {ID: "GPU-a::3", UUID: "GPU-a", NUMANode: inventory.NoNUMANode, Sharing: resource.TimeSliced},
		"MIG-GPU-a/1/0::0": {ID: "MIG-GPU-a/1/0::0", UUID: "MIG-GPU-a/1/0", NUMANode: inventory.NoNUMANode,
			Sharing: resource.TimeSliced},
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
		cuda            string
		major, replicas int
		offered         bool
	}{
		{"", 6, 16, true}, {"", 6, 17, false}, {"", 7, 17, true}, {"", 7, 48, true}, {"", 7, 49, false}, {"", 9, 48, true},
		{"12.9", 9, 49, false}, {"13.0", 9, 49, false}, {"13.1", 9, 60, true}, {"13.1", 9, 61, false}, {"13.1", 6, 17,
			false}, {"14.0", 7, 60, true},
	} {
		g := gpu(0)
		g.ComputeCapability.Major = tt.major
		plan := resource.New(inventory.Snapshot{Driver: inventory.Driver{CUDA: tt.cuda}, GPUs: []inventory.GPU{g}},
			resource.Options{Sharing: resource.Sharing{
				Mode: resource.MPS, Rules: []resource.SharingRule{{Name: "nvidia.com/gpu", Replicas: tt.replicas}},
			}})
		if offered := len(plan.Resources) == 1; offered != tt.offered {
			t.Errorf("%d replicas with CUDA %s and compute capability %d: offered %v, %q", tt.replicas, tt.cuda, tt.major,
				offered, plan.Warnings)
		}
	}
}

// TestOrderOfTheGPUs: a plan does not depend on the order in which the GPUs are told.
func TestOrderOfTheGPUs(t *testing.T) {
	t.Parallel()
	gpus := []inventory.GPU{gpu(0), gpu(1, "1g.10gb", "2g.20gb"), gpu(2), gpu(3, "1g.10gb")}
	for _, o := range []resource.Options{
		{}, {MIG: resource.MIGSingle}, {MIG: resource.MIGMixed, Sharing: resource.Sharing{Rules: []resource.SharingRule{
			{Name: resource.WholeGPU, First: 1, Replicas: 2, Rename: "nvidia.com/shared"},
		}}},
	} {
		want := resource.New(inventory.Snapshot{GPUs: gpus}, o)
		got := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{gpus[3], gpus[1], gpus[2], gpus[0]}}, o)
		if diff := cmp.Diff(outline(want), outline(got)); diff != "" || !got.Equal(want) {
			t.Errorf("%v: another order gives another plan (-want +got):\n%s", o.MIG, diff)
		}
	}
}

// TestDevicesOfTheNode: all that the node has are known, those that pods get in another way with
// the reason.
func TestDevicesOfTheNode(t *testing.T) {
	t.Parallel()
	display := gpu(3)
	display.Model = "NVIDIA DGX Display"
	plan := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{gpu(2), gpu(0), gpu(1), display}}, resource.Options{
		NotOffered: map[string]string{"GPU-b": "it is given by claims"},
		Selectors:  []resource.Selector{{Devices: []resource.Ref{"2"}, Exclude: true}},
	})
	var got []string
	for _, d := range plan.NodeDevices() {
		if one, found := plan.NodeDevice(d.UUID); !found || one != d || d.Healthy != (d.Reason == "") {
			t.Errorf("%s: found %v %+v, in the list %+v", d.UUID, found, one, d)
		}
		got = append(got, d.UUID+" "+d.Reason)
	}
	if diff := cmp.Diff([]string{"GPU-a ", "GPU-b it is given by claims", "GPU-c "}, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if d, found := plan.NodeDevice("GPU-d"); found {
		t.Errorf("a display is a device: %+v", d)
	}
	if diff := cmp.Diff([]string{"nvidia.com/gpu 0"}, outline(plan)); diff != "" || len(plan.LeftOut) != 2 {
		t.Errorf("left out %+v, offered (-want +got):\n%s", plan.LeftOut, diff)
	}
}

// TestExcludedGPUs: the first selector that selects a GPU says whether it is excluded. A display is
// in any case.
func TestExcludedGPUs(t *testing.T) {
	t.Parallel()
	display := gpu(4)
	display.Model = "DGX Display"
	first := resource.Selector{Devices: []resource.Ref{"0"}, Exclude: true}
	o := resource.Options{Selectors: []resource.Selector{first, {Models: []resource.Pattern{"*H100*"}, Replicas: 2},
		{Devices: []resource.Ref{"1"}, Exclude: true}}}
	for _, tt := range []struct {
		gpu      inventory.GPU
		options  resource.Options
		excluded bool
	}{
		{gpu(0), o, true}, {gpu(1), o, false}, {gpu(2), o, false}, {display, o, true},
		{gpu(0), resource.Options{}, false}, {display, resource.Options{}, true}, {gpu(0, "1g.10gb"), o, true},
	} {
		if got := tt.options.Excludes(tt.gpu); got != tt.excluded {
			t.Errorf("GPU %d (%s) with %d selectors: excluded %v, want %v", tt.gpu.Index, tt.gpu.Model,
				len(tt.options.Selectors), got, tt.excluded)
		}
	}
	if !first.SelectsGPU(gpu(0)) || first.SelectsGPU(gpu(1)) {
		t.Error("a selector by index selects another GPU, or not its own")
	}
}
