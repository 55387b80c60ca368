package dra

import (
	"fmt"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
)

// Domain is the domain of attributes beyond NVIDIA's driver.
const Domain = "gpu-device-plugin.github.io"

// links are the connections between the GPUs of a node that are allocated whole.
type links struct {
	graph  *topology.Graph
	places map[int]int               // by position: place in the order of groups
	first  map[string]map[int]string // by attribute and position: the device that names the group
}

func newLinks(gpus []inventory.GPU, numbers Numbers, divisions Divisions) links {
	var whole []inventory.GPU
	for _, g := range gpus {
		if divisions.whole(g) {
			whole = append(whole, g)
		}
	}
	l := links{graph: topology.New(whole), places: map[int]int{}, first: map[string]map[int]string{}}
	called := map[int]int{}
	for _, g := range whole {
		if p, ok := l.graph.Position(g.UUID); ok {
			called[p] = numbers[g.UUID]
		}
	}
	add := func(attribute string, sets []topology.GPUSet) {
		l.first[attribute] = map[int]string{}
		for _, set := range sets {
			lowest := maxNumber
			for p := range set.All() {
				lowest = min(lowest, called[p])
			}
			for p := range set.All() {
				l.first[attribute][p] = fmt.Sprintf("gpu-%d", lowest)
			}
		}
	}
	groups := l.graph.Groups()
	for place, position := range groups.Order {
		l.places[position] = place
	}
	for _, size := range topology.GroupSizes {
		add(fmt.Sprintf("%s/linkGroup%d", Domain, size), groups.Sets[size])
	}
	add(Domain+"/nvlinkDomain", l.graph.NVLinkDomains())
	return l
}

// place returns the position of a GPU in an order in which well connected GPUs are neighbours.
// Partitioned GPUs come last.
func (l links) place(g inventory.GPU) int {
	if p, ok := l.graph.Position(g.UUID); ok {
		return l.places[p]
	}
	return topology.MaxGPUs
}

// describe gives a device the attributes of its GPU's links.
func (l links) describe(g inventory.GPU, d Device) {
	if p, ok := l.graph.Position(g.UUID); ok {
		for attribute, first := range l.first {
			d.text(attribute, first[p])
		}
	}
	d.text(Domain+"/fabricClique", g.Clique)
}
