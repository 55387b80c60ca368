package topology_test

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
)

// machine is a named set of GPUs to test on.
type machine struct {
	name string
	gpus []inventory.GPU
}

// build returns n GPUs, 16 at most under one socket each half, with the link that `link` gives for
// each pair a < b; a link without PCIe path leaves the pair unconnected.
func build(n int, link func(a, b int) inventory.Link) []inventory.GPU {
	gpus := make([]inventory.GPU, n)
	for i := range gpus {
		gpus[i] = inventory.GPU{
			UUID: fmt.Sprintf("GPU-%02d", i), Index: i, BDF: fmt.Sprintf("0000:%02x:00.0", i), NUMANode: 2 * i / n,
			Health: inventory.Health{State: inventory.Healthy},
		}
	}
	for a := range gpus {
		for b := range gpus {
			if a == b {
				continue
			}
			l := link(min(a, b), max(a, b))
			if l.PCIe == inventory.PCIeUnknown {
				continue
			}
			l.Peer, l.PeerIndex = gpus[b].UUID, b
			gpus[a].Links = append(gpus[a].Links, l)
		}
	}
	return gpus
}

// pcie is the path between two GPUs of n on two sockets with `perSwitch` GPUs under each PCIe
// switch.
func pcie(n, perSwitch int) func(a, b int) inventory.PCIePath {
	return func(a, b int) inventory.PCIePath {
		switch {
		case a/perSwitch == b/perSwitch:
			return inventory.PCIeSingle
		case 2*a/n == 2*b/n:
			return inventory.PCIeHostBridge
		}
		return inventory.PCIeSystem
	}
}

func pcieOnly(n, perSwitch int) []inventory.GPU {
	path := pcie(n, perSwitch)
	return build(n, func(a, b int) inventory.Link { return inventory.Link{PCIe: path(a, b)} })
}

// cubeMesh are the lanes of a DGX-1 with V100.
var cubeMesh = map[[2]int]int{
	{0, 1}: 1, {0, 2}: 1, {0, 3}: 2, {0, 4}: 2, {1, 2}: 2, {1, 3}: 1, {1, 5}: 2, {2, 3}: 2,
	{2, 6}: 1, {3, 7}: 1, {4, 5}: 1, {4, 6}: 1, {4, 7}: 2, {5, 6}: 2, {5, 7}: 1, {6, 7}: 2,
}

func dgx1() []inventory.GPU {
	path := pcie(8, 2)
	return build(8, func(a, b int) inventory.Link {
		return inventory.Link{NVLinks: cubeMesh[[2]int{a, b}], NVLinkVersion: 2, PCIe: path(a, b)}
	})
}

func dgx1LinkDown() []inventory.GPU {
	path := pcie(8, 2)
	return build(8, func(a, b int) inventory.Link {
		lanes := cubeMesh[[2]int{a, b}]
		if a == 0 && b == 3 {
			lanes = 0
		}
		return inventory.Link{NVLinks: lanes, NVLinkVersion: 2, PCIe: path(a, b)}
	})
}

// dgx1Lost is a DGX-1 whose GPU 3 answers nothing; the others cannot read their links to it either.
func dgx1Lost() []inventory.GPU {
	path := pcie(8, 2)
	gpus := build(8, func(a, b int) inventory.Link {
		if a == 3 || b == 3 {
			return inventory.Link{}
		}
		return inventory.Link{NVLinks: cubeMesh[[2]int{a, b}], NVLinkVersion: 2, PCIe: path(a, b)}
	})
	gpus[3].Health.State = inventory.Lost
	return gpus
}

func bridges(n int) []inventory.GPU {
	path := pcie(n, 2)
	return build(n, func(a, b int) inventory.Link {
		l := inventory.Link{PCIe: path(a, b)}
		if a/2 == b/2 {
			l.NVLinks, l.NVLinkVersion = 4, 3
		}
		return l
	})
}

// uniform has every pair on one NVSwitch fabric and at one PCIe distance.
func uniform(n int) []inventory.GPU {
	return build(n, func(int, int) inventory.Link {
		return inventory.Link{NVLinks: 18, NVLinkVersion: 4, Switched: true, PCIe: inventory.PCIeNUMANode}
	})
}

// switched has every pair on one NVSwitch fabric, and a PCIe tree with two sockets.
func switched(n, lanes, version int) []inventory.GPU {
	path := pcie(n, 2)
	return build(n, func(a, b int) inventory.Link {
		return inventory.Link{NVLinks: lanes, NVLinkVersion: version, Switched: true, PCIe: path(a, b)}
	})
}

