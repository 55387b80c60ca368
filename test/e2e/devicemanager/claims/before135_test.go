//go:build kubelet134

package claims

import (
	"testing"

	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// allocatorFeatures are the default gates of 1.36 and 1.37, of which some are off by default in 1.34.
var allocatorFeatures = structured.Features{
	AdminAccess: true, PrioritizedList: true, PartitionableDevices: true, DeviceTaints: true, ConsumableCapacity: true,
}

// TestRefusedCounters: Kubernetes 1.34 wants counters in the slice of their devices. So slices with
// counters of their own, which later versions want, are refused, whatever the gate says.
func TestRefusedCounters(t *testing.T) {
	s := scan(t, "dgx-h100", inventory.Health{State: inventory.Healthy})
	s.GPUs = s.GPUs[:1]
	s.GPUs[0].MIG = inventory.MIGEnabled
	pool := dra.New(s, node, dra.Numbers{}.With(s.GPUs), dra.All(s.GPUs), dra.Divisions{s.GPUs[0].UUID: {
		Profiles: []inventory.MIGProfile{{
			Name: "3g.40gb", ID: 9, Count: 2, Size: 4, Starts: []int{0, 4},
			Attributes: inventory.MIGAttributes{GISlices: 3, CISlices: 3},
		}},
	}})
	all := objects(t, pool)
	if errs := refused(t, all[len(all)-1]); len(errs) == 0 {
		t.Error("devices are accepted without the counters in their slice")
	}
}
