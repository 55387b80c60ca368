package resource_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

// A packing is what came of having pods in a queue scheduled to one node.
type packing struct{ minutes, failed, held int }

func (p packing) String() string {
	return fmt.Sprintf("%d minutes, %d pods failed, %d units in use on average", p.minutes, p.failed, p.held/max(1, p.minutes))
}

// pack schedules 120 pods of 1 to 16 units, which run for 5 to 60 minutes, to a node with four GPUs of 20 units: in each minute those that
// the node has room for by its count, in the order of the queue as far as they fit. A pod that no GPU has enough for fails, and is created
// anew at its place in the queue.
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

// TestPacking: with fit one no pod fails, and what that costs in time beside the others is bounded. The figures are in ADR 62.
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
