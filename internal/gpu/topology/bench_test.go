package topology_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
)

// BenchmarkChoose times the choice on each machine at the size that takes longest, all GPUs
// available.
func BenchmarkChoose(b *testing.B) {
	for _, m := range slices.Concat(machines8(), machines16(), machines32(), []machine{{"random-64", random(64, 1)}}) {
		g := topology.New(m.gpus)
		for _, size := range sizes(g.Len()) {
			b.Run(fmt.Sprintf("%s/size=%d", m.name, size), func(b *testing.B) {
				b.ReportAllocs()
				exact := true
				for b.Loop() {
					c, _ := g.Choose(topology.Request{Available: g.Everything(), Size: size})
					exact = c.Exact
				}
				b.ReportMetric(map[bool]float64{true: 1}[exact], "exact")
			})
		}
	}
}

// sizes are 1, 2 and 3, quarters of n, and n.
func sizes(n int) []int {
	s := []int{1, min(2, n), min(3, n), (n + 3) / 4, (n + 1) / 2, (3*n + 3) / 4, n}
	slices.Sort(s)
	return slices.Compact(s)
}

// BenchmarkPrefer times the answer by IDs for each kind of resource.
func BenchmarkPrefer(b *testing.B) {
	mesh, two := dgx1(), switched(16, 6, 2)
	cases := []struct {
		name    string
		graph   *topology.Graph
		devices []topology.Device
		size    int
	}{
		{"8 GPUs", topology.New(mesh), whole(mesh), 4},
		{"16 GPUs", topology.New(two), whole(two), 8},
		{"8 × 1000 replicas", topology.New(mesh), replicas(mesh, 1000), 8},
		{"8 × 7 MIG devices", topology.New(mesh), partitions(mesh, 7, 1), 4},
	}
	for _, c := range cases {
		for _, policy := range []topology.Policy{topology.Distributed, topology.Packed, topology.Distinct} {
			b.Run(fmt.Sprintf("%s, %d wanted, %v", c.name, c.size, policy), func(b *testing.B) {
				p := topology.NewPreference(c.graph, c.devices, policy)
				available := ids(c.devices)
				b.ReportAllocs()
				for b.Loop() {
					if got, err := p.Prefer(available, nil, c.size); err != nil || len(got) != c.size {
						b.Fatal(got, err)
					}
				}
			})
		}
	}
}

// BenchmarkNew times the building of a graph, which happens once for each change of the node.
func BenchmarkNew(b *testing.B) {
	for _, m := range []machine{{"8", dgx1()}, {"16", switched(16, 6, 2)}, {"64", random(64, 1)}} {
		b.Run(m.name, func(b *testing.B) {
			for b.Loop() {
				topology.New(m.gpus)
			}
		})
	}
}
