package layout

import (
	"cmp"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// An instanceKind is a GPU instance as a layout wants it, so many times: a profile, and the compute
// instances in it.
type instanceKind struct {
	profile  inventory.MIGProfile
	slices   int                         // compute slices
	computes []inventory.ComputeInstance // without IDs, by ascending start
	count    int
}

// A spot is one GPU instance of a solution.
type spot struct {
	kind  int // in the list of kinds
	start int
	// existing is the position of the GPU instance that is kept, or -1 for one that is to be created.
	existing int
}

// What it costs that an instance which exists is not kept. One that is in use outweighs all that
// are not.
const (
	costInUse    = 100_000
	costInstance = 1000
	costCompute  = 1 // to create the compute instances of an instance that has none
)

// A search finds the best way to put instances on the memory slices of one GPU. It looks at the
// slices in turn and tries each kind that can begin there, so it finds every solution, and the
// first one of the best.
type search struct {
	kinds  []instanceKind
	slices int
	have   []existing
	// most is how many memory slices of what is wanted may be left out.
	most int

	left  []int // of each kind
	sizes int   // the memory slices of those that are left
	here  []spot
	cost  int

	found bool
	best  []spot
	value value
}

// An existing is a GPU instance that exists, and what it costs not to keep it.
type existing struct {
	inventory.GPUInstance
	cost int
}

// A value says how good a solution is: fewer memory slices left out is better, then more instances,
// then a lower cost.
type value struct{ left, instances, cost int }

func (v value) compare(other value) int {
	return cmp.Or(cmp.Compare(other.left, v.left), cmp.Compare(v.instances, other.instances),
		cmp.Compare(other.cost, v.cost))
}

// solve returns the best solution and whether there is one. The kinds are tried in their order.
// With partial, some of what is wanted may be left out.
func solve(kinds []instanceKind, memorySlices int, have []existing, partial bool) ([]spot, bool) {
	s := search{kinds: kinds, slices: memorySlices, have: have}
	for _, k := range kinds {
		s.left = append(s.left, k.count)
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

// from fills the memory slices from the given one on.
func (s *search) from(slice int) {
	room := s.slices - slice
	if s.sizes-room > s.most || s.found && s.most == 0 && s.value.cost == 0 {
		return // no solution, or none that is better
	}
	if room == 0 {
		if v := (value{s.sizes, len(s.here), s.cost}); !s.found || v.compare(s.value) > 0 {
			s.found, s.value, s.best, s.most = true, v, slices.Clone(s.here), s.sizes
		}
		return
	}
	for i, k := range s.kinds {
		if s.left[i] == 0 || !slices.Contains(k.profile.Starts, slice) || k.profile.Size > room || s.clashes(k) {
			continue
		}
		position, saved := s.keep(k, slice)
		s.left[i]--
		s.sizes -= k.profile.Size
		s.cost -= saved
		s.here = append(s.here, spot{i, slice, position})
		s.from(slice + k.profile.Size)
		s.here = s.here[:len(s.here)-1]
		s.cost += saved
		s.sizes += k.profile.Size
		s.left[i]++
	}
	s.from(slice + 1)
}

// clashes says whether a kind cannot be beside those that were put so far.
func (s *search) clashes(k instanceKind) bool {
	return slices.ContainsFunc(s.here, func(p spot) bool { return clash(k.profile.Name, s.kinds[p.kind].profile.Name) })
}

// keep returns which existing instance a kind at a slice is, and what is saved because it is kept.
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

// keeps says whether an instance that exists is of the kind, or is when its compute instances are
// created.
func (k instanceKind) keeps(i inventory.GPUInstance) bool {
	return i.Profile == k.profile.Name && (len(i.Computes) == 0 || sameComputes(i.Computes, k.computes))
}

// sameComputes says whether compute instances have the same sizes. Where each of them is makes no
// difference to who uses it.
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

// clash says whether instances of two profiles cannot be on one GPU because of its media engines:
// one with +me takes those of which the GPU has one, and one with +me.all takes all.
func clash(a, b string) bool {
	all := func(name string) bool { return strings.HasSuffix(name, "+me.all") }
	none := func(name string) bool { return strings.HasSuffix(name, "-me") }
	one := func(name string) bool { return strings.HasSuffix(name, "+me") }
	return all(a) && !none(b) || all(b) && !none(a) || one(a) && one(b)
}

// pack puts compute instances of the given sizes, in compute slices, into as few GPU instances with
// so many slices as it can, and at most into limit. It returns the compute instances of each; nil
// if they do not fit. It sorts the sizes.
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
			slices.SortFunc(computes, func(a, b inventory.ComputeInstance) int { return a.Start - b.Start })
		}
		return packed
	}
	return nil
}

// packInto puts the sizes into the GPU instances, of whose compute slices those in used are taken.
// The first of the sizes goes into instance first or a later one.
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
				next = i // equal ones are put in order: another order is the same
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
