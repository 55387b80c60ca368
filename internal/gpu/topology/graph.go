package topology

import (
	"cmp"
	"slices"
	"strings"
	"sync"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// A Graph has the connections between the GPUs of a node. It is immutable, and safe for concurrent
// use.
type Graph struct {
	nodes []node
	// at holds the position of each GPU by UUID.
	at map[string]int
	// links and scores have a row of len(nodes) for each GPU; they are symmetric, with zeros on the
	// diagonal.
	links  []inventory.Link
	scores []int32
	// scratch has *search values for reuse: their size is fixed for a Graph.
	scratch sync.Pool
}

// node is a GPU of a Graph.
type node struct {
	uuid     string
	index    int
	bdf      string
	model    string
	numaNode int
}

// New builds the graph of the given GPUs. Positions follow PCI order: ascending Index, then BDF,
// then UUID. Of GPUs with the same UUID the first counts, and GPUs beyond MaxGPUs are left out. A
// GPU with unreadable links has only the links that other GPUs report.
func New(gpus []inventory.GPU) *Graph {
	sorted := slices.Clone(gpus)
	order.Sort(sorted, func(a, b inventory.GPU) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), strings.Compare(a.BDF, b.BDF), strings.Compare(a.UUID, b.UUID))
	})
	g := &Graph{at: make(map[string]int, len(sorted))}
	var links [][]inventory.Link
	for _, gpu := range sorted {
		if _, known := g.at[gpu.UUID]; known || len(g.nodes) == MaxGPUs {
			continue
		}
		g.at[gpu.UUID] = len(g.nodes)
		g.nodes = append(g.nodes, node{gpu.UUID, gpu.Index, gpu.BDF, gpu.Model, gpu.NUMANode})
		links = append(links, gpu.Links)
	}
	g.connect(links)
	g.scratch.New = func() any { return newSearch(g) }
	return g
}

// connect fills in links and scores from the reports of all GPUs about their peers.
func (g *Graph) connect(reported [][]inventory.Link) {
	n := len(g.nodes)
	g.links = make([]inventory.Link, n*n)
	g.scores = make([]int32, n*n)
	known := make([]bool, n*n)
	for a, links := range reported {
		for _, link := range links {
			b, ok := g.at[link.Peer]
			if !ok || a == b {
				continue
			}
			g.links[a*n+b] = merge(g.links[a*n+b], link)
			known[a*n+b] = true
		}
	}
	for a := range n {
		for b := range a {
			if !known[a*n+b] && !known[b*n+a] {
				continue
			}
			link := nearest(merge(g.links[a*n+b], g.links[b*n+a]), g.nodes[a].numaNode, g.nodes[b].numaNode)
			g.setLink(a, b, link)
			g.setLink(b, a, link)
		}
	}
}

func (g *Graph) setLink(from, to int, link inventory.Link) {
	g.links[from*len(g.nodes)+to] = link
	g.scores[from*len(g.nodes)+to] = pairScore(link)
}

// Len returns the number of GPUs.
func (g *Graph) Len() int { return len(g.nodes) }

// Position returns the position of the GPU with the given UUID.
func (g *Graph) Position(uuid string) (int, bool) {
	p, ok := g.at[uuid]
	return p, ok
}

// Everything returns the set of all GPUs.
func (g *Graph) Everything() GPUSet { return GPUSet(1)<<len(g.nodes) - 1 }

// Score returns the points of the connection of the GPUs at two positions, 0 for an unknown one.
func (g *Graph) Score(a, b int) int { return int(g.scores[a*len(g.nodes)+b]) }

// Equal reports whether two graphs have the same GPUs with the same connections. An equal Graph
// need not replace the one in use.
func (g *Graph) Equal(other *Graph) bool {
	return slices.Equal(g.nodes, other.nodes) && slices.Equal(g.links, other.links)
}

// within returns the sum of the scores of the pairs inside a set.
func (g *Graph) within(s GPUSet) int64 {
	var sum int64
	for a := range s.All() {
		sum += g.between(a, s)
	}
	return sum / 2
}

// between returns the sum of the scores from one GPU to the GPUs of a set.
func (g *Graph) between(from int, to GPUSet) int64 {
	row := g.scores[from*len(g.nodes) : (from+1)*len(g.nodes)]
	var sum int64
	for ; to != 0; to &= to - 1 {
		sum += int64(row[to.first()])
	}
	return sum
}
