package topology_test

import (
	"slices"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
)

// TestWork holds how much is looked at until the best set of each size is found, all sizes
// together. More means that the search leaves out less than it could. Less is better: lower the
// figure then.
func TestWork(t *testing.T) {
	t.Parallel()
	most := map[string]int64{
		"dgx-1": 458, "dgx-1, one GPU lost": 360, "dgx-1, one link down": 495, "pcie-8": 240, "bridges-8": 262,
		"dgx-h100":  240,
		"uniform-8": 133, "random-8a": 315, "random-8b": 472, "random-8c": 371, "one GPU": 0, "two GPUs": 0,
		"no links": 11,
		"pcie-16":  2545, "dgx-2": 4629, "two boards": 4858, "two cubes": 10426, "uniform-16": 1225,
		"random-16a": 19218,
		"random-16b": 43375, "random-16c": 31766,
		"pcie-32": 78715, "bridges-32": 266813, "four boards": 281880, "four cubes": 299872, "uniform-32": 10385,
	}
	for _, m := range slices.Concat(machines8(), machines16(), machines32()[:5]) {
		g := topology.New(m.gpus)
		var sum int64
		for size := range g.Len() + 1 {
			c, work := g.Work(topology.Request{Available: g.Everything(), Size: size}, topology.WorkBudget)
			sum += work
			if !c.Exact {
				t.Errorf("%s, size %d: the search has ended early", m.name, size)
			}
		}
		if sum > most[m.name] {
			t.Errorf("%s: the search looks at %d candidates, and %d were enough", m.name, sum, most[m.name])
		}
	}
}

// TestSearchThatEndsEarly: a search among many GPUs uses its budget and no more, and what it finds
// is as good as it was. Less than the scores given here means that the first guess is worse.
func TestSearchThatEndsEarly(t *testing.T) {
	t.Parallel()
	for _, m := range []struct {
		machine
		score int64
	}{
		{machine{"random-32a", random(32, 1)}, 1351610},
		{machine{"random-32b", random(32, 2)}, 1252540},
		{machine{"random-64", random(64, 1)}, 10095620},
	} {
		g := topology.New(m.gpus)
		var sum int64
		for size := range g.Len() + 1 {
			c, work := g.Work(topology.Request{Available: g.Everything(), Size: size}, topology.WorkBudget)
			sum += c.Score
			if c.Exact != (work < topology.WorkBudget) || work >= topology.WorkBudget+int64(size*g.Len()) {
				t.Errorf("%s, size %d: exact %v after %d of %d", m.name, size, c.Exact, work, topology.WorkBudget)
			}
		}
		if sum < m.score {
			t.Errorf("%s: the scores of all sizes are %d together, and were %d", m.name, sum, m.score)
		}
	}
}

// TestExactUpTo16GPUs: so many are searched to the end, whatever the budget, and one more is not.
func TestExactUpTo16GPUs(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]bool{topology.ExactGPUs: true, topology.ExactGPUs + 1: false} {
		g := topology.New(random(n, 1))
		if c, _ := g.Work(topology.Request{Available: g.Everything(), Size: n / 2}, 0); c.Exact != want {
			t.Errorf("%d GPUs without a budget: exact %v", n, c.Exact)
		}
	}
	if topology.ExactGPUs != 16 {
		t.Errorf("up to %d GPUs the choice is exact, and the documentation says 16", topology.ExactGPUs)
	}
}

// TestFirstGuess holds how good the sets are with which a search among many GPUs begins: without a
// budget they are the answer. Less than the sum of their scores given here means that the guess is
// worse.
func TestFirstGuess(t *testing.T) {
	t.Parallel()
	var sum int64
	for n := topology.ExactGPUs + 1; n <= 24; n++ {
		for seed := range uint64(20) {
			g := topology.New(random(n, seed))
			for size := 2; size < n; size += 3 {
				c, _ := g.Work(topology.Request{Available: g.Everything(), Size: size}, 0)
				sum += c.Score
			}
		}
	}
	if most := int64(16_671_280); sum < most {
		t.Errorf("the scores are %d together, and were %d", sum, most)
	}
}

// TestBestLooksLonger: Best ends later than Choose, because it leaves out less.
func TestBestLooksLonger(t *testing.T) {
	t.Parallel()
	g := topology.New(random(32, 1))
	request := topology.Request{Available: g.Everything(), Size: 7}
	want, _ := g.Choose(request)
	if best := g.Best(request, 2); !want.Exact || best[0] != want || !best[1].Exact {
		t.Errorf("Best has %+v, Choose %+v", best, want)
	}
}
