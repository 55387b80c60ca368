package topology

import (
	"math/bits"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// GroupSizes are the sizes of groups, descending.
var GroupSizes = [...]int{8, 4, 2}

// Groups is a division of the GPUs of a Graph into well connected groups. Groups of the same size
// are disjoint, and each lies inside one group of the next larger size or outside all of them.
type Groups struct {
	// Sets are the groups by size.
	Sets map[int][]GPUSet
	// Order are all positions. The positions of a group are consecutive.
	Order []int
}

// Groups divides all GPUs, free or busy, into groups of each of GroupSizes. A set of twice the size
// is divided into the two halves with the highest score together. From any other set, Groups
// repeatedly removes the best group as found by Choose; remaining GPUs fewer than the size are in
// no group of that size. GPUs with unknown connections to each other are in no group together.
func (g *Graph) Groups() Groups {
	groups := Groups{Sets: map[int][]GPUSet{}}
	g.group(g.Everything(), GroupSizes[:], &groups)
	return groups
}

// group adds the groups of some sizes in a set, and the order of the set.
func (g *Graph) group(set GPUSet, sizes []int, groups *Groups) {
	if len(sizes) == 0 {
		for p := range set.All() {
			groups.Order = append(groups.Order, p)
		}
		return
	}
	size, rest := sizes[0], set
	for rest.Len() >= size {
		part := g.take(rest, size)
		if g.isKnown(part) {
			groups.Sets[size] = append(groups.Sets[size], part)
		}
		g.group(part, sizes[1:], groups)
		rest &^= part
	}
	g.group(rest, sizes[1:], groups)
}

// take returns the first group of a set.
func (g *Graph) take(set GPUSet, size int) GPUSet {
	if set.Len() == 2*size {
		return g.half(set)
	}
	choice, _ := g.Choose(Request{Available: set, Size: size})
	return choice.Set
}

// half returns the half of a set, including its first GPU, with the highest score of both halves
// together.
func (g *Graph) half(set GPUSet) GPUSet {
	positions := make([]int, 0, MaxGPUs)
	for p := range set.All() {
		positions = append(positions, p)
	}
	best, most := set, int64(never)
	for mask := uint64(1); mask < 1<<len(positions); mask += 2 {
		if bits.OnesCount64(mask) != len(positions)/2 {
			continue
		}
		var a GPUSet
		for rest := mask; rest != 0; rest &= rest - 1 {
			a |= 1 << positions[bits.TrailingZeros64(rest)]
		}
		if score := g.within(a) + g.within(set&^a); score > most {
			best, most = a, score
		}
	}
	return best
}

// isKnown reports whether the connections between all GPUs of a set are known.
func (g *Graph) isKnown(set GPUSet) bool {
	for a := range set.All() {
		for b := range set.All() {
			if a < b && g.Score(a, b) == 0 {
				return false
			}
		}
	}
	return true
}

// NVLinkDomains returns the sets of GPUs connected by NVLink, directly, through switches or through
// other GPUs, by ascending position. A GPU without NVLinks is in none.
func (g *Graph) NVLinkDomains() []GPUSet {
	var domains []GPUSet
	for left := g.Everything(); left != 0; {
		domain, reached := GPUSet(0), SetOf(left.first())
		for reached != 0 {
			from := reached.first()
			domain |= 1 << from
			for to := range (left &^ domain).All() {
				if link := g.link(from, to); link.NVLinks > 0 {
					reached |= 1 << to
				}
			}
			reached &^= domain
		}
		if domain.Len() > 1 {
			domains = append(domains, domain)
		}
		left &^= domain
	}
	return domains
}

func (g *Graph) link(a, b int) inventory.Link { return g.links[a*len(g.nodes)+b] }
