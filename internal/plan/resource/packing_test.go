package resource_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// A packing is what came of having pods in a queue scheduled to one node.
type packing struct{ minutes, failed, held int }

func (p packing) String() string {
	return fmt.Sprintf("%d minutes, %d pods failed, %d units in use on average", p.minutes, p.failed,
		p.held/max(1, p.minutes))
}

// pack schedules 120 pods of 1 to 16 units, which run for 5 to 60 minutes, to a node with four GPUs
// of 20 units: in each minute those that the node has room for by its count, in the order of the
// queue as far as they fit. A pod that no GPU has enough for fails, and is created again at its
// place in the queue.
func pack(t *testing.T, units resource.Units) (result packing) {
	t.Helper()
	var gpus []inventory.GPU
	var indices []resource.Ref
	for i := range 4 {
		gpus, indices = append(gpus, memory(i, 21)), append(indices, resource.Ref(fmt.Sprint(i)))
	}
	units.ReserveMiB = 1024
	r, _ := resource.New(inventory.Snapshot{GPUs: gpus}, inUnits(units, indices...)).Resource(unitsName)
	devices := slices.Collect(r.All())
	random := rand.New(rand.NewPCG(27, 1))
	type pod struct {
		size, runs int
		ids        []string
	}
	var queue, running []*pod
	for range 120 {
		queue = append(queue, &pod{size: 1 + random.IntN(16), runs: 5 + random.IntN(56)})
	}
	used, keep := map[string]bool{}, ""
	for len(queue) > 0 {
		result.minutes++
		var left []*pod
		for _, p := range running {
			if p.runs--; p.runs > 0 {
				left = append(left, p)
				continue
			}
			for _, id := range p.ids {
				delete(used, id)
			}
		}
		running = left
		var waiting []*pod
		for _, p := range queue {
			offered, _, gpu := r.OfferUnits(resource.UnitUse{Used: slices.Collect(maps.Keys(used))}, keep, false)
			keep = gpu
			var available []string
			for i, is := range offered {
				if is && !used[devices[i].ID] {
					available = append(available, devices[i].ID)
				}
			}
			if len(available) < p.size { // the scheduler does not send it
				waiting = append(waiting, p)
				continue
			}
			ids, err := r.Prefer(available, nil, p.size)
			if err != nil {
				result.failed++
				waiting = append(waiting, p)
				continue
			}
			p.ids, running = ids, append(running, p)
			for _, id := range ids {
				used[id] = true
			}
		}
		queue = waiting
		result.held += len(used)
	}
	return result
}

// TestPacking: with fit one no pod fails, and what that costs in time beside the others is bounded.
// The figures are in ADR 62.
func TestPacking(t *testing.T) {
	t.Parallel()
	one := pack(t, resource.Units{})
	fullest := pack(t, resource.Units{Fit: resource.FitSum})
	emptiest := pack(t, resource.Units{Fit: resource.FitSum, Fill: resource.FillEmptiest})
	t.Logf("one: %s", one)
	t.Logf("sum, fullest: %s", fullest)
	t.Logf("sum, emptiest: %s", emptiest)
	if one.failed > 0 || fullest.failed == 0 {
		t.Errorf("failed pods: %d with one, %d with sum", one.failed, fullest.failed)
	}
	if one.minutes > fullest.minutes*5/4 {
		t.Errorf("with one %d minutes, with sum %d", one.minutes, fullest.minutes)
	}
}

// A tick is a tenth of a second. The kubelet writes the node's status, by which the scheduler goes,
// every ten seconds. The daemon sees the end of a pod within a second, and the scheduler at once.
const (
	statusTicks  = 100
	readingTicks = 10
)

// behind is what came of pods that the scheduler sent by a status that may be ten seconds old.
type behind struct{ failed, seconds int }

