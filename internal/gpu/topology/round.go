package topology

import "cmp"

// A round is the state of one request to a Preference.
type round struct {
	p *Preference
	// states are the states of the devices, by number.
	states []choice
	// available is the number of candidates and chosen devices, chosen the number of chosen
	// devices.
	available, chosenCount int
	gpus                   []gpuRound
	units                  []unitRound
	// tiedGPUs are the GPUs that are equally good by the policy.
	tiedGPUs []int32
}

// gpuRound is the state of a physical GPU in a round.
type gpuRound struct {
	load        int // devices in use: healthy but not available, or chosen
	chosenCount int // devices chosen
	candidates  int // devices that can be chosen now
}

// unitRound is the state of a GPU or MIG device in a round.
type unitRound struct {
	load int // as in gpuRound
	next int // index into the unit's devices: no candidates before it
}

// choice is the state of a device in a round.
type choice uint8

const (
	unavailable choice = iota
	candidate
	chosen
)

func newRound(p *Preference) *round {
	return &round{
		p:        p,
		states:   make([]choice, len(p.devices)),
		gpus:     make([]gpuRound, len(p.gpus)),
		units:    make([]unitRound, len(p.units)),
		tiedGPUs: make([]int32, 0, len(p.gpus)),
	}
}

// choose takes a device into the answer.
func (r *round) choose(number int32) {
	d := r.p.devices[number]
	r.states[number] = chosen
	r.chosenCount++
	r.gpus[d.gpu].chosenCount++
	r.gpus[d.gpu].load++
	r.units[d.unit].load++
}

// fill chooses up to `missing` of the healthy, or unhealthy, candidates by the policy.
func (r *round) fill(healthy bool, missing int) {
	r.count(healthy)
	for missing > 0 && r.tie() {
		gpus, each := min(missing, len(r.tiedGPUs)), 1
		if r.p.policy == Packed {
			// GPU by GPU: after the first chosen device, a GPU is the one most in use.
			most := 0
			for _, gpu := range r.tiedGPUs {
				most = max(most, r.gpus[gpu].candidates)
			}
			gpus, each = min((missing+most-1)/most, len(r.tiedGPUs)), most
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

// count counts the healthy, or unhealthy, candidates, and the devices in use.
func (r *round) count(healthy bool) {
	clear(r.units)
	for i := range r.gpus {
		r.gpus[i] = gpuRound{chosenCount: r.gpus[i].chosenCount}
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

// tie sets r.tied to the best GPUs by the policy, by number; false without candidates.
func (r *round) tie() bool {
	r.tiedGPUs = r.tiedGPUs[:0]
	for i, gpu := range r.gpus {
		if gpu.candidates == 0 {
			continue
		}
		order := -1
		if len(r.tiedGPUs) > 0 {
			order = r.compare(gpu, r.gpus[r.tiedGPUs[0]])
		}
		if order < 0 {
			r.tiedGPUs = r.tiedGPUs[:0]
		}
		if order <= 0 {
			r.tiedGPUs = append(r.tiedGPUs, int32(i))
		}
	}
	return len(r.tiedGPUs) > 0
}

// compare orders GPUs by the policy, best first.
func (r *round) compare(a, b gpuRound) int {
	load, picked := cmp.Compare(a.load, b.load), cmp.Compare(a.chosenCount, b.chosenCount)
	switch r.p.policy {
	case Packed:
		return cmp.Or(-load, -picked)
	case Distinct:
		return cmp.Or(picked, load)
	default:
		return cmp.Or(load, picked)
	}
}

// nearest returns `count` of the tied GPUs, by number: the GPUs best connected with each other and
// with the GPUs picked so far. GPUs of the graph come before GPUs missing from it.
func (r *round) nearest(count int) []int32 {
	if count == len(r.tiedGPUs) {
		return r.tiedGPUs
	}
	var tied, picked, busy GPUSet
	for _, gpu := range r.tiedGPUs {
		tied |= r.bit(gpu)
	}
	for i, gpu := range r.gpus {
		if gpu.chosenCount > 0 {
			picked |= r.bit(int32(i))
		}
		if gpu.load > 0 {
			busy |= r.bit(int32(i))
		}
	}
	picked &^= tied
	known := min(count, tied.Len())
	// Known is at most the number of available GPUs, so there is a choice.
	choice, _ := r.p.graph.Choose(Request{
		Available: tied, Required: picked, Busy: busy, Size: picked.Len() + known,
	})
	unknown := count - known
	nearest := r.tiedGPUs[:0]
	for _, gpu := range r.tiedGPUs {
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

// bit returns the GPU as a set; empty if the graph does not have the GPU.
func (r *round) bit(gpu int32) GPUSet {
	if position := r.p.gpus[gpu].position; position >= 0 {
		return SetOf(position)
	}
	return 0
}

// take chooses a candidate of a GPU, from the unit with the most, or the fewest, devices in use.
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

// idsOf returns the IDs of the `count` devices in either of two states, in the order of the
// Preference.
func (r *round) idsOf(count int, a, b choice) []string {
	ids := make([]string, 0, count)
	for i, s := range r.states {
		if s == a || s == b {
			ids = append(ids, r.p.devices[i].id)
		}
	}
	return ids
}
