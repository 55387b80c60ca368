package offer

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

func TestHoldsOfMPS(t *testing.T) {
	t.Parallel()
	const shared = "nvidia.com/gpu.shared"
	var s inventory.Snapshot
	for i, uuid := range []string{"GPU-a", "GPU-b"} {
		s.GPUs = append(s.GPUs, inventory.GPU{
			UUID: uuid, Index: i, Health: inventory.Health{State: inventory.Healthy}, ComputeCapability: inventory.ComputeCapability{Major: 9},
		})
	}
	plan := resource.New(s, resource.Options{Sharing: resource.Sharing{Mode: resource.MPS, Rules: []resource.SharingRule{
		{Name: "nvidia.com/gpu", Devices: []resource.Ref{"0"}, Rename: shared, Replicas: 2},
	}}})
	listed := func(unready map[string]string, unasked ...string) map[string]int {
		counts := map[string]int{} // all devices by resource; the healthy ones below the empty name
		for _, r := range plan.Under(holdsOfMPS(plan, unready, unasked)).Resources {
			for _, d := range r.Devices {
				counts[r.Name]++
				if d.Healthy {
					counts[""]++
				}
			}
		}
		return counts
	}
	for name, tt := range map[string]struct {
		unready map[string]string
		unasked []string
		want    map[string]int
	}{
		"not asked yet": {map[string]string{shared: "not asked"}, []string{shared},
			map[string]int{"nvidia.com/gpu": 1, "": 1}},
		"no answer": {map[string]string{shared: "no answer"}, nil, map[string]int{"nvidia.com/gpu": 1, shared: 2, "": 1}},
		"answers":   {nil, nil, map[string]int{"nvidia.com/gpu": 1, shared: 2, "": 3}},
	} {
		if diff := cmp.Diff(tt.want, listed(tt.unready, tt.unasked...)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
