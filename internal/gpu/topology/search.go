package topology

import (
	"math"
	"math/bits"
	"slices"
)

// exactGPUs is the number of candidates up to which the search always runs to its end.
const exactGPUs = 16

// workBudget is the work after which a search among more than exactGPUs candidates ends, in
// candidates looked at: about a millisecond.
const workBudget = 60_000

// A search is one run over the sets of a request, with the memory that it needs. Candidates, the
// GPUs that are available and not required, are numbered from 0 in order of position; sets of them
// are bitmasks.
//
// Every set has one value, unit × score − cost, as a sum of pair weights and of one linear weight
// for each candidate: its score to the required GPUs less the damage it does. The search goes
// depth-first through the candidates in order, each first taken and then left out, so the first set
// of a value is the one with the lowest positions.
type search struct {
	n        int    // candidates
	everyone uint64 // the set of all candidates
	position [MaxGPUs]int
	// weights are the pair weights of the candidates, unit × score, in rows of n.
	weights []int64
	// twins are, of each candidate, the later ones that are interchangeable with it: of those a set
	// takes the first.
	twins [MaxGPUs]uint64
	// neighbours are the other candidates of each one by descending weight, in rows of n.
	neighbours []uint8
	// halves bound what the pairs among candidates still to come can add: for the candidates from p
	// on, at [(p×n + k)×n + i], half of the k highest weights from candidate i. Filled in for a p when
	// it is first needed.
	halves     []int64
	haveHalves uint64
	// gains are, for each depth, what taking a candidate adds to the value of the set so far, in rows
	// of n. Those of depth 0 are the linear weights.
	gains []int64

	keep   int      // how many of the best sets are wanted
	found  []ranked // the best sets seen, the best first, equals in order of position
	beaten int64    // a set counts only if its value is higher
	set    uint64   // the candidates taken on the way here
	budget int64    // work left
	open   int64    // no set that was not looked at has a higher value
}

// ranked is a set of candidates and its value.
type ranked struct {
	value int64
	set   uint64
}

// never is lower than the value of any set.
const never = math.MinInt64

func newSearch(g *Graph) *search {
	n := len(g.nodes)
	return &search{
		weights:    make([]int64, n*n),
		neighbours: make([]uint8, n*n),
		halves:     make([]int64, n*n*n),
		gains:      make([]int64, n*n+n),
		found:      make([]ranked, 0, 2),
	}
}

// run searches for the best sets of a normalised request, `keep` of them. What it finds is in
// s.found; what it did not look at is in s.open.
func (s *search) run(g *Graph, r Request, keep int, budget int64) {
	s.prepare(g, r)
	s.keep, s.found, s.beaten, s.set, s.open = keep, s.found[:0], never, 0, never
	s.budget = budget
	if s.n <= exactGPUs {
		s.budget = math.MaxInt64
	}
	wanted := r.Size - r.Required.Len()
	if wanted == 0 || wanted == s.n {
		s.set = s.everyone
		if wanted == 0 {
			s.set = 0
		}
		s.offer(s.valueOf(s.set), s.set)
		return
	}
	if keep > 1 {
		s.visit(0, s.everyone, wanted, 0)
		return
	}
	s.findTwins()
	guess := s.guess(wanted)
	s.beaten = guess.value - 1
	s.visit(0, s.everyone, wanted, 0)
	if len(s.found) == 0 {
		s.found = append(s.found, guess)
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
	s.everyone = uint64(1)<<n - 1
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

// findTwins groups the candidates that are interchangeable: equal linear weights, and equal weights
// to everybody else.
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

// visit looks at the sets that hold s.set, whose value is given, and `wanted` (at least 1) of the
// candidates in `rest`.
func (s *search) visit(depth int, rest uint64, wanted int, value int64) {
	gains := s.gains[depth*s.n : (depth+1)*s.n]
	for bits.OnesCount64(rest) >= wanted {
		if wanted == 1 {
			s.last(rest, value, gains)
			return
		}
		bound := value + s.bound(rest, wanted, gains)
		if bound <= s.beaten {
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

// last offers s.set with each of the candidates in rest.
func (s *search) last(rest uint64, value int64, gains []int64) {
	for ; rest != 0; rest &= rest - 1 {
		i := bits.TrailingZeros64(rest)
		if value+gains[i] > s.beaten {
			s.offer(value+gains[i], s.set|1<<i)
		}
	}
}

// offer takes a set whose value is higher than s.beaten among the best seen.
func (s *search) offer(value int64, set uint64) {
	at := len(s.found)
	for at > 0 && s.found[at-1].value < value {
		at--
	}
	s.found = slices.Insert(s.found, at, ranked{value, set})
	s.found = s.found[:min(len(s.found), s.keep)]
	if len(s.found) == s.keep {
		s.beaten = s.found[s.keep-1].value
	}
}

// bound returns no less than what any `wanted` of the candidates in rest can add to the value of
// the set so far: each adds at most its gain and half of its wanted−1 highest weights to candidates
// still to come.
func (s *search) bound(rest uint64, wanted int, gains []int64) int64 {
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

// sumOfHighest returns the sum of the k highest values, 1 ≤ k ≤ len(values), and leaves values in
// another order.
func sumOfHighest(values []int64, k int) int64 {
	var sum int64
	for len(values) > k {
		// Values higher than the pivot go to the front, lower ones to the back; those between are equal
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
