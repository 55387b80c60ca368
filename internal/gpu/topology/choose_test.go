package topology_test

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
)

// draw returns a random request for a graph: about two thirds of the GPUs available, of the others
// most busy.
func draw(g *topology.Graph, r *rand.Rand) topology.Request {
	var request topology.Request
	for p := range g.Len() {
		one := topology.SetOf(p)
		switch x := r.IntN(12); {
		case x < 8:
			request.Available |= one
			if x == 0 {
				request.Required |= one
			}
		case x < 11:
			request.Busy |= one
		}
	}
	request.Size = request.Required.Len() + r.IntN(request.Available.Len()-request.Required.Len()+1)
	return request
}

func TestChooseMatchesBruteForce(t *testing.T) {
	t.Parallel()
	for _, m := range machines8() {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			compare(t, topology.New(m.gpus), 2000)
		})
	}
	for _, m := range machines16() {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			compare(t, topology.New(m.gpus), 60)
		})
	}
}

// compare holds the choice against brute force: with everything available at every size, and for
// random requests.
func compare(t *testing.T, g *topology.Graph, draws int) {
	t.Helper()
	r := rand.New(rand.NewPCG(7, uint64(g.Len())))
	var requests []topology.Request
	for size := range g.Len() + 1 {
		requests = append(requests, topology.Request{Available: g.Everything(), Size: size})
	}
	for range draws {
		requests = append(requests, draw(g, r))
	}
	for _, request := range requests {
		got, ok := g.Choose(request)
		if !ok {
			t.Fatalf("Choose(%+v) finds too few GPUs", request)
		}
		if diff := gocmp.Diff(bruteForce(g, request), got); diff != "" {
			t.Fatalf("Choose(%+v), -brute force +got:\n%s", request, diff)
		}
	}
}

func TestChooseOnManyGPUsIsExactOrSaysHowFarOff(t *testing.T) {
	t.Parallel()
	for _, m := range append(machines32(), machine{"uniform-64", uniform(64)}, machine{"random-64", random(64, 1)}) {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			g := topology.New(m.gpus)
			for size := range g.Len() + 1 {
				request := topology.Request{Available: g.Everything(), Size: size}
				got, ok := g.Choose(request)
				if !ok || got.Set.Len() != size {
					t.Fatalf("size %d: chose %v", size, got.Set)
				}
				score, cost := judge(g, got.Set, g.Everything(), 0)
				if got.Score != score || got.Cost != cost {
					t.Errorf("size %d: says score %d, cost %d; they are %d, %d", size, got.Score, got.Cost, score, cost)
				}
				if got.Exact && got.Bound != got.Score || got.Bound < got.Score {
					t.Errorf("size %d: exact %v, score %d, bound %d", size, got.Exact, got.Score, got.Bound)
				}
				if !got.Exact && float64(got.Score) < 0.6*float64(got.Bound) {
					t.Errorf("size %d: score %d is far under the bound %d", size, got.Score, got.Bound)
				}
				// Brute force is feasible for few GPUs, and for all but few.
				if size <= 2 || g.Len()-size <= 2 {
					want := bruteForce(g, request)
					if got.Score > want.Score || got.Bound < want.Score || got.Exact && got.Set != want.Set {
						t.Errorf("size %d: got %+v, brute force %+v", size, got, want)
					}
				}
			}
		})
	}
}

