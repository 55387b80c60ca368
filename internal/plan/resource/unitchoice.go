package resource

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
)

// InUnits reports whether the devices of the resource are units of memory, and the plan has them.
func (r Resource) InUnits() bool { return r.units != nil }

// unitRules are the numbers of units of each GPU of a resource, and how units are offered and
// chosen.
type unitRules struct {
	fit  Fit
	fill Fill
	gpus map[string]unitsOf // by UUID
}

// equal reports whether the rules are the same.
func (u *unitRules) equal(other *unitRules) bool {
	if u == nil || other == nil {
		return u == other
	}
	return u.fit == other.fit && u.fill == other.fill && maps.Equal(u.gpus, other.gpus)
}

// unitsOf are the units of a GPU.
type unitsOf struct {
	count   int
	clients int // number of containers that can hold units at the same time
}

// UnitCount returns the number of units of a GPU. Units are numbered from 0.
func (r Resource) UnitCount(gpu string) int {
	if g, there := r.at[gpu]; there && r.units != nil {
		return r.counts[g]
	}
	return 0
}

// preferUnits returns `size` of the available units: all of one GPU, with the lowest numbers. Units
// that left the plan have the highest numbers.
func (r Resource) preferUnits(available, required []string, size int) ([]string, error) {
	gpus, free, known := len(r.Devices), make([][]bool, len(r.Devices)), 0
	counts, left := make([]int, gpus), make([][]string, gpus)
	for _, ids := range [...][]string{available, required} {
		for _, id := range ids {
			g, n := r.unit(id)
			switch {
			case g < 0:
				continue
			case n >= r.counts[g]:
				left[g] = append(left[g], id)
				continue
			case free[g] == nil:
				free[g] = make([]bool, r.counts[g])
			}
			if !free[g][n] {
				free[g][n] = true
				counts[g]++
				known++
			}
		}
	}
	for g, ids := range left {
		slices.Sort(ids)
		left[g] = slices.Compact(ids)
		counts[g] += len(left[g])
		known += len(left[g])
	}
	if known < size {
		return nil, &topology.TooFewError{Wanted: size, Available: append(r.unitIDs(free), slices.Concat(left...)...)}
	}
	taken := slices.Clone(required)
	best := r.bestGPU(counts, required, size)
	if best < 0 {
		return nil, r.noneFits(counts, size)
	}
	must := make(map[string]bool, len(required))
	for _, id := range required {
		must[id] = true
	}
	take := func(id string) {
		if len(taken) < size && !must[id] {
			taken = append(taken, id)
		}
	}
	for n, is := range free[best] {
		if is && len(taken) < size { // an ID is made for each unit
			take(replicaID(r.Devices[best].UUID, n))
		}
	}
	for _, id := range left[best] {
		take(id)
	}
	return taken, nil
}

// bestGPU returns the position of the best GPU for a container with so many units; -1 if no GPU has
// enough.
func (r Resource) bestGPU(counts []int, required []string, size int) int {
	best := -1
	for g, gpu := range r.Devices {
		if counts[g] < size || counts[g] == 0 || slices.ContainsFunc(required, func(id string) bool {
			of, _ := r.unit(id)
			return of != g
		}) {
			continue
		}
		better := best < 0
		if !better {
			order := cmp.Compare(counts[g], counts[best])
			if r.units.fill == FillEmptiest {
				order = -order
			}
			if gpu.Healthy != r.Devices[best].Healthy {
				order = 1
				if gpu.Healthy {
					order = -1
				}
			}
			better = order < 0
		}
		if better {
			best = g
		}
	}
	return best
}

// noneFits returns the error that no GPU has enough units.
func (r Resource) noneFits(counts []int, size int) error {
	most := slices.Max(counts)
	return fmt.Errorf("%d units of %s are not free on one GPU: no GPU has more than %d; create the pod again, so that "+
		"it is scheduled again", size, r.Name, most)
}

// unitIDs returns the IDs of units.
func (r Resource) unitIDs(units [][]bool) []string {
	var ids []string
	for g, of := range units {
		for n, is := range of {
			if is {
				ids = append(ids, replicaID(r.Devices[g].UUID, n))
			}
		}
	}
	return ids
}

