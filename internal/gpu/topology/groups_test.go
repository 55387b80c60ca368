package topology_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
)

// groupText writes groups as "8: {0 1} 4: …".
func groupText(groups topology.Groups) string {
	var parts []string
	for _, size := range topology.GroupSizes {
		for _, set := range groups.Sets[size] {
			parts = append(parts, set.String())
		}
		parts = append(parts, "/")
	}
	return strings.Join(parts, " ")
}

// TestGroups names the groups of machines whose wiring is known.
func TestGroups(t *testing.T) {
	t.Parallel()
	unread := func(int, int) inventory.Link { return inventory.Link{} }
	for _, test := range []struct {
		name string
		gpus []inventory.GPU
		want string
	}{
		// Pairs with two lanes, 0-3 and 1-2, are worth more together than the best pair, 2-3, and the
		// worst.
		{"dgx-1", scan(t, "dgx-1").gpus, "{0 1 2 3 4 5 6 7} / {0 1 2 3} {4 5 6 7} / {0 3} {1 2} {4 7} {5 6} /"},
		{"dgx-h100", scan(t, "dgx-h100").gpus, "{0 1 2 3 4 5 6 7} / {0 1 2 3} {4 5 6 7} / {0 1} {2 3} {4 5} {6 7} /"},
		{"t4", scan(t, "t4").gpus, "/ / /"},
		{"seven", pcieOnly(7, 2), "/ {0 1 2 3} / {0 1} {2 3} {4 5} /"},
		{"nothing is known", build(4, unread), "/ / /"},
		{"none", nil, "/ / /"},
		{"two boards", boards(16),
			"{0 1 2 3 4 5 6 7} {8 9 10 11 12 13 14 15} / {0 1 2 3} {4 5 6 7} {8 9 10 11} {12 13 14 15} / " +
				"{0 1} {2 3} {4 5} {6 7} {8 9} {10 11} {12 13} {14 15} /"},
	} {
		if got := groupText(topology.New(test.gpus).Groups()); got != test.want {
			t.Errorf("%s: got %s, want %s", test.name, got, test.want)
		}
	}
}

// TestGroupsAreWhole holds on many graphs that groups are disjoint, nested, neighbours in the
// order, and of two halves the best ones.
func TestGroupsAreWhole(t *testing.T) {
	t.Parallel()
	for n := range 20 {
		for seed := range uint64(10) {
			g := topology.New(random(n, seed))
			groups := g.Groups()
			name := fmt.Sprintf("%d GPUs, seed %d: %s", n, seed, groupText(groups))
			if len(groups.Order) != n || topology.SetOf(groups.Order...) != g.Everything() {
				t.Fatalf("%s: order %v", name, groups.Order)
			}
			outer := []topology.GPUSet{g.Everything()}
			for _, size := range topology.GroupSizes {
				var all topology.GPUSet
				for _, set := range groups.Sets[size] {
					first := slices.IndexFunc(groups.Order, set.Has)
					if set.Len() != size || topology.SetOf(groups.Order[first:first+size]...) != set {
						t.Fatalf("%s: the group %v in the order %v", name, set, groups.Order)
					}
					inOne := slices.ContainsFunc(outer, func(o topology.GPUSet) bool { return set&^o == 0 })
					inNone := !slices.ContainsFunc(outer, func(o topology.GPUSet) bool { return set&o != 0 })
					if set&all != 0 || !inOne && !inNone {
						t.Fatalf("%s: the group %v overlaps another", name, set)
					}
					all |= set
				}
				outer = groups.Sets[size]
			}
			for _, four := range groups.Sets[4] {
				p := slices.Collect(four.All())
				best := max(g.Score(p[0], p[1])+g.Score(p[2], p[3]), g.Score(p[0], p[2])+g.Score(p[1], p[3]),
					g.Score(p[0], p[3])+g.Score(p[1], p[2]))
				got := 0
				for _, pair := range groups.Sets[2] {
					if pair&four == pair {
						q := slices.Collect(pair.All())
						got += g.Score(q[0], q[1])
					}
				}
				if got != best {
					t.Errorf("%s: the pairs in %v have the score %d, and %d is possible", name, four, got, best)
				}
			}
		}
	}
}

func TestNVLinkDomains(t *testing.T) {
	t.Parallel()
	chain := build(6, func(a, b int) inventory.Link {
		l := inventory.Link{PCIe: inventory.PCIeSystem}
		if b == a+2 && a < 2 { // 0-2 and 1-3
			l.NVLinks, l.NVLinkVersion = 4, 3
		}
		return l
	})
	for _, test := range []struct {
		name string
		gpus []inventory.GPU
		want string
	}{
		{"dgx-1", scan(t, "dgx-1").gpus, "[{0 1 2 3 4 5 6 7}]"},
		{"bridges", chain, "[{0 2} {1 3}]"},
		{"l40s-x8", scan(t, "l40s-x8").gpus, "[]"},
	} {
		if got := fmt.Sprint(topology.New(test.gpus).NVLinkDomains()); got != test.want {
			t.Errorf("%s: got %s, want %s", test.name, got, test.want)
		}
	}
}
