package topology

import (
	"fmt"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Policy says how devices that share a physical GPU are chosen. With one device to each GPU all
// policies are the same: the best connected GPUs.
type Policy int

// The policies. Whatever a policy leaves open, the connections between the GPUs decide.
const (
	// Distributed takes devices one by one, each from the GPU of which the fewest are in use.
	Distributed Policy = iota
	// Packed takes devices one by one, each from the GPU of which the most are in use.
	Packed
	// Distinct gives a request as many different GPUs as it can, and of those the ones of which the
	// fewest devices are in use. A request for more devices than there are GPUs is spread evenly.
	Distinct
)

func (p Policy) String() string {
	names := [...]string{"distributed", "packed", "distinct"}
	if p < 0 || int(p) >= len(names) {
		return fmt.Sprintf("Policy(%d)", int(p))
	}
	return names[p]
}

// A Device is what a Preference chooses from: something that kubelet knows by an ID.
type Device struct {
	// ID is the name that kubelet knows.
	ID string
	// UUID is the GPU or MIG device that the ID stands for; several IDs with one UUID are its
	// replicas.
	UUID string
	// GPU is the UUID of the physical GPU.
	GPU string
	// Healthy says that the device may be given to new work.
	Healthy bool
}

// A Preference answers which of a resource's devices to prefer. It is immutable, and safe for
// concurrent use.
type Preference struct {
	graph   *Graph
	policy  Policy
	devices []numberedDevice // by number, the order of the answers
	at      map[string]int32 // by ID
	units   [][]int32        // of each GPU or MIG device, the numbers of its devices
	gpus    []gpuOfResource
}

// numberedDevice is a Device, by number.
type numberedDevice struct {
	id      string
	unit    int32
	gpu     int32
	healthy bool
}

// gpuOfResource is a physical GPU that devices stand on.
type gpuOfResource struct {
	position int // in the graph, or -1
	units    []int32
}

// NewPreference returns the preference for devices in the order in which they are given, which is
// the order of the answers. Of an ID that comes twice the first counts. GPUs that the graph does
// not have come last.
func NewPreference(graph *Graph, devices []Device, policy Policy) *Preference {
	p := &Preference{graph: graph, policy: policy, at: make(map[string]int32, len(devices))}
	gpus, units := map[string]int32{}, map[string]int32{}
	for _, d := range devices {
		if _, known := p.at[d.ID]; known {
			continue
		}
		gpu, known := gpus[d.GPU]
		if !known {
			gpu = int32(len(p.gpus))
			gpus[d.GPU] = gpu
			position, inGraph := graph.Position(d.GPU)
			if !inGraph {
				position = -1
			}
			p.gpus = append(p.gpus, gpuOfResource{position: position})
		}
		unit, known := units[d.UUID]
		if !known {
			unit = int32(len(p.units))
			units[d.UUID] = unit
			p.units = append(p.units, nil)
			p.gpus[gpu].units = append(p.gpus[gpu].units, unit)
		}
		number := int32(len(p.devices))
		p.at[d.ID] = number
		p.devices = append(p.devices, numberedDevice{d.ID, unit, gpu, d.Healthy})
		p.units[unit] = append(p.units[unit], number)
	}
	return p
}

// Prefer returns the IDs of `size` different devices, in the order of the Preference: all the
// required ones, and of the available ones those that suit best. The order of the request does not
// matter. Available IDs that are not known are ignored, and required ones count as available;
// unhealthy devices are taken only when nothing else is left. If more devices are required than
// `size`, the answer is just those.
//
// The error is an *UnknownDeviceError if a required ID is not known, and a *TooFewError if fewer
// devices than `size` are available. The answer is never shorter than `size`.
func (p *Preference) Prefer(available, required []string, size int) ([]string, error) {
	r, err := p.read(available, required)
	if err != nil {
		return nil, err
	}
	if r.available < size {
		return nil, &TooFewError{Wanted: size, Available: r.named(r.available, candidate, chosen)}
	}
	for _, healthy := range []bool{true, false} {
		if missing := size - r.chosen; missing > 0 {
			r.fill(healthy, missing)
		}
	}
	return r.named(r.chosen, chosen, chosen), nil
}

// read makes a round of a request.
func (p *Preference) read(available, required []string) (*round, error) {
	r := newRound(p)
	for _, id := range available {
		if number, known := p.at[id]; known && r.states[number] == unavailable {
			r.states[number] = candidate
			r.available++
		}
	}
	var unknown []string
	for _, id := range required {
		number, known := p.at[id]
		switch {
		case !known:
			unknown = append(unknown, id)
		case r.states[number] != chosen:
			if r.states[number] == unavailable {
				r.available++
			}
			r.choose(number)
		}
	}
	if unknown != nil {
		slices.Sort(unknown)
		return nil, &UnknownDeviceError{IDs: slices.Compact(unknown)}
	}
	return r, nil
}

// UnknownDeviceError says that a request requires devices which the resource does not have.
type UnknownDeviceError struct {
	// IDs are the unknown ones, sorted.
	IDs []string
}

func (e *UnknownDeviceError) Error() string {
	return fmt.Sprintf("the request requires %s, which this resource does not have: "+
		"the list of devices has changed while the pod was admitted; create the pod anew", inventory.Few(e.IDs))
}

// TooFewError says that a request wants more devices than are available to it.
type TooFewError struct {
	// Wanted is the number of devices in the request.
	Wanted int
	// Available are the IDs of the request that the resource has.
	Available []string
}

func (e *TooFewError) Error() string {
	if len(e.Available) == 0 {
		return fmt.Sprintf("the request wants %d, and none of those it offers is on this node", e.Wanted)
	}
	return fmt.Sprintf("the request wants %d, and of those it offers only %d are on this node: %s",
		e.Wanted, len(e.Available), inventory.Few(e.Available))
}
