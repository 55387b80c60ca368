package serve

import (
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const gpuName = "nvidia.com/gpu"

func keyOf(resource, id string) holders.Key { return holders.Key{Resource: resource, ID: id} }

// oneGPU is a resource with one device.
func oneGPU() resource.Resource {
	snapshot := inventory.Snapshot{GPUs: []inventory.GPU{{UUID: "GPU-0",
		Health: inventory.Health{State: inventory.Healthy}}}}
	return resource.New(snapshot, resource.Options{}).Resources[0]
}

// listOf returns the list of a resource.
func listOf(r resource.Resource) listing.List {
	h := holders.New()
	s := listing.State{}.Add(r.Name, false, h, time.Time{})
	plan := resource.Plan{Resources: []resource.Resource{r}}
	return listing.Next(s, plan, listing.Options{}, h, time.Time{}).Latest().Lists[r.Name]
}

// TestAListThatSaysTheSameIsKept: streams send what is another response.
func TestAListThatSaysTheSameIsKept(t *testing.T) {
	t.Parallel()
	device := func(id string, healthy bool, node int) resource.Device {
		return resource.Device{ID: id, UUID: id, Healthy: healthy, NUMANode: node}
	}
	before := device("GPU-0", true, 1)
	for name, tt := range map[string]struct {
		now  []resource.Device
		kept bool
	}{
		"the same":        {[]resource.Device{before}, true},
		"another ID":      {[]resource.Device{device("GPU-1", true, 1)}, false},
		"Unhealthy":       {[]resource.Device{device("GPU-0", false, 1)}, false},
		"of another node": {[]resource.Device{device("GPU-0", true, 0)}, false},
		"of no node":      {[]resource.Device{device("GPU-0", true, inventory.NoNUMANode)}, false},
		"one more":        {[]resource.Device{before, device("GPU-1", true, 1)}, false},
	} {
		l := newList(gpuName)
		l.publish(listOf(resource.Resource{Devices: []resource.Device{before}}), Options{})
		first := l.views.Value().response
		l.publish(listOf(resource.Resource{Devices: tt.now}), Options{})
		if kept := l.views.Value().response == first; kept != tt.kept {
			t.Errorf("%s: the response is kept: %v, want %v", name, kept, tt.kept)
		}
	}
}

// TestWhenListsAreSentAgain while the checkpoint may be outdated.
func TestWhenListsAreSentAgain(t *testing.T) {
	t.Parallel()
	var anew resendPacing
	for i, outdated := range []bool{true, true, false, true} {
		if got, want := anew.due(time.Unix(1, 0), outdated), i == 0 || i == 3; got != want {
			t.Errorf("reading %d: the list is sent again: %v, want %v", i, got, want)
		}
	}
	var pacing resendPacing
	want := map[int]bool{0: true, 1: true, 3: true, 7: true, 15: true, 31: true, 61: true, 91: true}
	for second := range 100 {
		if got := pacing.due(time.Unix(int64(second), 0), true); got != want[second] {
			t.Errorf("after %d s: the list is sent again: %v", second, got)
		}
	}
}