// packBehind has 300 pods come, ten a second, each with 1 to `largest` units for 5 to 60 seconds,
// to a node with so many GPUs of 76 units. The scheduler sends a pod as soon as the node has room
// for it by the last status. A pod for which no GPU has enough units fails.
func packBehind(t *testing.T, units resource.Units, count, largest int) (result behind) {
	t.Helper()
	const pods = 300
	var gpus []inventory.GPU
	var indices []resource.Ref
	for i := range count {
		gpus, indices = append(gpus, memory(i, 77)), append(indices, resource.Ref(fmt.Sprint(i)))
	}
	units.ReserveMiB = 1024
	r, _ := resource.New(inventory.Snapshot{GPUs: gpus}, inUnits(units, indices...)).Resource(unitsName)
	devices := slices.Collect(r.All())
	random := rand.New(rand.NewPCG(300, 1))
	type pod struct {
		size, ends int
		ids        []string
	}
	listed := map[string]bool{}   // the units that the kubelet has as Healthy
	held := map[string]bool{}     // those that the kubelet has given to pods that run
	believed := map[string]bool{} // those that the daemon takes for held
	keep := ""
	list := func() {
		var offered []bool
		offered, _, keep = r.OfferUnits(resource.UnitUse{Used: slices.Collect(maps.Keys(believed))}, keep, false)
		for i, is := range offered {
			listed[devices[i].ID] = is
		}
	}
	healthy := func() (n int) {
		for _, is := range listed {
			if is {
				n++
			}
		}
		return n
	}
	list()
	status, requested, made := healthy(), 0, 0
	var queue, running []*pod
	for tick := 0; made < pods || len(queue)+len(running) > 0; tick++ {
		if made < pods {
			queue = append(queue, &pod{size: 1 + random.IntN(largest), ends: 50 + random.IntN(550)})
			made++
		}
		running = slices.DeleteFunc(running, func(p *pod) bool {
			if p.ends > tick {
				return false
			}
			requested -= p.size
			for _, id := range p.ids {
				delete(held, id)
			}
			return true
		})
		if tick%readingTicks == 3 {
			clear(believed)
			maps.Copy(believed, held)
			list()
		}
		if tick%statusTicks == 7 {
			status = healthy()
		}
		queue = slices.DeleteFunc(queue, func(p *pod) bool {
			if requested+p.size > status {
				return false
			}
			var available []string
			for _, d := range devices {
				if listed[d.ID] && !held[d.ID] {
					available = append(available, d.ID)
				}
			}
			ids, err := r.Prefer(available, nil, p.size)
			if err != nil || len(available) < p.size {
				result.failed++
				return true
			}
			p.ids, p.ends, running = ids, tick+p.ends, append(running, p)
			requested += p.size
			for _, id := range ids {
				held[id], believed[id] = true, true
			}
			list()
			return true
		})
		result.seconds = tick / 10
	}
	return result
}

// TestPackingBehindTheStatus: the scheduler learns of the end of a pod before it learns what that
// leaves offered. On a node that is full all along, fewer pods fail for that with fit one than
// with sum; none on a node with one GPU, and none of up to an eighth of a GPU on one with eight.
// The figures are in docs/sharing.md and ADR 62.
func TestPackingBehindTheStatus(t *testing.T) {
	t.Parallel()
	for _, gpus := range []int{1, 2, 4, 8} {
		for _, part := range []int{2, 4, 8, 16} {
			t.Run(fmt.Sprintf("%d GPUs, pods of up to 1 of %d parts", gpus, part), func(t *testing.T) {
				t.Parallel()
				one := packBehind(t, resource.Units{}, gpus, 76/part)
				sum := packBehind(t, resource.Units{Fit: resource.FitSum}, gpus, 76/part)
				t.Logf("%d GPUs, pods of up to 1/%d of one: of 300 fail %d in %d s with one, %d in %d s with sum", gpus, part,
					one.failed, one.seconds, sum.failed, sum.seconds)
				switch {
				case (gpus == 1 || gpus*part >= 64) && one.failed > 0:
					t.Errorf("with one %d pods failed, want none", one.failed)
				case gpus > 2 && one.failed > sum.failed:
					t.Errorf("with one %d pods failed, with sum %d", one.failed, sum.failed)
				}
			})
		}
	}
}
