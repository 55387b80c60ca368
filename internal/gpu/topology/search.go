package topology

import (
	"math"
	"math/bits"
	"slices"
)

// exactGPUs is the number of candidates up to which the search always completes.
const exactGPUs = 16

// workBudget is the limit of work for a search among more than exactGPUs candidates, in visited
// candidates: about a millisecond.
const workBudget = 60_000

// A search is one run over the sets of a request, with its memory. Candidates, the available but
// not required GPUs, are numbered from 0 in order of position; sets of candidates are bitmasks.
//
// Every set has one value, unit × score − cost: the sum of pair weights and of one linear weight
// for each candidate, its score to the required GPUs less the damage. The search is depth-first
// through the candidates in order, each first taken and then left out, so the first set of a value
// has the lowest positions.
type search struct {
	n        int    // candidates
	all      uint64 // the set of all candidates
	position [MaxGPUs]int
	// weights are the pair weights of the candidates, unit × score, in rows of n.
	weights []int64
	// twins are, for each candidate, the later interchangeable candidates: a set takes the first of
	// them.
	twins [MaxGPUs]uint64
	// neighbours are, for each candidate, the other candidates by descending weight, in rows of n.
	neighbours []uint8
	// halves bound the gain from pairs among the remaining candidates: for the candidates from p
	// on, at [(p×n + k)×n + i], half of the k highest weights from candidate i. They are computed
	// for a p at the first use.
	halves     []int64
	haveHalves uint64
	// gains are, for each depth, the gain of each candidate in the value of the current set, in
	// rows of n. Those of depth 0 are the linear weights.
	gains []int64

	keep      int         // requested number of best sets
	best      []rankedSet // best sets so far, best first, equals in order of position
	threshold int64       // only sets with a higher value count
	set       uint64      // candidates taken so far
	budget    int64       // remaining work
	open      int64       // upper bound for the value of skipped sets
}

// rankedSet is a set of candidates with its value.
type rankedSet struct {
	value int64
	set   uint64
}

// never is below the value of any set.
const never = math.MinInt64

func newSearch(g *Graph) *search {
	n := len(g.nodes)
	return &search{
		weights:    make([]int64, n*n),
		neighbours: make([]uint8, n*n),
		halves:     make([]int64, n*n*n),
		gains:      make([]int64, n*n+n),
		best:       make([]rankedSet, 0, 2),
	}
}

// run searches for the `keep` best sets of a normalised request. The results are in s.best, and the
// bound for skipped sets in s.open.
func (s *search) run(g *Graph, r Request, keep int, budget int64) {
	s.prepare(g, r)
	s.keep, s.best, s.threshold, s.set, s.open = keep, s.best[:0], never, 0, never
	s.budget = budget
	if s.n <= exactGPUs {
		s.budget = math.MaxInt64
	}
	wanted := r.Size - r.Required.Len()
	if wanted == 0 || wanted == s.n {
		s.set = s.all
		if wanted == 0 {
			s.set = 0
		}
		s.offer(s.valueOf(s.set), s.set)
		return
	}
	if keep > 1 {
		s.visit(0, s.all, wanted, 0)
		return
	}
	s.findTwins()
	guess := s.guess(wanted)
	s.threshold = guess.value - 1
	s.visit(0, s.all, wanted, 0)
	if len(s.best) == 0 {
		s.best = append(s.best, guess)
	}
}

// prepare numbers the candidates of a request and computes their weights.
func (s *search) prepare(g *Graph, r Request) {
	s.n = 0
	for rest := r.Available &^ r.Required; rest != 0; rest &= rest - 1 {
		s.position[s.n] = rest.first()
		s.n++
	}
	n := s.n
	s.all = uint64(1)<<n - 1
	for i, p := range s.position[:n] {
		s.gains[i] = unit*g.between(p, r.Required) - g.damage(p, r)
		row, scores := s.weights[i*n:(i+1)*n], g.scores[p*len(g.nodes):]
		order := s.neighbours[i*n : i*n : (i+1)*n]
		for j, q := range s.position[:n] {
			row[j] = unit * int64(scores[q])
			if j == i {
				continue
			}
			k := len(order)
			order = append(order, uint8(j))
			for ; k > 0 && row[order[k-1]] < row[j]; k-- {
				order[k] = order[k-1]
			}
			order[k] = uint8(j)
		}
	}
	clear(s.twins[:n])
	s.haveHalves = 0
}

// findTwins groups the interchangeable candidates: equal linear weights, and equal weights to all
// others.
func (s *search) findTwins() {
	n := s.n
	var grouped uint64
	for i := range n {
		if grouped>>i&1 == 1 {
			continue
		}
		class := uint64(1) << i
		for j := i + 1; j < n; j++ {
			if s.alike(i, j) {
				class |= 1 << j
			}
		}
		grouped |= class
		for rest := class; rest != 0; rest &= rest - 1 {
			s.twins[bits.TrailingZeros64(rest)] = rest & (rest - 1)
		}
	}
}