// boards has n/8 boards of 8 GPUs with a fabric each, and PCIe between them.
func boards(n int) []inventory.GPU {
	path := pcie(n, 2)
	return build(n, func(a, b int) inventory.Link {
		l := inventory.Link{PCIe: path(a, b)}
		if a/8 == b/8 {
			l.NVLinks, l.NVLinkVersion, l.Switched = 6, 2, true
		}
		return l
	})
}

// cubes has n/8 cube meshes, and PCIe between them.
func cubes(n int) []inventory.GPU {
	path := pcie(n, 2)
	return build(n, func(a, b int) inventory.Link {
		l := inventory.Link{PCIe: path(a, b)}
		if a/8 == b/8 {
			l.NVLinks, l.NVLinkVersion = cubeMesh[[2]int{a % 8, b % 8}], 2
		}
		return l
	})
}

// random has lanes and paths drawn for each pair.
func random(n int, seed uint64) []inventory.GPU {
	return build(n, func(a, b int) inventory.Link {
		// Drawn by pair and not in order of calls: build asks for each pair from both ends.
		r := rand.New(rand.NewPCG(seed, uint64(a*64+b)))
		return inventory.Link{
			NVLinks: max(0, r.IntN(9)-3), NVLinkVersion: 3,
			PCIe: inventory.PCIeSingle + inventory.PCIePath(r.IntN(5)),
		}
	})
}

// machines8 and machines16 are the machines of up to 8 and of 16 GPUs.
func machines8() []machine {
	return []machine{
		{"dgx-1", dgx1()},
		{"dgx-1, one GPU lost", dgx1Lost()},
		{"dgx-1, one link down", dgx1LinkDown()},
		{"pcie-8", pcieOnly(8, 2)},
		{"bridges-8", bridges(8)},
		{"dgx-h100", switched(8, 18, 4)},
		{"uniform-8", uniform(8)},
		{"random-8a", random(8, 1)},
		{"random-8b", random(8, 2)},
		{"random-8c", random(8, 3)},
		{"one GPU", uniform(1)},
		{"two GPUs", bridges(2)},
		{"no links", build(4, func(int, int) inventory.Link { return inventory.Link{} })},
	}
}

func machines16() []machine {
	return []machine{
		{"pcie-16", pcieOnly(16, 4)},
		{"dgx-2", switched(16, 6, 2)},
		{"two boards", boards(16)},
		{"two cubes", cubes(16)},
		{"uniform-16", uniform(16)},
		{"random-16a", random(16, 1)},
		{"random-16b", random(16, 2)},
		{"random-16c", random(16, 3)},
	}
}

func machines32() []machine {
	return []machine{
		{"pcie-32", pcieOnly(32, 4)},
		{"bridges-32", bridges(32)},
		{"four boards", boards(32)},
		{"four cubes", cubes(32)},
		{"uniform-32", uniform(32)},
		{"random-32a", random(32, 1)},
		{"random-32b", random(32, 2)},
	}
}

// bruteForce returns the best set of a request by looking at every one.
func bruteForce(g *topology.Graph, r topology.Request) topology.Choice {
	best := topology.Choice{Score: -1}
	everySet(g, r, func(c topology.Choice) {
		if c.Score > best.Score || c.Score == best.Score && c.Cost < best.Cost {
			best = c
		}
	})
	return best
}

// everySet hands on every possible set of a request, judged, in lexicographic order.
func everySet(g *topology.Graph, r topology.Request, visit func(topology.Choice)) {
	available := r.Available | r.Required
	positions := slices.Collect((available &^ r.Required).All())
	var walk func(set topology.GPUSet, from, wanted int)
	walk = func(set topology.GPUSet, from, wanted int) {
		if wanted == 0 {
			score, cost := judge(g, set, available, r.Busy&^available)
			visit(topology.Choice{Set: set, Score: score, Cost: cost, Exact: true, Bound: score})
			return
		}
		for i := from; i <= len(positions)-wanted; i++ {
			walk(set|topology.SetOf(positions[i]), i+1, wanted-1)
		}
	}
	walk(r.Required, 0, max(0, r.Size-r.Required.Len()))
}

// judge returns score and cost of a set by their definition. It goes by values alone, and is called
// so often that the race detector, which finds nothing in it, would take most of the tests' time.
//
//go:norace
func judge(g *topology.Graph, set, free, busy topology.GPUSet) (score, cost int64) {
	for a := range g.Len() {
		if !set.Has(a) {
			continue
		}
		for b := range g.Len() {
			switch {
			case set.Has(b):
				if a < b {
					score += int64(g.Score(a, b))
				}
			case free.Has(b):
				cost += 8 * int64(g.Score(a, b))
			case busy.Has(b):
				cost += int64(g.Score(a, b))
			}
		}
	}
	return score, cost
}