func TestChooseKnownCases(t *testing.T) {
	t.Parallel()
	all := topology.SetOf(0, 1, 2, 3, 4, 5, 6, 7)
	tests := []struct {
		name    string
		graph   *topology.Graph
		request topology.Request
		want    topology.GPUSet
	}{
		{"dgx-1: a board", topology.New(dgx1()), topology.Request{Available: all, Size: 4}, topology.SetOf(0, 1, 2, 3)},
		{
			"dgx-1: required 1 takes its best neighbour, not any", topology.New(dgx1()),
			topology.Request{Available: topology.SetOf(1, 2, 3, 4), Required: topology.SetOf(1), Size: 2},
			topology.SetOf(1, 2),
		},
		{
			"dgx-1, link 0-3 down: the whole board", topology.New(dgx1LinkDown()),
			topology.Request{Available: all, Size: 4}, topology.SetOf(4, 5, 6, 7),
		},
		{
			"dgx-1, GPU 3 lost: the other board", topology.New(dgx1Lost()),
			topology.Request{Available: all &^ topology.SetOf(3), Size: 4}, topology.SetOf(4, 5, 6, 7),
		},
		{
			"pairs: one GPU of a broken pair", topology.New(bridges(8)),
			topology.Request{Available: all &^ topology.SetOf(5), Busy: topology.SetOf(5), Size: 1}, topology.SetOf(4),
		},
		{
			"pairs: a GPU beside an unhealthy one rather than a free pair", topology.New(bridges(8)),
			topology.Request{Available: all &^ topology.SetOf(5), Size: 1}, topology.SetOf(4),
		},
		{
			"pcie: the switch that is on the broken socket", topology.New(pcieOnly(8, 2)),
			topology.Request{Available: all &^ topology.SetOf(4), Busy: topology.SetOf(4), Size: 2},
			topology.SetOf(6, 7),
		},
		{
			"nvswitch: a socket", topology.New(switched(8, 18, 4)),
			topology.Request{Available: all &^ topology.SetOf(1), Busy: topology.SetOf(1), Size: 4},
			topology.SetOf(4, 5, 6, 7),
		},
		{"uniform: the lowest", topology.New(uniform(8)), topology.Request{Available: all, Size: 3},
			topology.SetOf(0, 1, 2)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, ok := tt.graph.Choose(tt.request)
			if !ok || got.Set != tt.want {
				t.Errorf("chose %v, want %v", got.Set, tt.want)
			}
		})
	}
}

func TestChooseRequestsThatMakeNoSense(t *testing.T) {
	t.Parallel()
	g := topology.New(dgx1())
	tests := []struct {
		name    string
		request topology.Request
		want    topology.GPUSet
		ok      bool
	}{
		{"nothing", topology.Request{}, 0, true},
		{"negative size", topology.Request{Available: g.Everything(), Size: -3}, 0, true},
		{"too many", topology.Request{Available: topology.SetOf(1, 2), Size: 3}, 0, false},
		{"positions the graph does not have", topology.Request{Available: topology.SetOf(1, 20, 63), Size: 2}, 0,
			false},
		{
			"required is not available",
			topology.Request{Available: topology.SetOf(1), Required: topology.SetOf(7), Size: 2},
			topology.SetOf(1, 7), true,
		},
		{"fewer than required", topology.Request{Available: g.Everything(), Required: topology.SetOf(1, 7), Size: 1},
			topology.SetOf(1, 7), true},
		{"busy and available", topology.Request{Available: topology.SetOf(1), Busy: topology.SetOf(1), Size: 1},
			topology.SetOf(1), true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, ok := g.Choose(tt.request)
			if ok != tt.ok || got.Set != tt.want {
				t.Errorf("got %v, %v; want %v, %v", got.Set, ok, tt.want, tt.ok)
			}
		})
	}
	if _, ok := topology.New(nil).Choose(topology.Request{Size: 1}); ok {
		t.Error("a graph without GPUs has a choice")
	}
}

// A GPU more to choose from never lowers the score.
func TestChooseGrowsWithWhatIsAvailable(t *testing.T) {
	t.Parallel()
	for _, m := range slices.Concat(machines8(), machines16()) {
		g := topology.New(m.gpus)
		r := rand.New(rand.NewPCG(3, 3))
		for range 200 {
			request := draw(g, r)
			before, _ := g.Choose(request)
			request.Available |= topology.SetOf(r.IntN(g.Len()))
			after, _ := g.Choose(request)
			if after.Score < before.Score {
				t.Errorf("%s: %+v: one more available lowers the score from %d to %d", m.name, request, before.Score,
					after.Score)
			}
		}
	}
}

