package topology_test

import (
	"container/heap"
	"math/rand/v2"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
)

// A placer is a policy: it chooses `size` of the free GPUs.
type placer func(free, busy topology.GPUSet, size int) topology.GPUSet

// A day is pods that come and go on one node.
type day struct {
	arrivals []float64
	holds    []float64
	sizes    []int
}

// A mix says how many of twenty pods want how many GPUs.
type mix []int

// The mixes of pods. Many pods of one GPU break neighbourhoods; pods of eight GPUs mend them.
var (
	lightMix = mix{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 4, 4, 4, 4, 8}
	heavyMix = mix{1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 4, 4, 4, 4, 4, 4, 8, 8}
)

// newDay draws the pods of a day for a node with so many GPUs, without those that are too large for
// it. They come so often that they want seven tenths of the node on average.
func newDay(pods, gpus int, sizes mix, seed uint64) day {
	r := rand.New(rand.NewPCG(seed, 0))
	var d day
	mean := 0.0
	for range pods {
		size := gpus + 1
		for size > gpus {
			size = sizes[r.IntN(len(sizes))]
		}
		d.sizes = append(d.sizes, size)
		mean += float64(size) / float64(pods)
	}
	clock := 0.0
	for range pods {
		clock += r.ExpFloat64() * mean / (0.7 * float64(gpus))
		d.arrivals = append(d.arrivals, clock)
		d.holds = append(d.holds, r.ExpFloat64())
	}
	return d
}

// A result is how good the placements of a day were.
type result struct {
	// mean is the mean score of the pods with two GPUs or more, each divided by the best of its size
	// on the empty node.
	mean float64
	// fours is the part of the pods with four GPUs that got that best.
	fours float64
}

// live places the pods of a day, each as soon as those before it are placed and enough GPUs are
// free.
func (d day) live(g *topology.Graph, healthy topology.GPUSet, place placer) result {
	best := map[int]int64{}
	for _, size := range d.sizes {
		if _, known := best[size]; !known {
			choice, _ := g.Choose(topology.Request{Available: healthy, Size: size})
			best[size] = choice.Score
		}
	}
	scores := map[topology.GPUSet]int64{} // the same sets come again and again
	var running departures
	free := healthy
	clock, scored, fours, atBest := 0.0, 0, 0, 0
	var r result
	for i, size := range d.sizes {
		clock = max(clock, d.arrivals[i])
		for len(running) > 0 && (running[0].at <= clock || free.Len() < size) {
			gone := heap.Pop(&running).(departure)
			clock = max(clock, gone.at)
			free |= gone.set
		}
		set := place(free, healthy&^free, size)
		if set.Len() != size || set&^free != 0 {
			panic("the policy gave what it does not have")
		}
		free &^= set
		heap.Push(&running, departure{clock + d.holds[i], set})
		if best[size] == 0 {
			continue
		}
		score, known := scores[set]
		if !known {
			score = within(g, set)
			scores[set] = score
		}
		scored++
		r.mean += float64(score) / float64(best[size])
		if size == 4 {
			fours++
			if score == best[size] {
				atBest++
			}
		}
	}
	r.mean /= float64(max(scored, 1))
	r.fours = float64(atBest) / float64(max(fours, 1))
	return r
}

// within returns the sum of the scores of the pairs in a set.
func within(g *topology.Graph, set topology.GPUSet) int64 {
	var sum int64
	for a := range set.All() {
		for b := range set.All() {
			if b == a {
				break
			}
			sum += int64(g.Score(a, b))
		}
	}
	return sum
}

type departure struct {
	at  float64
	set topology.GPUSet
}

// departures is a heap, the next departure first.
type departures []departure

func (d departures) Len() int           { return len(d) }
func (d departures) Less(i, j int) bool { return d[i].at < d[j].at }
func (d departures) Swap(i, j int)      { d[i], d[j] = d[j], d[i] }
func (d *departures) Push(x any)        { *d = append(*d, x.(departure)) }
func (d *departures) Pop() any {
	last := (*d)[len(*d)-1]
	*d = (*d)[:len(*d)-1]
	return last
}

// usable returns the GPUs of a graph that are not Lost.
func usable(g *topology.Graph, gpus []inventory.GPU) topology.GPUSet {
	healthy := g.Everything()
	for _, gpu := range gpus {
		if p, _ := g.Position(gpu.UUID); gpu.Health.State == inventory.Lost {
			healthy &^= topology.SetOf(p)
		}
	}
	return healthy
}

// policies are the names of the placers.
var policies = []string{"random", "first fit", "reference", "this one"}

// placers returns the policies to compare.
func placers(g *topology.Graph) []placer {
	r := rand.New(rand.NewPCG(1, 1))
	return []placer{
		func(free, _ topology.GPUSet, size int) topology.GPUSet {
			positions := slices.Collect(free.All())
			r.Shuffle(len(positions), func(i, j int) { positions[i], positions[j] = positions[j], positions[i] })
			return topology.SetOf(positions[:size]...)
		},
		func(free, _ topology.GPUSet, size int) topology.GPUSet {
			return topology.SetOf(slices.Collect(free.All())[:size]...)
		},
		remembered(newReference(g).place),
		remembered(func(free, busy topology.GPUSet, size int) topology.GPUSet {
			choice, _ := g.Choose(topology.Request{Available: free, Busy: busy, Size: size})
			return choice.Set
		}),
	}
}

// remembered returns a policy that is asked once about what comes again and again in a day: it has
// to go by its arguments alone.
func remembered(p placer) placer {
	type question struct {
		free, busy topology.GPUSet
		size       int
	}
	answers := map[question]topology.GPUSet{}
	return func(free, busy topology.GPUSet, size int) topology.GPUSet {
		q := question{free, busy, size}
		set, known := answers[q]
		if !known {
			set = p(free, busy, size)
			answers[q] = set
		}
		return set
	}
}
