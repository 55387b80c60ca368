package topology_test

import (
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/equality"
)

// TestEqualGraphs: a graph differs from another by whatever of the GPUs it is made of.
func TestEqualGraphs(t *testing.T) {
	t.Parallel()
	type end struct {
		UUID, BDF, Model string
		Index, NUMANode  int
	}
	type pair struct {
		Ends      []end
		NVLinks   int
		Version   int
		Switched  bool
		PCIe      inventory.PCIePath
		Connected bool
	}
	graph := func(p pair) *topology.Graph {
		var gpus []inventory.GPU
		for i, e := range p.Ends {
			g := inventory.GPU{UUID: e.UUID, BDF: e.BDF, Model: e.Model, Index: e.Index, NUMANode: e.NUMANode}
			if peer := 1 - i; p.Connected && peer < len(p.Ends) {
				g.Links = []inventory.Link{{
					Peer: p.Ends[peer].UUID, PeerIndex: p.Ends[peer].Index, NVLinks: p.NVLinks,
					NVLinkVersion: p.Version,
					Switched:      p.Switched, PCIe: p.PCIe,
				}}
			}
			gpus = append(gpus, g)
		}
		return topology.New(gpus)
	}
	equality.Check(t, func() pair {
		return pair{Ends: []end{{UUID: "a", Index: 3}, {UUID: "b", Index: 7}}, NVLinks: 2, Version: 4,
			PCIe: inventory.PCIeMultiple, Connected: true}
	}, func(a, b pair) bool { return graph(a).Equal(graph(b)) })
}

func TestSetsInWords(t *testing.T) {
	t.Parallel()
	for want, set := range map[string]topology.GPUSet{
		"{}": 0, "{0}": topology.SetOf(0), "{63}": topology.SetOf(63), "{0 1 4}": topology.SetOf(4, 0, 1),
	} {
		if got := set.String(); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}
