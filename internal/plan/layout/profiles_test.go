package layout_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

// TestClash: which instances need the same media engines, in either order.
func TestClash(t *testing.T) {
	t.Parallel()
	profiles := []string{"1g.24gb", "1g.24gb-me", "1g.24gb+gfx", "1g.24gb+me", "1g.24gb+me.all"}
	for i, row := range []string{"....x", ".....", "....x", "...xx", "x.xxx"} {
		got := ""
		for _, other := range profiles {
			devices := map[string]int{profiles[i]: 1}
			devices[other]++
			got += map[bool]string{true: ".", false: "x"}[layout.Plan(onAllGPUs(devices),
				[]layout.GPU{gpu(rtx)}).Possible()]
		}
		if got != row {
			t.Errorf("%s beside %v: %s, want %s", profiles[i], profiles, got, row)
		}
	}
}

// TestProfilesThatCannotBe: what a driver tells of them is left out, and the others stay.
func TestProfilesThatCannotBe(t *testing.T) {
	t.Parallel()
	good := inventory.MIGProfile{Name: "1g.10gb", Size: 1, Count: 7, Starts: []int{0, maxSlices - 1}}
	but := func(change func(*inventory.MIGProfile)) inventory.MIGProfile {
		p := good
		p.Name = "2g.20gb"
		change(&p)
		return p
	}
	g := layout.GPU{Partitions: inventory.Partitions{Profiles: []inventory.MIGProfile{
		good, good,
		but(func(p *inventory.MIGProfile) { p.Name = "1c.2g.20gb" }),
		but(func(p *inventory.MIGProfile) { p.Name = "large" }),
		but(func(p *inventory.MIGProfile) { p.Size = 0 }),
		but(func(p *inventory.MIGProfile) { p.Count = 0 }),
		but(func(p *inventory.MIGProfile) { p.Starts = []int{0, -1} }),
		but(func(p *inventory.MIGProfile) { p.Starts = []int{maxSlices} }),
		but(func(p *inventory.MIGProfile) { p.Name = "3g.40gb" }),
	}}}
	g.Mode = inventory.MIGEnabled
	if diff := cmp.Diff([]string{"all-1g.10gb", "all-3g.40gb", layout.AllDisabled, layout.AllEnabled},
		layout.Builtin([]layout.GPU{g}).Names()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
