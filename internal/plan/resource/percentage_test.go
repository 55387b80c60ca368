package resource_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const coresName = "volcano.sh/gpu-core.percentage"

// Percentages are tokens of the node: 100 for each GPU in units, without a NUMA node, a container
// gets a multiple of five.
func TestPercentages(t *testing.T) {
	t.Parallel()
	node := inventory.Snapshot{GPUs: []inventory.GPU{memory(0, 8), memory(1, 8), memory(2, 8)}}
	o := inUnits(resource.Units{Percentage: coresName, MPS: true}, "0", "1")
	o.Sharing.OnePerRequest = true
	plan := resource.New(node, o)
	r, there := plan.Resource(coresName)
	if !there || len(r.Devices) != 200 || r.Devices[199].ID != "percentage::199" {
		t.Fatalf("%d tokens, want 200: %v", len(r.Devices), r.Devices[len(r.Devices)-1])
	}
	for _, d := range r.Devices {
		if d.NUMANode != inventory.NoNUMANode || !d.Healthy || d.MPSDaemon() != "" {
			t.Fatalf("token %+v", d)
		}
	}
	for tokens, want := range map[int]bool{5: true, 100: true, 35: true, 7: false, 105: false, 1: false} {
		if err := r.Admit(slices.Repeat(r.Devices[:1], tokens)); (err == nil) != want ||
			err != nil && !strings.Contains(err.Error(), "multiple of 5 up to 100") {
			t.Errorf("%d tokens: %v", tokens, err)
		}
	}
	if got, err := r.Prefer([]string{"percentage::3", "percentage::7", "percentage::9"}, nil, 2); err != nil ||
		len(got) != 2 {
		t.Errorf("2 of 3 tokens: %q, %v", got, err)
	}
	if !resource.MayBeOurs(coresName, "percentage::7") || resource.MayBeOurs(coresName, "token-7") ||
		resource.MayBeOurs("x.io/a", "percentage::7") {
		t.Error("a token is not told from other devices")
	}
	undecided := plan.UnderGPUs(map[string]resource.GPUHold{})
	if r, there := undecided.Resource(coresName); !there || len(r.Devices) != 200 {
		t.Error("tokens are held back with GPUs")
	}
	if _, there := resource.New(node, inUnits(resource.Units{MPS: true}, "0")).Resource(coresName); there {
		t.Error("tokens although there are to be none")
	}
	if _, there := resource.New(node, resource.Options{Units: o.Units}).Resource(coresName); there {
		t.Error("tokens without a GPU in units")
	}
	if name, err := resource.PercentageName("volcano.sh/gpu-core"); name != coresName || err != nil {
		t.Errorf("PercentageName() = %q, %v", name, err)
	}
	if _, err := resource.PercentageName("gpu-core"); err == nil {
		t.Error("a name without a domain")
	}
}

// A name does not make GPUs percentages: a configuration may have named a resource so before there
// were any.
func TestGPUsNamedLikePercentages(t *testing.T) {
	t.Parallel()
	node := inventory.Snapshot{GPUs: []inventory.GPU{memory(0, 8), memory(1, 8)}}
	rename := resource.Selector{Where: "x", Devices: []resource.Ref{"0", "1"}, Rename: "nvidia.com/gpu.percentage"}
	r, there := resource.New(node, resource.Options{Selectors: []resource.Selector{rename}}).Resource(rename.Rename)
	if !there || len(r.Devices) != 2 {
		t.Fatalf("%d GPUs, want 2", len(r.Devices))
	}
	if err := r.Admit(r.Devices[:1]); err != nil {
		t.Errorf("one GPU is refused: %v", err)
	}
	// They keep the name where there are units, too.
	rename.Devices = rename.Devices[1:]
	o := inUnits(resource.Units{Percentage: rename.Rename, MPS: true}, "0")
	o.Selectors = append(o.Selectors, rename)
	plan := resource.New(node, o)
	if r, there := plan.Resource(rename.Rename); !there || len(r.Devices) != 1 || r.Devices[0].Index != "1" {
		t.Errorf("%d devices have the name, want the GPU", len(r.Devices))
	}
	if !slices.ContainsFunc(plan.Warnings, func(w string) bool { return strings.Contains(w, "set units.percentage to another name") }) {
		t.Errorf("no warning that there are no percentages: %q", plan.Warnings)
	}
}