// unit returns the position of a unit's GPU and the number of the unit, also for a unit that left
// the plan. The position is -1 for any other ID.
func (r Resource) unit(id string) (gpu, n int) {
	uuid, number, shared := strings.Cut(id, replicaMark)
	gpu, known := r.at[uuid]
	n, err := strconv.Atoi(number)
	if !shared || !known || err != nil || n < 0 || len(number) > 1 && number[0] < '1' {
		return -1, 0
	}
	return gpu, n
}

// admitUnits returns why a container may not be given these units together; nil if it may.
func (r Resource) admitUnits(devices []Device) error {
	counts := map[string]int{}
	var order []string
	for _, d := range devices {
		if counts[d.Index] == 0 {
			order = append(order, d.Index)
		}
		counts[d.Index]++
	}
	if len(order) < 2 {
		return nil
	}
	var parts []string
	for _, index := range order {
		parts = append(parts, fmt.Sprintf("%d of GPU %s", counts[index], index))
	}
	return fmt.Errorf("%s units of %s were chosen for one container, but they must be of one GPU; create the pod "+
		"again, so that it is scheduled again", strings.Join(parts, " and "), r.Name)
}

// A UnitUse is what is known about the units that containers hold.
type UnitUse struct {
	// Used are the IDs of the units that a container holds or has just been given. Other IDs are
	// ignored.
	Used []string
	// Containers is the number of containers with units, by the UUID of the GPU.
	Containers map[string]int
	// Departing is the number of units that containers hold and the plan no longer has, by the UUID
	// of the GPU.
	Departing map[string]int
	// Kept is the number of units that left the plan, have no container and are still offered for
	// now, by the UUID of the GPU.
	Kept map[string]int
}

// OfferUnits returns which units are offered, in the order of All. With FitOne it also returns the
// GPU whose free units are offered: the GPU with the most. Units of containers are always offered,
// because the scheduler subtracts them from the node's count. The GPU keep stays the chosen one if
// it has as many free units as any other; with stay, if it has any. The result kept is the number
// of the kept units that are offered, by the UUID of the GPU.
func (r Resource) OfferUnits(use UnitUse, keep string, stay bool) (offered []bool, kept map[string]int, gpu string) {
	used := r.usedUnits(use)
	free, best := make([]int, len(r.Devices)), -1
	for g, d := range r.Devices {
		free[g] = r.freeUnits(d, used[g], use)
		if best < 0 || free[g] > free[best] || free[g] == free[best] && d.UUID == keep {
			best = g
		}
	}
	if g, known := r.at[keep]; known && stay && free[g] > 0 {
		best = g
	}
	kept = map[string]int{}
	for g, d := range r.Devices {
		left := free[g]
		if r.units.fit == FitOne && g != best {
			left = 0
		}
		for _, held := range used[g] {
			offered = append(offered, d.Healthy && (held || left > 0))
			if !held {
				left--
			}
		}
		kept[d.UUID] = max(0, left)
	}
	if best >= 0 && r.units.fit == FitOne {
		gpu = r.Devices[best].UUID
	}
	return offered, kept, gpu
}

// usedUnits returns which units containers hold, by the position of the GPU and the number of the
// unit.
func (r Resource) usedUnits(use UnitUse) [][]bool {
	used := make([][]bool, len(r.Devices))
	for g := range r.Devices {
		used[g] = make([]bool, r.counts[g])
	}
	for _, id := range use.Used {
		if g, n := r.unit(id); g >= 0 && n < len(used[g]) {
			used[g][n] = true
		}
	}
	return used
}

// freeUnits returns the number of units of a GPU that a container can get.
func (r Resource) freeUnits(gpu Device, used []bool, use UnitUse) int {
	if !gpu.Healthy || use.Containers[gpu.UUID] >= r.units.gpus[gpu.UUID].clients {
		return 0
	}
	free := use.Kept[gpu.UUID] - use.Departing[gpu.UUID]
	for _, held := range used {
		if !held {
			free++
		}
	}
	return max(0, free)
}

// UnitClients returns the number of containers that can hold units of a GPU at the same time.
func (r Resource) UnitClients(gpu string) int {
	if r.units == nil {
		return 0
	}
	return r.units.gpus[gpu].clients
}
