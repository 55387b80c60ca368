package layout

import (
	"cmp"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// An instanceKind is a wanted kind of GPU instance and its number: a profile with compute
// instances.
type instanceKind struct {
	profile  inventory.MIGProfile
	slices   int                         // compute slices
	computes []inventory.ComputeInstance // without IDs, by ascending start
	count    int
}

// A spot is one GPU instance of a solution.
type spot struct {
	kind  int // position in the list of kinds
	start int
	// existingIndex is the position of the kept GPU instance, or -1 for a new one.
	existingIndex int
}

// The costs of not keeping an existing instance. One instance in use outweighs all unused ones.
const (
	costInUse    = 100_000
	costInstance = 1000
	costCompute  = 1 // for creating the compute instances of an instance without any
)

// A search finds the best placement of instances on the memory slices of one GPU. It goes through
// the slices and tries each kind that can begin there. Thus it finds every solution, and returns
// the first of the best.
type search struct {
	kinds  []instanceKind
	slices int
	have   []existingInstance
	// most is the number of memory slices of wanted instances that may be omitted.
	most int

	unplacedCounts []int // number of unplaced instances of each kind
	sizes          int   // memory slices of the unplaced instances
	here           []spot
	cost           int

	found bool
	best  []spot
	value value
}

// An existingInstance is an existing GPU instance with the cost of not keeping it.
type existingInstance struct {
	inventory.GPUInstance
	cost int
}

// A value compares solutions: fewer omitted memory slices are better, then more instances, then a
// lower cost.
type value struct{ omitted, instances, cost int }

func (v value) compare(other value) int {
	return cmp.Or(cmp.Compare(other.omitted, v.omitted), cmp.Compare(v.instances, other.instances),
		cmp.Compare(other.cost, v.cost))
}

// solve returns the best solution and whether there is one. It tries the kinds in order. With
// partial, a solution may omit wanted instances.
func solve(kinds []instanceKind, memorySlices int, have []existingInstance, partial bool) ([]spot, bool) {
	s := search{kinds: kinds, slices: memorySlices, have: have}
	for _, k := range kinds {
		s.unplacedCounts = append(s.unplacedCounts, k.count)
		s.sizes += k.count * k.profile.Size
	}
	if partial {
		s.most = s.sizes
	}
	for _, e := range have {
		s.cost += e.cost
	}
	s.from(0)
	return s.best, s.found
}

// from fills the memory slices, beginning at slice.
func (s *search) from(slice int) {
	room := s.slices - slice
	if s.sizes-room > s.most || s.found && s.most == 0 && s.value.cost == 0 {
		return // no better solution
	}
	if room == 0 {
		if v := (value{s.sizes, len(s.here), s.cost}); !s.found || v.compare(s.value) > 0 {
			s.found, s.value, s.best, s.most = true, v, slices.Clone(s.here), s.sizes
		}
		return
	}
	for i, k := range s.kinds {
		if s.unplacedCounts[i] == 0 || !slices.Contains(k.profile.Starts, slice) || k.profile.Size > room ||
			s.clashes(k) {
			continue
		}
		position, saved := s.keep(k, slice)
		s.unplacedCounts[i]--
		s.sizes -= k.profile.Size
		s.cost -= saved
		s.here = append(s.here, spot{i, slice, position})
		s.from(slice + k.profile.Size)
		s.here = s.here[:len(s.here)-1]
		s.cost += saved
		s.sizes += k.profile.Size
		s.unplacedCounts[i]++
	}
	s.from(slice + 1)
}

// clashes reports whether a kind cannot be beside the placed kinds.
func (s *search) clashes(k instanceKind) bool {
	return slices.ContainsFunc(s.here, func(p spot) bool { return clash(k.profile.Name, s.kinds[p.kind].profile.Name) })
}

// keep returns the existing instance for a kind at a slice, and the cost saved by keeping it.
func (s *search) keep(k instanceKind, start int) (position, saved int) {
	for i, e := range s.have {
		switch {
		case e.Start != start || !k.keeps(e.GPUInstance):
		case len(e.Computes) == 0:
			return i, e.cost - costCompute
		default:
			return i, e.cost
		}
	}
	return -1, 0
}

// keeps reports whether an existing instance is of the kind, or becomes so after the creation of
// its compute instances.
func (k instanceKind) keeps(i inventory.GPUInstance) bool {
	return i.Profile == k.profile.Name && (len(i.Computes) == 0 || sameComputes(i.Computes, k.computes))
}

// sameComputes reports whether compute instances have the same sizes. Their places make no
// difference to users.
func sameComputes(a, b []inventory.ComputeInstance) bool {
	sizes := func(list []inventory.ComputeInstance) []int {
		n := make([]int, len(list))
		for i, c := range list {
			n[i] = c.Slices
		}
		slices.Sort(n)
		return n
	}
	return slices.Equal(sizes(a), sizes(b))
}

// clash reports whether the media engines of a GPU forbid instances of both profiles: an instance
// with +me takes the single engines, one with +me.all takes all engines.
func clash(a, b string) bool {
	all := func(name string) bool { return strings.HasSuffix(name, "+me.all") }
	none := func(name string) bool { return strings.HasSuffix(name, "-me") }
	one := func(name string) bool { return strings.HasSuffix(name, "+me") }
	return all(a) && !none(b) || all(b) && !none(a) || one(a) && one(b)
}

// pack puts compute instances of the given sizes, in compute slices, into the smallest number of
// GPU instances of giSlices slices, up to limit. It returns the compute instances of each GPU
// instance; nil if they do not fit. It sorts the sizes.
func pack(sizes []int, giSlices, limit int) [][]inventory.ComputeInstance {
	slices.SortFunc(sizes, func(a, b int) int { return b - a })
	sum := 0
	for _, n := range sizes {
		sum += n
	}
	for bins := (sum + giSlices - 1) / giSlices; bins <= limit; bins++ {
		used := make([]uint, bins)
		packed := make([][]inventory.ComputeInstance, bins)
		if !packInto(sizes, 0, giSlices, used, packed) {
			continue
		}
		for _, computes := range packed {
			order.Sort(computes, func(a, b inventory.ComputeInstance) int { return a.Start - b.Start })
		}
		return packed
	}
	return nil
}

// packInto puts the sizes into GPU instances; used has the used compute slices. The first size goes
// into instance first or a later one.
func packInto(sizes []int, first, giSlices int, used []uint, packed [][]inventory.ComputeInstance) bool {
	if len(sizes) == 0 {
		return true
	}
	size, rest := sizes[0], sizes[1:]
	for i := first; i < len(used); i++ {
		for _, start := range computeStarts[[2]int{giSlices, size}] {
			mask := (uint(1)<<size - 1) << start
			if used[i]&mask != 0 {
				continue
			}
			used[i] |= mask
			packed[i] = append(packed[i], inventory.ComputeInstance{Start: start, Slices: size})
			next := 0
			if len(rest) > 0 && rest[0] == size {
				next = i // equal sizes in order: another order is the same
			}
			if packInto(rest, next, giSlices, used, packed) {
				return true
			}
			packed[i] = packed[i][:len(packed[i])-1]
			used[i] &^= mask
		}
	}
	return false
}
