package topology

import "math"

// Work searches for the best set of a request with a budget. It returns the choice, and the work
// done in candidates looked at.
func (g *Graph) Work(r Request, budget int64) (Choice, int64) {
	r, ok := g.normalise(r)
	if !ok {
		return Choice{}, 0
	}
	s := newSearch(g)
	s.run(g, r, 1, budget)
	if s.n <= exactGPUs {
		budget = math.MaxInt64
	}
	return g.choice(s, 0, r), budget - s.budget
}

// The limits of a search.
const (
	ExactGPUs  = exactGPUs
	WorkBudget = workBudget
)
