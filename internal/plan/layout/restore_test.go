package layout_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

// TestRestoreKeepsInstances: instances that are as they were stay with their IDs, the first one
// too, and the others get new ones. One that lacks its compute instances gets those.
func TestRestoreKeepsInstances(t *testing.T) {
	t.Parallel()
	had := gpu(h100, "2g.20gb@0", "1g.10gb@2", "3g.40gb@4").Instances
	for i := range had {
		had[i].ID += 10 // of another time
	}
	c := layout.Restore(gpu(h100, "2g.20gb@0", "1g.10gb@3", "3g.40gb@4"), inventory.MIGEnabled, had)
	var got []string
	for _, p := range c.After.Instances {
		got = append(got, fmt.Sprintf("%s@%d %d", p.Profile, p.Start, p.ID))
	}
	if diff := cmp.Diff([]string{"2g.20gb@0 1", "1g.10gb@2 0", "3g.40gb@4 3"}, got); diff != "" || c.Reason != "" {
		t.Errorf("%s (-want +got):\n%s", c.Reason, diff)
	}
	c = layout.Restore(gpu(h100, "2g.20gb@0?", "1g.10gb@2", "3g.40gb@4"), inventory.MIGEnabled, had)
	if len(c.Steps) != 1 || c.Steps[0].Action != inventory.MIGCreateCompute || c.Steps[0].Part.ID != 1 {
		t.Errorf("an instance without its compute instance: %+v", c.Steps)
	}
	had[1].Profile = "1g.99gb"
	if c = layout.Restore(gpu(h100), inventory.MIGEnabled, had); !strings.Contains(c.Reason, "no profile 1g.99gb") {
		t.Errorf("a profile that is not there any more: %q", c.Reason)
	}
}

// TestRestoreOfOneInstance: what becomes of an instance where another one was before.
func TestRestoreOfOneInstance(t *testing.T) {
	t.Parallel()
	smaller := gpu(h100, "3g.40gb@4")
	smaller.Instances[0].Size = 3
	for name, tt := range map[string]struct {
		now  layout.GPU
		had  string
		want []string
	}{
		"the same": {gpu(h100, "3g.40gb@4"), "3g.40gb@4", nil},
		"another profile of the same size": {gpu(h100, "4g.40gb@0"), "3g.40gb@0", []string{
			"destroy-compute-instance 1/0", "destroy-gpu-instance 1", "create-gpu-instance 3g.40gb 0:4",
			"create-compute-instance at 0 0:3",
		}},
		"another place": {gpu(h100, "3g.40gb@0"), "3g.40gb@4", []string{
			"destroy-compute-instance 1/0", "destroy-gpu-instance 1", "create-gpu-instance 3g.40gb 4:4",
			"create-compute-instance at 4 0:3",
		}},
		"another size": {smaller, "3g.40gb@4", []string{
			"destroy-compute-instance 1/0", "destroy-gpu-instance 1", "create-gpu-instance 3g.40gb 4:4",
			"create-compute-instance at 4 0:3",
		}},
		"other compute instances": {gpu(h100, "3g.40gb@4"), "1c.3g.40gb@4", []string{
			"destroy-compute-instance 1/0", "destroy-gpu-instance 1", "create-gpu-instance 3g.40gb 4:4",
			"create-compute-instance at 4 0:1", "create-compute-instance at 4 1:1", "create-compute-instance at 4 2:1",
		}},
		"it had no compute instances": {gpu(h100, "3g.40gb@4"), "3g.40gb@4?", nil},
		"it has no compute instances": {gpu(h100, "3g.40gb@4?"), "3g.40gb@4",
			[]string{"create-compute-instance at 4 0:3"}},
	} {
		c := layout.Restore(tt.now, inventory.MIGEnabled, gpu(h100, tt.had).Instances)
		if diff := cmp.Diff(tt.want, show(c)); diff != "" || c.Reason != "" {
			t.Errorf("%s: %s (-want +got):\n%s", name, c.Reason, diff)
		}
	}
}

// TestRestoreInOrder: the instances come by ascending slice, whatever order they had.
func TestRestoreInOrder(t *testing.T) {
	t.Parallel()
	had := gpu(h100, "3g.40gb@4", "1g.10gb@2", "2g.20gb@0").Instances
	c := layout.Restore(gpu(h100), inventory.MIGEnabled, had)
	if !slices.IsSortedFunc(c.After.Instances, func(a, b layout.Part) int { return a.Start - b.Start }) ||
		len(c.After.Instances) != len(had) {
		t.Errorf("got %+v", c.After.Instances)
	}
}

// TestUnreadGPU: nothing is said of the instances of a GPU that could not be read. Its mode alone
// can be given back.
func TestUnreadGPU(t *testing.T) {
	t.Parallel()
	g := gpu(h100, "3g.40gb@4")
	g.Unread = "no permission"
	if c := layout.Restore(g, inventory.MIGEnabled, nil); c.Reason != "no permission" || len(c.Steps) > 0 {
		t.Errorf("got %q, %v", c.Reason, show(c))
	}
	if c := layout.Restore(g, inventory.MIGDisabled, nil); c.Reason != "" ||
		!slices.Equal(show(c), []string{"disable-mig"}) {
		t.Errorf("got %q, %v", c.Reason, show(c))
	}
	g.Unread = ""
	if c := layout.Restore(g, inventory.MIGEnabled, g.Instances); c.Reason != "" || len(c.Steps) > 0 {
		t.Errorf("one that was read: %q, %v", c.Reason, show(c))
	}
}

// TestSlicesOfAnUnknownModel: a GPU has at least the memory slices that its instances have, and
// none are known without instances.
func TestSlicesOfAnUnknownModel(t *testing.T) {
	t.Parallel()
	g := gpu(0x999910de)
	if got := layout.Plan(layout.Layout{}, []layout.GPU{g}).GPUs[0].Before.Slices; got != 0 {
		t.Errorf("%d slices without profiles and instances", got)
	}
	g.Instances = []inventory.GPUInstance{{ID: 1, Profile: "3g.40gb", Start: 4, Size: 4},
		{ID: 2, Profile: "2g.20gb", Size: 2}}
	if got := layout.Plan(layout.Layout{}, []layout.GPU{g}).GPUs[0].Before.Slices; got != 8 {
		t.Errorf("%d slices with an instance on the slices 4 to 7", got)
	}
}
