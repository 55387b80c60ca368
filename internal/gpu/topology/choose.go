package topology

// A Request asks for a number of GPUs. Positions missing from the graph are ignored.
type Request struct {
	// Available are the GPUs to choose from.
	Available GPUSet
	// Required are the GPUs that every answer contains; they count as available.
	Required GPUSet
	// Busy are the GPUs in use by others. An available or required GPU does not count as busy. A
	// GPU in none of the three sets, such as an unhealthy one, is ignored.
	Busy GPUSet
	// Size is the number of requested GPUs, including the required GPUs. A number below the
	// required GPUs means exactly the required GPUs.
	Size int
}

// A Choice is the answer to a Request, with its quality.
type Choice struct {
	// Set are the chosen GPUs.
	Set GPUSet
	// Score is the sum of the scores of the pairs inside Set.
	Score int64
	// Cost is the damage to the remaining GPUs: 8 times the score from Set to the available GPUs
	// outside it, plus the score from Set to the busy GPUs.
	Cost int64
	// Exact is true if Set is the best by the package's objective. Otherwise the search ended
	// early, and Set is the best found.
	Exact bool
	// Bound is an upper bound for the Score of any possible set. It equals Score if Exact.
	Bound int64
}

// Choose returns the best set for a request; false if too few GPUs are available.
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

// Best returns the best `count` sets for a request, best first. It returns fewer if there are
// fewer, and none if too few GPUs are available. It may take a hundred times as long as Choose, and
// serves to display alternatives.
func (g *Graph) Best(r Request, count int) []Choice {
	r, ok := g.normalise(r)
	if !ok || count <= 0 {
		return nil
	}
	s := newSearch(g)
	s.run(g, r, count, 100*workBudget)
	best := make([]Choice, len(s.best))
	for i := range best {
		best[i] = g.choice(s, i, r)
	}
	return best
}

// choice returns the nth result of a search.
func (g *Graph) choice(s *search, nth int, r Request) Choice {
	set := r.Required
	for members := GPUSet(s.best[nth].set); members != 0; members &= members - 1 {
		set |= 1 << s.position[members.first()]
	}
	c := Choice{Set: set, Score: g.within(set), Cost: g.cost(set, r), Exact: s.open <= s.best[nth].value}
	c.Bound = c.Score
	if !c.Exact {
		// A value is unit × score − cost, without the required GPUs' own, and the cost is below one
		// unit.
		c.Bound = max(c.Score, g.within(r.Required)+(s.open+unit-1)/unit)
	}
	return c
}

// freeWeight is the cost of breaking a link to a free GPU, relative to a link to a busy one. In
// simulation the results are the same from 8 to 20: damage to free neighbourhoods must come first,
// and ties must go to GPUs with busy neighbours.
const freeWeight = 8

// unit is the weight of one point of score inside the set in the single number to maximise. It is
// more than any cost, so the order is lexicographic. Cost is at most 64 GPUs × 63 peers × 8 × the
// highest pair score, 12,860: under 2^29. Score is at most 2016 pairs × 12,860, under 2^25; so the
// number stays under 2^55.
const unit = int64(1) << 30

// normalise makes the parts of a request disjoint and its size valid; false if too few GPUs are
// available.
func (g *Graph) normalise(r Request) (Request, bool) {
	r.Required &= g.Everything()
	r.Available = r.Available&g.Everything() | r.Required
	r.Busy &= g.Everything() &^ r.Available
	r.Size = max(r.Size, r.Required.Len())
	return r, r.Size <= r.Available.Len()
}

// damage is the part of a GPU's cost independent of the rest of the set. The score inside the set
// counts as cut, without effect on the order of sets of equal score.
func (g *Graph) damage(position int, r Request) int64 {
	return freeWeight*g.between(position, r.Available) + g.between(position, r.Busy)
}

// cost returns the damage of a set to the remaining GPUs.
func (g *Graph) cost(s GPUSet, r Request) int64 {
	var sum int64
	for p := range s.All() {
		sum += freeWeight*g.between(p, r.Available&^s) + g.between(p, r.Busy)
	}
	return sum
}
