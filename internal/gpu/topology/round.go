package topology

import "cmp"

// A round is the state of one request to a Preference.
type round struct {
	p *Preference
	// states are those of the devices, by number.
	states []choice
	// available is the number of devices that are candidates or chosen, chosen that of the latter.
	available, chosen int
	gpus              []gpuRound
	units             []unitRound
	// tied are the GPUs that are equally good for the policy.
	tied []int32
}

// gpuRound is what a round knows of a physical GPU.
type gpuRound struct {
	load       int // devices in use: not to be had though healthy, or chosen
	picked     int // devices chosen
	candidates int // devices that can be chosen now
}

// unitRound is what a round knows of a GPU or MIG device.
type unitRound struct {
	load int // as that of gpuRound
	next int // the place in the unit's devices before which no candidate is left
}

// choice says whether a device is chosen in a round.
type choice uint8

const (
	unavailable choice = iota
	candidate
	chosen
)

func newRound(p *Preference) *round {
	return &round{
		p:      p,
		states: make([]choice, len(p.devices)),
		gpus:   make([]gpuRound, len(p.gpus)),
		units:  make([]unitRound, len(p.units)),
		tied:   make([]int32, 0, len(p.gpus)),
	}
}

// choose takes a device into the answer.
func (r *round) choose(number int32) {
	d := r.p.devices[number]
	r.states[number] = chosen
	r.chosen++
	r.gpus[d.gpu].picked++
	r.gpus[d.gpu].load++
	r.units[d.unit].load++
}

// fill chooses up to `missing` of the candidates that are healthy, or of those that are not, by the
// policy.
func (r *round) fill(healthy bool, missing int) {
	r.count(healthy)
	for missing > 0 && r.tie() {
		gpus, each := min(missing, len(r.tied)), 1
		if r.p.policy == Packed {
			// One GPU after another: it is the one most in use as soon as the first of its devices is taken.
			most := 0
			for _, gpu := range r.tied {
				most = max(most, r.gpus[gpu].candidates)
			}
			gpus, each = min((missing+most-1)/most, len(r.tied)), most
		}
		for _, gpu := range r.nearest(gpus) {
			take := min(each, missing, r.gpus[gpu].candidates)
			for range take {
				r.take(gpu, healthy)
			}
			missing -= take
		}
	}
}

// count counts the candidates that are healthy, or those that are not, and what is in use beside
// them.
func (r *round) count(healthy bool) {
	clear(r.units)
	for i := range r.gpus {
		r.gpus[i] = gpuRound{picked: r.gpus[i].picked}
	}
	for i, d := range r.p.devices {
		switch s := r.states[i]; {
		case s == candidate && d.healthy == healthy:
			r.gpus[d.gpu].candidates++
		case s == chosen || s == unavailable && d.healthy:
			r.gpus[d.gpu].load++
			r.units[d.unit].load++
		}
	}
}

// tie sets r.tied to the GPUs that suit the policy best, by number; false if no candidates are
// left.
func (r *round) tie() bool {
	r.tied = r.tied[:0]
	for i, gpu := range r.gpus {
		if gpu.candidates == 0 {
			continue
		}
		order := -1
		if len(r.tied) > 0 {
			order = r.compare(gpu, r.gpus[r.tied[0]])
		}
		if order < 0 {
			r.tied = r.tied[:0]
		}
		if order <= 0 {
			r.tied = append(r.tied, int32(i))
		}
	}
	return len(r.tied) > 0
}

// compare orders GPUs by how well they suit the policy, the best first.
func (r *round) compare(a, b gpuRound) int {
	load, picked := cmp.Compare(a.load, b.load), cmp.Compare(a.picked, b.picked)
	switch r.p.policy {
	case Packed:
		return cmp.Or(-load, -picked)
	case Distinct:
		return cmp.Or(picked, load)
	default:
		return cmp.Or(load, picked)
	}
}

// nearest returns `count` of the tied GPUs, by number: those that are best connected with each
// other and with the other GPUs picked so far. All that the graph knows come before all that it
// does not.
func (r *round) nearest(count int) []int32 {
	if count == len(r.tied) {
		return r.tied
	}
	var tied, picked, busy GPUSet
	for _, gpu := range r.tied {
		tied |= r.bit(gpu)
	}
	for i, gpu := range r.gpus {
		if gpu.picked > 0 {
			picked |= r.bit(int32(i))
		}
		if gpu.load > 0 {
			busy |= r.bit(int32(i))
		}
	}
	picked &^= tied
	known := min(count, tied.Len())
	// Known is at most what is available, so there is a choice.
	choice, _ := r.p.graph.Choose(Request{
		Available: tied, Required: picked, Busy: busy, Size: picked.Len() + known,
	})
	unknown := count - known
	nearest := r.tied[:0]
	for _, gpu := range r.tied {
		bit := r.bit(gpu)
		if bit == 0 && unknown > 0 {
			unknown--
			nearest = append(nearest, gpu)
		}
		if bit&choice.Set != 0 {
			nearest = append(nearest, gpu)
		}
	}
	return nearest
}

// bit returns the GPU as a set; the empty set if the graph does not have it.
func (r *round) bit(gpu int32) GPUSet {
	if position := r.p.gpus[gpu].position; position >= 0 {
		return SetOf(position)
	}
	return 0
}

// take chooses a candidate that stands on a GPU which has one: from the unit of which the most, or
// the fewest, devices are in use.
func (r *round) take(gpu int32, healthy bool) {
	best, device := int32(-1), int32(-1)
	for _, unit := range r.p.gpus[gpu].units {
		number, ok := r.candidate(unit, healthy)
		if !ok {
			continue
		}
		order := -1
		if best >= 0 {
			order = cmp.Compare(r.units[unit].load, r.units[best].load)
			if r.p.policy == Packed {
				order = -order
			}
		}
		if order < 0 {
			best, device = unit, number
		}
	}
	r.gpus[gpu].candidates--
	r.choose(device)
}

// candidate returns the first candidate of a unit.
func (r *round) candidate(unit int32, healthy bool) (int32, bool) {
	devices := r.p.units[unit]
	u := &r.units[unit]
	for ; u.next < len(devices); u.next++ {
		number := devices[u.next]
		if r.states[number] == candidate && r.p.devices[number].healthy == healthy {
			return number, true
		}
	}
	return 0, false
}

// named returns the IDs of the `count` devices in either of two states, in the order of the
// Preference.
func (r *round) named(count int, a, b choice) []string {
	ids := make([]string, 0, count)
	for i, s := range r.states {
		if s == a || s == b {
			ids = append(ids, r.p.devices[i].id)
		}
	}
	return ids
}