func (s *search) alike(i, j int) bool {
	if s.gains[i] != s.gains[j] {
		return false
	}
	a, b := s.weights[i*s.n:(i+1)*s.n], s.weights[j*s.n:(j+1)*s.n]
	for k := range a {
		if a[k] != b[k] && k != i && k != j {
			return false
		}
	}
	return true
}

// visit visits the sets of s.set, with the given value, and `wanted` (at least 1) of the candidates
// in `rest`.
func (s *search) visit(depth int, rest uint64, wanted int, value int64) {
	gains := s.gains[depth*s.n : (depth+1)*s.n]
	for bits.OnesCount64(rest) >= wanted {
		if wanted == 1 {
			s.finish(rest, value, gains)
			return
		}
		bound := value + s.upperBound(rest, wanted, gains)
		if bound <= s.threshold {
			return
		}
		if s.budget <= 0 {
			s.open = max(s.open, bound)
			return
		}
		i := bits.TrailingZeros64(rest)
		rest &= rest - 1
		next, weights := s.gains[(depth+1)*s.n:(depth+2)*s.n], s.weights[i*s.n:(i+1)*s.n]
		for others := rest; others != 0; others &= others - 1 {
			k := bits.TrailingZeros64(others)
			next[k] = gains[k] + weights[k]
		}
		s.set |= 1 << i
		s.visit(depth+1, rest, wanted-1, value+gains[i])
		s.set &^= 1 << i
		rest &^= s.twins[i]
	}
}

// finish offers s.set with each of the candidates in rest.
func (s *search) finish(rest uint64, value int64, gains []int64) {
	for ; rest != 0; rest &= rest - 1 {
		i := bits.TrailingZeros64(rest)
		if value+gains[i] > s.threshold {
			s.offer(value+gains[i], s.set|1<<i)
		}
	}
}

// offer adds a set to the best sets if the value is above s.threshold.
func (s *search) offer(value int64, set uint64) {
	at := len(s.best)
	for at > 0 && s.best[at-1].value < value {
		at--
	}
	s.best = slices.Insert(s.best, at, rankedSet{value, set})
	s.best = s.best[:min(len(s.best), s.keep)]
	if len(s.best) == s.keep {
		s.threshold = s.best[s.keep-1].value
	}
}

// upperBound returns an upper bound for the gain of any `wanted` of the candidates in rest: each
// adds at most its gain and half of its wanted−1 highest weights to remaining candidates.
func (s *search) upperBound(rest uint64, wanted int, gains []int64) int64 {
	first := bits.TrailingZeros64(rest)
	if s.haveHalves>>first&1 == 0 {
		s.fillHalves(first)
	}
	halves := s.halves[(first*s.n+wanted-1)*s.n:]
	var most [MaxGPUs]int64
	count := 0
	for ; rest != 0; rest &= rest - 1 {
		i := bits.TrailingZeros64(rest)
		most[count&(MaxGPUs-1)] = gains[i] + halves[i]
		count++
	}
	s.budget -= int64(count)
	return sumOfHighest(most[:count], wanted)
}

// sumOfHighest returns the sum of the k highest values, 1 ≤ k ≤ len(values). It reorders values.
func sumOfHighest(values []int64, k int) int64 {
	var sum int64
	for len(values) > k {
		// Values above the pivot go to the front, values below to the back; those between are equal
		// to it.
		pivot := values[len(values)/2]
		var above int64
		low, mid, high := 0, 0, len(values)
		for mid < high {
			switch v := values[mid]; {
			case v > pivot:
				above += v
				values[low], values[mid] = v, values[low]
				low++
				mid++
			case v < pivot:
				high--
				values[mid], values[high] = values[high], v
			default:
				mid++
			}
		}
		switch {
		case k < low:
			values = values[:low]
		case k <= mid:
			return sum + above + int64(k-low)*pivot
		default:
			sum += above + int64(mid-low)*pivot
			values, k = values[mid:], k-mid
		}
	}
	for _, v := range values {
		sum += v
	}
	return sum
}

// fillHalves computes s.halves for the candidates from `first` on.
func (s *search) fillHalves(first int) {
	n := s.n
	for i := first; i < n; i++ {
		table := s.halves[first*n*n:]
		var sum int64
		k := 0
		table[i] = sum
		for _, j := range s.neighbours[i*n : (i+1)*n-1] {
			if int(j) < first {
				continue
			}
			k++
			sum += s.weights[i*n+int(j)] / 2
			table[k*n+i] = sum
		}
	}
	s.haveHalves |= 1 << first
}

// valueOf returns the value of a set of candidates.
func (s *search) valueOf(set uint64) int64 {
	var value int64
	for rest := set; rest != 0; rest &= rest - 1 {
		i := bits.TrailingZeros64(rest)
		value += s.gains[i]
		for others := rest & (rest - 1); others != 0; others &= others - 1 {
			value += s.weights[i*s.n+bits.TrailingZeros64(others)]
		}
	}
	return value
}
