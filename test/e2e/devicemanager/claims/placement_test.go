package claims

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
)

// A pod wants some GPUs for a while.
type pod struct {
	size           int
	arrives, holds float64
}

// pods draws pods for a node that is 70 % full on average, with the mix of docs/dev/topology.md.
func pods(n, gpus int) []pod {
	r := rand.New(rand.NewPCG(1, 0))
	sizes := []int{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 4, 4, 4, 4, 8}
	var drawn []pod
	clock, mean := 0.0, 2.2
	for len(drawn) < n {
		size := sizes[r.IntN(len(sizes))]
		clock += r.ExpFloat64() * mean / (0.7 * float64(gpus))
		drawn = append(drawn, pod{size, clock, r.ExpFloat64()})
	}
	return drawn
}

// A placer gives a pod of a size GPUs that are free, by position; nil if it cannot.
type placer func(free topology.GPUSet, size int) topology.GPUSet

// live places the pods in order, each when enough GPUs are free, and returns the mean score of
// those with several GPUs: of each, divided by the best of its size on the empty node.
func live(t *testing.T, g *topology.Graph, day []pod, place placer) float64 {
	t.Helper()
	type running struct {
		until float64
		set   topology.GPUSet
	}
	var now []running
	free, clock, sum, scored := g.Everything(), 0.0, 0.0, 0
	for _, p := range day {
		clock = max(clock, p.arrives)
		for {
			first := -1
			for i, r := range now {
				if first < 0 || r.until < now[first].until {
					first = i
				}
			}
			if first < 0 || now[first].until > clock && free.Len() >= p.size {
				break
			}
			clock = max(clock, now[first].until)
			free |= now[first].set
			now = append(now[:first], now[first+1:]...)
		}
		set := place(free, p.size)
		if set.Len() != p.size || set&^free != 0 {
			t.Fatalf("of %v a pod with %d GPUs got %v", free, p.size, set)
		}
		free &^= set
		now = append(now, running{clock + p.holds, set})
		if best, _ := g.Choose(topology.Request{Available: g.Everything(), Size: p.size}); best.Score > 0 {
			sum += float64(score(g, set)) / float64(best.Score)
			scored++
		}
	}
	return sum / float64(scored)
}

func score(g *topology.Graph, set topology.GPUSet) (sum int) {
	for a := range set.All() {
		for b := range set.All() {
			if a < b {
				sum += g.Score(a, b)
			}
		}
	}
	return sum
}

// aligned is a claim of GPUs of one group if that is possible.
const aligned = `
metadata: {name: c}
spec:
  devices:
    requests:
    - name: r
      firstAvailable:
      - {name: aligned, deviceClassName: gpu.nvidia.com, count: %d}
      - {name: any, deviceClassName: gpu.nvidia.com, count: %[1]d}
    constraints: [{requests: [r/aligned], matchAttribute: gpu-device-plugin.github.io/linkGroup%[1]d}]
`

// TestPlacement has pods come and go on nodes, and compares ways to give them GPUs: the choice of
// the device plugin, which is exact; claims that are aligned if possible; and claims that name a
// count alone, for which the scheduler takes the first free devices. For comparison, those are also
// placed with the devices in PCI order.
func TestPlacement(t *testing.T) {
	const n = 500
	t.Logf("%-14s %-14s %-20s %-10s %s", "machine", "device plugin", "aligned if possible", "first fit",
		"first fit in PCI order")
	for _, test := range []struct {
		machine            string
		aligned, unaligned float64 // at least, of what the device plugin reaches
	}{
		{"dgx-1", 0.93, 0.7}, {"dgx-2", 0.99, 0.97}, {"dgx-h100", 0.99, 0.99}, {"l40s-x8", 0.95, 0.7},
	} {
		s := scan(t, test.machine, inventory.Health{State: inventory.Healthy})
		g := topology.New(s.GPUs)
		byName, names := map[string]int{}, map[int]string{}
		for i := range s.GPUs { // minors, numbers and positions are the same on these machines
			names[i] = fmt.Sprintf("gpu-%d", i)
			byName[names[i]] = i
		}
		by := func(scheduler *scheduler, claim func(size int) *resourceapi.ResourceClaim) placer {
			return func(free topology.GPUSet, size int) (set topology.GPUSet) {
				scheduler.taken.Delete(scheduler.taken.UnsortedList()...)
				for p := range (g.Everything() &^ free).All() {
					scheduler.take(names[p])
				}
				_, devices := scheduler.allocate(claim(size))
				for _, d := range devices {
					set |= topology.SetOf(byName[d])
				}
				return set
			}
		}
		day := pods(n, len(s.GPUs))
		plugin := live(t, g, day, func(free topology.GPUSet, size int) topology.GPUSet {
			choice, _ := g.Choose(topology.Request{Available: free, Busy: g.Everything() &^ free, Size: size})
			return choice.Set
		})
		counted := func(size int) *resourceapi.ResourceClaim { return request(t, "gpu.nvidia.com", size, "") }
		firstFit := live(t, g, day, by(newScheduler(t, s), counted))
		inOrder := newScheduler(t, s)
		for _, slice := range inOrder.slices {
			slices.SortFunc(slice.Spec.Devices, func(a, b resourceapi.Device) int { return byName[a.Name] - byName[b.Name] })
		}
		ordered := live(t, g, day, by(inOrder, counted))
		grouped := live(t, g, day, by(newScheduler(t, s), func(size int) *resourceapi.ResourceClaim {
			if size == 1 {
				return counted(1)
			}
			return parse(t, fmt.Sprintf(aligned, size))
		}))
		t.Logf("%-14s %-14.3f %-20.3f %-10.3f %.3f", test.machine, plugin, grouped, firstFit, ordered)
		if grouped < test.aligned*plugin || firstFit < test.unaligned*plugin || firstFit < ordered-0.02 {
			t.Errorf("%s: the device plugin reaches %.3f, claims aligned if possible %.3f, others %.3f", test.machine, plugin,
				grouped, firstFit)
		}
	}
}
