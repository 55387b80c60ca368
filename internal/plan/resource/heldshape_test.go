package resource_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

func TestConflicts(t *testing.T) {
	t.Parallel()
	// Two whole GPUs of which the second is shared, and one with two MIG devices.
	plan := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{gpu(0), gpu(1), gpu(2, "1g.10gb", "1g.10gb")}},
		resource.Options{
			MIG: resource.MIGMixed,
			Sharing: resource.Sharing{Mode: resource.TimeSliced, Rules: []resource.SharingRule{
				{Name: "nvidia.com/gpu", Devices: []resource.Ref{"1"}, Replicas: 2},
			}},
		})
	const (
		whole = "nvidia.com/gpu"
		mig   = "nvidia.com/mig-1g.10gb"
	)
	tests := map[string]struct {
		claims []resource.HeldShape
		held   []string // UUIDs
	}{
		"none": {},
		"a GPU shared before": {[]resource.HeldShape{{Resource: whole, ID: "GPU-a::0"},
			{Resource: whole, ID: "GPU-a::7"}}, []string{"GPU-a"}},
		"a GPU not shared before": {[]resource.HeldShape{{Resource: whole, ID: "GPU-b"}},
			[]string{"GPU-b"}},
		"one replica of more": {[]resource.HeldShape{{Resource: whole, ID: "GPU-b::7"}}, nil},
		"a GPU of another name": {[]resource.HeldShape{{Resource: "nvidia.com/other", ID: "GPU-a"}},
			[]string{"GPU-a"}},
		"replicas of another name": {[]resource.HeldShape{{Resource: "nvidia.com/other", ID: "GPU-b::0"}},
			[]string{"GPU-b"}},
		"a whole GPU before it had MIG mode": {[]resource.HeldShape{{Resource: whole, ID: "GPU-c"}},
			[]string{"MIG-c0", "MIG-c1"}},
		"a MIG device of a GPU that is whole": {[]resource.HeldShape{{Resource: mig, ID: "MIG-x", GPU: "GPU-a"}},
			[]string{"GPU-a"}},
		"a MIG device of which only the ID is known": {[]resource.HeldShape{{Resource: mig, ID: "MIG-x"}}, nil},
		"a MIG device beside others":                 {[]resource.HeldShape{{Resource: mig, ID: "MIG-x", GPU: "GPU-c"}}, nil},
		"a MIG device of another name": {[]resource.HeldShape{{Resource: whole, ID: "MIG-c1"}},
			[]string{"MIG-c1"}},
		"a MIG device that was shared": {[]resource.HeldShape{{Resource: mig, ID: "MIG-c0::1"}},
			[]string{"MIG-c0"}},
		"a GPU that is not there": {[]resource.HeldShape{{Resource: whole, ID: "GPU-z", GPU: "GPU-z"}},
			nil},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for i := range test.claims {
				test.claims[i].Reason = "pod p holds it"
			}
			var held []string
			for _, h := range plan.Conflicts(test.claims) {
				held = append(held, h.UUID)
				want := "as " + test.claims[0].Resource + " " + test.claims[0].ID + " (pod p holds it)"
				if h.Hidden || !strings.HasSuffix(h.Reason, want) {
					t.Errorf("hold %+v, want one that is shown, because of %q", h, want)
				}
			}
			if diff := cmp.Diff(test.held, held); diff != "" {
				t.Errorf("held (-want +got):\n%s", diff)
			}
		})
	}
	if (resource.HeldShape{Resource: mig, ID: "MIG-x"}).Conflicts(resource.Device{Resource: whole, UUID: "GPU-a",
		GPU: "GPU-a"}) ||
		(resource.HeldShape{Resource: mig, ID: "MIG-x"}).Conflicts(resource.Device{Resource: whole, UUID: "MIG-x"}) {
		t.Error("a claim on a GPU that is not known conflicts")
	}
}
