package topology

import (
	"math/bits"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// GroupSizes are the sizes of the groups that Groups makes, descending.
var GroupSizes = [...]int{8, 4, 2}

// Groups is how the GPUs of a Graph fall into well connected groups. The groups of one size share
// no GPU, and each lies in one group of the next larger size or outside of all of those.
type Groups struct {
	// Sets are the groups by their size.
	Sets map[int][]GPUSet
	// Order are all positions. Those of a group follow one another.
	Order []int
}

// Groups divides all GPUs, free or not, into groups of each of GroupSizes. A set of twice the size
// is divided so that both halves together have the highest score. Of any other set the best group
// is taken out, as Choose finds it, then the best of what stays, and so on; fewer GPUs than the
// size are in no group of it. GPUs of which the connections are not all known are in no group
// together.
func (g *Graph) Groups() Groups {
	groups := Groups{Sets: map[int][]GPUSet{}}
	g.group(g.Everything(), GroupSizes[:], &groups)
	return groups
}

// group adds the groups of some sizes in a set, and its order.
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
		if g.known(part) {
			groups.Sets[size] = append(groups.Sets[size], part)
		}
		g.group(part, sizes[1:], groups)
		rest &^= part
	}
	g.group(rest, sizes[1:], groups)
}

// take returns the GPUs of a set that are to be its first group.
func (g *Graph) take(set GPUSet, size int) GPUSet {
	if set.Len() == 2*size {
		return g.half(set)
	}
	choice, _ := g.Choose(Request{Available: set, Size: size})
	return choice.Set
}

// half returns the half of a set, with its first GPU, for which both halves together have the
// highest score.
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

// known reports whether the connections between all GPUs of a set are known.
func (g *Graph) known(set GPUSet) bool {
	for a := range set.All() {
		for b := range set.All() {
			if a < b && g.Score(a, b) == 0 {
				return false
			}
		}
	}
	return true
}

// NVLinkDomains returns the sets of GPUs that reach one another by NVLink, straight, through
// switches or through other GPUs, by ascending position. A GPU without NVLinks is in none.
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
