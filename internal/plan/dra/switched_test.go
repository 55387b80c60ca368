package dra_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// TestSwitched: a GPU whose MIG mode claims switch is published as a whole and in parts, which
// exclude each other. What the mode changes of its links and its memory changes no slice. Without
// counters it is published as a whole.
func TestSwitched(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"dgx-h100", "h100-nvl-x4", "dgx-b200"} {
		divisible := newDivisible(t, name)
		s, divisions := scan(t, name), dra.Divisions{}
		for _, g := range s.GPUs {
			divisions[g.UUID] = dra.Divided{Profiles: divisible.profiles, Switched: true}
		}
		off := dra.Steady(s, inventory.Snapshot{}, divisions)
		pool := dividedPool(off, divisions)
		if problems := refusedBy(pool); len(problems) > 0 {
			t.Errorf("%s: %v", name, problems)
		}
		var whole, parts []dra.Device
		for _, slice := range pool.Slices {
			for _, d := range slice.Devices {
				if d.Partition == nil {
					whole = append(whole, d)
				} else if parts = append(parts, d); !d.Partition.Switched {
					t.Errorf("%s: MIG mode is not switched on for %s", name, d.Name)
				}
			}
		}
		if len(whole) != len(s.GPUs) || !whole[0].Switched || len(parts) == 0 {
			t.Fatalf("%s: %d GPUs and %d parts", name, len(whole), len(parts))
		}
		for _, d := range parts {
			i := slices.IndexFunc(whole, func(w dra.Device) bool { return w.GPU() == d.GPU() })
			first, then := counters(pool), counters(pool)
			if !take(first, d) || take(first, whole[i]) || !take(then, whole[i]) || take(then, d) {
				t.Errorf("%s: %s and %s can be had at the same time, or neither", name, d.Name, whole[i].Name)
			}
		}

		on := s
		on.GPUs = slices.Clone(s.GPUs)
		for i := range on.GPUs {
			g := &on.GPUs[i]
			if g.Links = slices.Clone(g.Links); i == 1 {
				g.MIG, g.MemoryBytes, g.Clique = inventory.MIGEnabled, g.MemoryBytes-1, "other"
			}
			for j := range g.Links {
				if i == 1 || g.Links[j].Peer == on.GPUs[1].UUID {
					g.Links[j].NVLinks, g.Links[j].Switched = 0, false
				}
			}
		}
		if steady := dividedPool(dra.Steady(on, off, divisions), divisions); !steady.Equal(pool) {
			t.Errorf("%s: the mode changes slices (-off +on):\n%s", name, cmp.Diff(pool, steady))
		}
		if flaps := dividedPool(on, divisions); flaps.Equal(pool) {
			t.Errorf("%s: the test changes nothing", name)
		}
		for _, slice := range pool.Unpartitioned().Slices {
			for _, d := range slice.Devices {
				if slice.Counted() || d.Partition != nil || d.Attributes["type"].Value != "gpu" {
					t.Errorf("%s: %s is published without counters", name, d.Name)
				}
			}
		}
	}
}

// TestNotSwitched: a GPU of which nothing can be made is published as it is, with the reason.
func TestNotSwitched(t *testing.T) {
	t.Parallel()
	s := scan(t, "h100-nvl-x4")
	for want, division := range map[string]dra.Divided{
		"no MIG devices are created for claims: a reset":      {Fixed: "a reset"},
		"the driver does not report its possible MIG devices": {Switched: true},
		"no MIG devices are created for claims: another program has one": {Switched: true,
			Fixed: "another program has one"},
	} {
		pool := dividedPool(s, dra.Divisions{s.GPUs[0].UUID: division})
		if left := strings.Join(pool.LeftOut, "\n"); !strings.Contains(left, want) || len(pool.LeftOut) != 1 {
			t.Errorf("left out: %q, want %q", left, want)
		}
		found := 0
		for _, slice := range pool.Slices {
			found += len(slice.Devices)
			if slice.Counted() {
				t.Errorf("%s: there are counters", want)
			}
		}
		if found != len(s.GPUs) {
			t.Errorf("%s: %d devices", want, found)
		}
	}
}
