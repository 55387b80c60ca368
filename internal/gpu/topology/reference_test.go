package topology_test

import (
	"math/bits"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
)

// A reference is the stated policy of NVIDIA's device plugin: divide the free GPUs into sets of the
// wanted size (one may be smaller) so that the sum of all scores is highest, and of that partition
// take the best set. Of equals the first counts, in lexicographic order. Looking at every partition
// takes seconds on 16 GPUs; this one finds the same by remembering the best partition of every set
// of GPUs that it has come by.
type reference struct {
	gpus   int
	scores [32][32]int64       // of pairs
	best   map[int][]partition // by size and by set of free GPUs
}

// partition is the best division of a set of GPUs, as the set that holds the lowest one; the others
// follow from what it leaves.
type partition struct {
	known bool
	total int64
	score int64
	first uint32
}

func newReference(g *topology.Graph) *reference {
	r := &reference{gpus: g.Len(), best: map[int][]partition{}}
	for a := range r.gpus {
		for b := range r.gpus {
			r.scores[a][b] = int64(g.Score(a, b))
		}
	}
	return r
}

func (r *reference) place(free, _ topology.GPUSet, size int) topology.GPUSet {
	if r.best[size] == nil {
		r.best[size] = make([]partition, 1<<r.gpus)
	}
	var chosen partition
	for rest := uint32(free); rest != 0; {
		p := r.divide(rest, size)
		if bits.OnesCount32(p.first) == size && (!chosen.known || p.score > chosen.score) {
			chosen = p
		}
		rest &^= p.first
	}
	return topology.GPUSet(chosen.first)
}

// divide returns the best partition of a set. A reference belongs to one goroutine, and the race
// detector would make it slow.
//
//go:norace
func (r *reference) divide(set uint32, size int) partition {
	if set == 0 {
		return partition{known: true}
	}
	found := &r.best[size][set]
	if !found.known {
		// So many places stay empty, all in one of the sets.
		empty := (size - bits.OnesCount32(set)%size) % size
		lowest := set & -set
		d := division{reference: r, set: set, size: size, empty: empty}
		d.grow(lowest, set&^lowest, 0, size-1)
		*found = d.best
	}
	return *found
}

// A division looks for the best partition of a set.
type division struct {
	*reference
	set   uint32
	size  int
	empty int
	best  partition
}

// grow adds members from the rest to the set that holds the lowest GPU, in every way, and keeps the
// best.
//
//go:norace
func (d *division) grow(members, rest uint32, score int64, places int) {
	for ; places > 0 && rest != 0; rest &= rest - 1 {
		next := bits.TrailingZeros32(rest)
		more := score
		for others := members; others != 0; others &= others - 1 {
			more += d.scores[next][bits.TrailingZeros32(others)]
		}
		d.grow(members|1<<next, rest&(rest-1), more, places-1)
	}
	if places == 0 || places == d.empty {
		if p := d.divide(d.set&^members, d.size); !d.best.known || score+p.total > d.best.total {
			d.best = partition{known: true, total: score + p.total, score: score, first: members}
		}
	}
}
