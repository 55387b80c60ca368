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