// Renaming the GPUs, or giving them in another order, changes nothing but names: the best score
// stays, whatever the numbering; and with the numbering kept the choice stays.
func TestChooseDoesNotDependOnNames(t *testing.T) {
	t.Parallel()
	for _, m := range slices.Concat(machines8(), machines16()) {
		r := rand.New(rand.NewPCG(5, 5))
		g := topology.New(m.gpus)
		shuffled := slices.Clone(m.gpus)
		r.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		if !g.Equal(topology.New(shuffled)) {
			t.Errorf("%s: the order of the GPUs changes the graph", m.name)
		}
		renumbered := slices.Clone(m.gpus)
		to := r.Perm(len(renumbered))
		for i := range renumbered {
			renumbered[i].Index = to[i]
		}
		h := topology.New(renumbered)
		for range 100 {
			request := draw(g, r)
			move := func(s topology.GPUSet) (moved topology.GPUSet) {
				for p := range s.All() {
					moved |= topology.SetOf(to[p])
				}
				return moved
			}
			a, _ := g.Choose(request)
			b, _ := h.Choose(topology.Request{
				Available: move(request.Available), Required: move(request.Required), Busy: move(request.Busy),
				Size: request.Size,
			})
			if a.Score != b.Score || a.Cost != b.Cost {
				t.Errorf("%s: %+v: %+v, renumbered %+v", m.name, request, a, b)
			}
		}
	}
}

func TestBestMatchesBruteForce(t *testing.T) {
	t.Parallel()
	for _, m := range machines8() {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			g := topology.New(m.gpus)
			r := rand.New(rand.NewPCG(9, 9))
			for range 100 {
				request := draw(g, r)
				var want []topology.Choice
				everySet(g, request, func(c topology.Choice) { want = append(want, c) })
				slices.SortStableFunc(want, func(a, b topology.Choice) int {
					return cmp.Or(cmp.Compare(b.Score, a.Score), cmp.Compare(a.Cost, b.Cost))
				})
				want = want[:min(5, len(want))]
				if diff := gocmp.Diff(want, g.Best(request, 5)); diff != "" {
					t.Fatalf("Best(%+v), -brute force +got:\n%s", request, diff)
				}
			}
		})
	}
}

func TestBestOfNothing(t *testing.T) {
	t.Parallel()
	g := topology.New(uniform(8))
	if got := g.Best(topology.Request{Available: g.Everything(), Size: 9}, 3); got != nil {
		t.Errorf("too many wanted: %v", got)
	}
	if got := g.Best(topology.Request{Available: g.Everything(), Size: 4}, 0); got != nil {
		t.Errorf("none wanted: %v", got)
	}
	if got := g.Best(topology.Request{Available: g.Everything(), Size: 4}, 1); len(got) != 1 {
		t.Errorf("one wanted: %v", got)
	}
}

// However long a search takes, it allocates no more than its memory once; and that is kept for the
// next one.
func TestChooseAllocatesNothingThatGrows(t *testing.T) {
	for _, gpus := range [][]inventory.GPU{uniform(8), random(16, 1), random(32, 1)} {
		g := topology.New(gpus)
		request := topology.Request{Available: g.Everything(), Size: g.Len() / 2}
		if n := testing.AllocsPerRun(20, func() { g.Choose(request) }); n > 6 {
			t.Errorf("%d GPUs: %v allocations", g.Len(), n)
		}
	}
}

func TestGraphAndPreferenceAreSafeForConcurrentUse(t *testing.T) {
	t.Parallel()
	gpus := cubes(16)
	g := topology.New(gpus)
	devices := partitions(gpus, 3, 1)
	p := topology.NewPreference(g, devices, topology.Distinct)
	want, _ := g.Choose(topology.Request{Available: g.Everything(), Size: 6})
	ids := ids(devices)
	wantIDs, err := p.Prefer(ids, nil, 6)
	if err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 50 {
				if got, _ := g.Choose(topology.Request{Available: g.Everything(), Size: 6}); got != want {
					t.Errorf("got %v, want %v", got, want)
				}
				if got, err := p.Prefer(ids, nil, 6); err != nil || !slices.Equal(got, wantIDs) {
					t.Errorf("got %v, %v, want %v", got, err, wantIDs)
				}
			}
		})
	}
	group.Wait()
}
