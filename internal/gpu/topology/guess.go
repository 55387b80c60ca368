package topology

import "math/bits"

// guess returns a good set of `wanted` candidates, so that the search can skip most sets from the
// start. It adds the best candidate at each step, and then swaps members while swaps help. With
// more than exactGPUs candidates this set may be the answer, so guess starts once from every
// candidate.
func (s *search) guess(wanted int) rankedSet {
	best := s.improve(s.grow(0, wanted))
	if s.n <= exactGPUs {
		return best
	}
	for rest := s.all; rest != 0; rest &= rest - 1 {
		if set := s.improve(s.grow(rest&-rest, wanted)); set.value > best.value {
			best = set
		}
		rest &^= s.twins[bits.TrailingZeros64(rest)]
	}
	return best
}

// grow adds candidates to a set up to `wanted`, each time the best candidate. It stores in the
// second row of s.gains the gain of each candidate: its linear weight and its weights to the
// members.
func (s *search) grow(set uint64, wanted int) uint64 {
	adds := s.gains[s.n : 2*s.n]
	copy(adds, s.gains[:s.n])
	for rest := set; rest != 0; rest &= rest - 1 {
		s.addWeights(adds, bits.TrailingZeros64(rest), 1)
	}
	if s.haveHalves&1 == 0 {
		s.fillHalves(0)
	}
	for bits.OnesCount64(set) < wanted {
		best, most := -1, int64(never)
		for i := range s.n {
			if set>>i&1 == 1 {
				continue
			}
			value := adds[i]
			if set == 0 {
				value += s.halves[(wanted-1)*s.n+i]
			}
			if value > most {
				best, most = i, value
			}
		}
		set |= 1 << best
		s.addWeights(adds, best, 1)
	}
	return set
}

// improve swaps members for other candidates, best swap first, until no swap helps. It needs the
// second row of s.gains from grow.
func (s *search) improve(set uint64) rankedSet {
	adds := s.gains[s.n : 2*s.n]
	for {
		var out, in int
		var most int64
		for members := set; members != 0; members &= members - 1 {
			o := bits.TrailingZeros64(members)
			weights := s.weights[o*s.n : (o+1)*s.n]
			for others := s.all &^ set; others != 0; others &= others - 1 {
				i := bits.TrailingZeros64(others)
				if better := adds[i] - weights[i] - adds[o]; better > most {
					out, in, most = o, i, better
				}
			}
		}
		if most == 0 {
			return rankedSet{s.valueOf(set), set}
		}
		set = set&^(1<<out) | 1<<in
		s.addWeights(adds, out, -1)
		s.addWeights(adds, in, 1)
	}
}

// addWeights adds or subtracts a candidate's weights to a row.
func (s *search) addWeights(row []int64, candidate int, sign int64) {
	for i, weight := range s.weights[candidate*s.n : (candidate+1)*s.n] {
		row[i] += sign * weight
	}
}
