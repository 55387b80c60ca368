package topology

// A Request asks for a number of GPUs. Positions that the graph does not have are ignored.
type Request struct {
	// Available are the GPUs to choose from.
	Available GPUSet
	// Required are the GPUs that the answer must hold; they count as available.
	Required GPUSet
	// Busy are the GPUs that others hold; those that are also available or required do not count as
	// busy. A GPU that is none of the three, such as an unhealthy one, has no part in the choice.
	Busy GPUSet
	// Size is the number of GPUs wanted, the required ones included. Less than the required ones means
	// just those.
	Size int
}

// A Choice is the answer to a Request, and how good it is.
type Choice struct {
	// Set are the GPUs chosen.
	Set GPUSet
	// Score is the sum of the scores of the pairs inside Set.
	Score int64
	// Cost is the damage to the rest: 8 times the score from Set to the available GPUs outside it,
	// plus the score from Set to the busy ones.
	Cost int64
	// Exact says that Set is the best by the package's objective. Otherwise the search ended early,
	// and Set is the best that it saw.
	Exact bool
	// Bound is what the Score of no possible set exceeds. It equals Score if Exact.
	Bound int64
}

// Choose returns the best set for a request; false if fewer GPUs are available than it asks for.
func (g *Graph) Choose(r Request) (Choice, bool) {
	r, ok := g.normalise(r)
	if !ok {
		return Choice{}, false
	}
	s := g.scratch.Get().(*search)
	s.run(g, r, 1, workBudget)
	choice := g.choice(s, 0, r)
	g.scratch.Put(s)
	return choice, true
}

// Best returns the best `count` sets for a request, the best first; fewer if there are not as many,
// none if fewer GPUs are available than it asks for. It may take a hundred times as long as Choose:
// it is for people who want to see what the choice was between.
func (g *Graph) Best(r Request, count int) []Choice {
	r, ok := g.normalise(r)
	if !ok || count <= 0 {
		return nil
	}
	s := newSearch(g)
	s.run(g, r, count, 100*workBudget)
	best := make([]Choice, len(s.found))
	for i := range best {
		best[i] = g.choice(s, i, r)
	}
	return best
}

// choice returns the nth set that a search found.
func (g *Graph) choice(s *search, nth int, r Request) Choice {
	set := r.Required
	for members := GPUSet(s.found[nth].set); members != 0; members &= members - 1 {
		set |= 1 << s.position[members.first()]
	}
	c := Choice{Set: set, Score: g.within(set), Cost: g.cost(set, r), Exact: s.open <= s.found[nth].value}
	c.Bound = c.Score
	if !c.Exact {
		// A value is unit × score − cost, without the required GPUs' own, and the cost is less than a
		// unit.
		c.Bound = max(c.Score, g.within(r.Required)+(s.open+unit-1)/unit)
	}
	return c
}

// freeWeight is what breaking a link to a GPU that stays free costs, in breaks of a link to a busy
// one. In simulation the results are the same from 8 to 20: what matters is that damage to free
// neighbourhoods goes first and that ties fall to GPUs whose neighbours are busy.
const freeWeight = 8

// unit is what one point of score inside the set counts in the single number that is searched for:
// more than any cost, so that the order is lexicographic. Cost is at most 64 GPUs × 63 peers × 8 ×
// the highest pair score, 12,860: under 2^29. Score is at most 2016 pairs × 12,860, under 2^25; so
// the number stays under 2^55.
const unit = int64(1) << 30

// normalise makes the parts of a request disjoint and its size possible; false if too few GPUs are
// available.
func (g *Graph) normalise(r Request) (Request, bool) {
	r.Required &= g.Everything()
	r.Available = r.Available&g.Everything() | r.Required
	r.Busy &= g.Everything() &^ r.Available
	r.Size = max(r.Size, r.Required.Len())
	return r, r.Size <= r.Available.Len()
}

// damage is the part of a GPU's cost that does not depend on the rest of the set: the score inside
// the set counts as if it were cut, which among sets of equal score changes nothing.
func (g *Graph) damage(position int, r Request) int64 {
	return freeWeight*g.between(position, r.Available) + g.between(position, r.Busy)
}

// cost returns the damage that a set does to the rest.
func (g *Graph) cost(s GPUSet, r Request) int64 {
	var sum int64
	for p := range s.All() {
		sum += freeWeight*g.between(p, r.Available&^s) + g.between(p, r.Busy)
	}
	return sum
}
