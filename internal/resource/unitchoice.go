package resource

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/topology"
)

// InUnits reports whether the devices of the resource are units of memory, which the plan has.
func (r Resource) InUnits() bool { return r.units != nil }

// unitRules say how the units of a resource are offered and chosen.
type unitRules struct {
	fit     Fit
	fill    Fill
	clients map[string]int // by UUID of the GPU: how many containers can hold units of it
	gpus    []unitsOf
	at      map[string]int // position in gpus, by UUID
}

// of returns the rules for other devices.
func (u *unitRules) of(devices []Device) *unitRules {
	made := &unitRules{fit: u.fit, fill: u.fill, clients: u.clients, gpus: unitGPUs(devices), at: map[string]int{}}
	for i, of := range made.gpus {
		made.at[of.gpu] = i
	}
	return made
}

// equal reports whether units are offered and chosen alike.
func (u *unitRules) equal(other *unitRules) bool {
	if u == nil || other == nil {
		return u == other
	}
	return u.fit == other.fit && u.fill == other.fill && maps.Equal(u.clients, other.clients)
}

// unitsOf are the units of a GPU in a list.
type unitsOf struct {
	gpu     string
	index   string
	healthy bool
	devices []Device // from the unit 0 on
}

// unitGPUs returns the units of a resource, GPU by GPU, in the order of the list.
func unitGPUs(devices []Device) []unitsOf {
	var all []unitsOf
	for first := 0; first < len(devices); {
		d, next := devices[first], first+1
		for next < len(devices) && devices[next].UUID == d.UUID {
			next++
		}
		all = append(all, unitsOf{gpu: d.UUID, index: d.Index, healthy: d.Healthy, devices: devices[first:next]})
		first = next
	}
	return all
}

// preferUnits returns `size` of the available units: all of one GPU, with the lowest numbers. Those that left the plan have the highest.
func (r Resource) preferUnits(available, required []string, size int) ([]string, error) {
	gpus, free, known := r.units.gpus, make([][]bool, len(r.units.gpus)), 0
	counts, left := make([]int, len(gpus)), make([][]string, len(gpus))
	for _, ids := range [...][]string{available, required} {
		for _, id := range ids {
			g, n := r.unit(id)
			switch {
			case g < 0:
				continue
			case n >= len(gpus[g].devices):
				left[g] = append(left[g], id)
				continue
			case free[g] == nil:
				free[g] = make([]bool, len(gpus[g].devices))
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
		return nil, &topology.TooFewError{Wanted: size, Available: append(r.named(free), slices.Concat(left...)...)}
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
		if is {
			take(gpus[best].devices[n].ID)
		}
	}
	for _, id := range left[best] {
		take(id)
	}
	return taken, nil
}

// bestGPU returns the position of the GPU that a container best gets so many units of; -1 if none has enough.
func (r Resource) bestGPU(counts []int, required []string, size int) int {
	best := -1
	for g, gpu := range r.units.gpus {
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
			if gpu.healthy != r.units.gpus[best].healthy {
				order = 1
				if gpu.healthy {
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

// noneFits says that no GPU has enough units.
func (r Resource) noneFits(counts []int, size int) error {
	most := slices.Max(counts)
	return fmt.Errorf("the container asks for %d units of %s, which must be of one GPU, and no GPU has more than %d to give; create the pod "+
		"anew, so that it is scheduled again", size, r.Name, most)
}

// named returns the IDs of units.
func (r Resource) named(units [][]bool) []string {
	var ids []string
	for g, of := range units {
		for n, is := range of {
			if is {
				ids = append(ids, r.units.gpus[g].devices[n].ID)
			}
		}
	}
	return ids
}

// unit returns the position of a unit's GPU and the number of the unit, which may be one that left the plan. The position is -1 if the
// ID is not that of a unit of these GPUs.
func (r Resource) unit(id string) (gpu, n int) {
	uuid, number, shared := strings.Cut(id, replicaMark)
	gpu, known := r.units.at[uuid]
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
	return fmt.Errorf("the container was chosen %s units of %s, and its memory must be of one GPU; create the pod anew, so that it is "+
		"scheduled again", strings.Join(parts, " and "), r.Name)
}

// A UnitUse is what is known of the units that containers hold.
type UnitUse struct {
	// Used reports whether a container holds a unit, or was given it a moment ago.
	Used func(id string) bool
	// Containers counts the containers that hold units, by the UUID of the GPU.
	Containers map[string]int
	// Departing counts the units that containers hold and the plan no longer has, by the UUID of the GPU.
	Departing map[string]int
}

// OfferUnits returns which units are on offer, in the order of Devices, and with FitOne whose free units are: those of the GPU with the
// most. Units that containers hold are on offer always, so that the node's count is what the scheduler subtracts for them. The GPU keep
// stays the one if it has as many as any other; with stay, if it has any.
func (r Resource) OfferUnits(use UnitUse, keep string, stay bool) (offered []bool, gpu string) {
	free, best := make([]int, len(r.units.gpus)), -1
	for g, of := range r.units.gpus {
		free[g] = r.freeUnits(of, use)
		if best < 0 || free[g] > free[best] || free[g] == free[best] && of.gpu == keep {
			best = g
		}
	}
	if g, known := r.units.at[keep]; known && stay && free[g] > 0 {
		best = g
	}
	offered = make([]bool, 0, len(r.Devices))
	for g, of := range r.units.gpus {
		left := free[g]
		if r.units.fit == FitOne && g != best {
			left = 0
		}
		for _, d := range of.devices {
			switch {
			case !d.Healthy:
				offered = append(offered, false)
			case use.Used(d.ID):
				offered = append(offered, true)
			default:
				offered = append(offered, left > 0)
				left--
			}
		}
	}
	if best >= 0 && r.units.fit == FitOne {
		gpu = r.units.gpus[best].gpu
	}
	return offered, gpu
}

// freeUnits counts the units of a GPU that a container can get.
func (r Resource) freeUnits(of unitsOf, use UnitUse) int {
	if use.Containers[of.gpu] >= r.units.clients[of.gpu] {
		return 0
	}
	free := -use.Departing[of.gpu]
	for _, d := range of.devices {
		if d.Healthy && !use.Used(d.ID) {
			free++
		}
	}
	return max(0, free)
}

// UnitClients returns how many containers can hold units of a GPU at the same time.
func (r Resource) UnitClients(gpu string) int {
	if r.units == nil {
		return 0
	}
	return r.units.clients[gpu]
}
