package topology

import (
	"fmt"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Policy says how to choose among devices that share a physical GPU. With one device on each GPU
// all policies are equal: they choose the best connected GPUs.
type Policy int

// The policies. Connections between the GPUs break ties.
const (
	// Distributed takes devices one by one, each from the GPU with the fewest devices in use.
	Distributed Policy = iota
	// Packed takes devices one by one, each from the GPU with the most devices in use.
	Packed
	// Distinct gives a request as many different GPUs as possible, preferring GPUs with the fewest
	// devices in use. A request for more devices than GPUs is spread evenly.
	Distinct
)

func (p Policy) String() string {
	names := [...]string{"distributed", "packed", "distinct"}
	if p < 0 || int(p) >= len(names) {
		return fmt.Sprintf("Policy(%d)", int(p))
	}
	return names[p]
}

// A Device is a candidate of a Preference, with an ID for the kubelet.
type Device struct {
	// ID is the kubelet's ID of the device.
	ID string
	// UUID is the GPU or MIG device of the ID; several IDs with the same UUID are its replicas.
	UUID string
	// GPU is the UUID of the physical GPU.
	GPU string
	// Healthy is true if the device may get new work.
	Healthy bool
}

// A Preference chooses devices of a resource. It is immutable, and safe for concurrent use.
type Preference struct {
	graph   *Graph
	policy  Policy
	devices []numberedDevice // by number, the order of the answers
	at      map[string]int32 // by ID
	units   [][]int32        // the numbers of the devices of each GPU or MIG device
	gpus    []gpuOfResource
}

// numberedDevice is a Device with its number.
type numberedDevice struct {
	id      string
	unit    int32
	gpu     int32
	healthy bool
}

// gpuOfResource is a physical GPU with devices.
type gpuOfResource struct {
	position int // in the graph, or -1
	units    []int32
}

// NewPreference returns the preference for devices. Their order is the order of the answers. Of
// devices with the same ID the first counts. GPUs missing from the graph come last.
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

// Prefer returns the IDs of `size` different devices, in the order of the Preference: all required
// devices, and the best of the available ones. The order of the request does not matter. Unknown
// available IDs are ignored, and required IDs count as available. Unhealthy devices are used only
// if nothing else is left. If more devices are required than `size`, the answer is exactly the
// required devices.
//
// The error is an *UnknownDeviceError for an unknown required ID, and a *TooFewError if fewer
// devices than `size` are available. The answer is never shorter than `size`.
func (p *Preference) Prefer(available, required []string, size int) ([]string, error) {
	r, err := p.read(available, required)
	if err != nil {
		return nil, err
	}
	if r.available < size {
		return nil, &TooFewError{Wanted: size, Available: r.idsOf(r.available, candidate, chosen)}
	}
	for _, healthy := range []bool{true, false} {
		if missing := size - r.chosenCount; missing > 0 {
			r.fill(healthy, missing)
		}
	}
	return r.idsOf(r.chosenCount, chosen, chosen), nil
}

// read starts a round for a request.
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

// UnknownDeviceError is the error of a request for devices missing from the resource.
type UnknownDeviceError struct {
	// IDs are the unknown IDs, sorted.
	IDs []string
}

func (e *UnknownDeviceError) Error() string {
	return fmt.Sprintf("the request requires %s, which this resource does not have: "+
		"the list of devices has changed while the pod was admitted; create the pod again", inventory.Few(e.IDs))
}

// TooFewError is the error of a request for more devices than are available.
type TooFewError struct {
	// Wanted is the number of requested devices.
	Wanted int
	// Available are the IDs of the request that belong to the resource.
	Available []string
}

func (e *TooFewError) Error() string {
	if len(e.Available) == 0 {
		return fmt.Sprintf("the request wants %d, and none of those it offers is on this node", e.Wanted)
	}
	return fmt.Sprintf("the request wants %d, and of those it offers only %d are on this node: %s",
		e.Wanted, len(e.Available), inventory.Few(e.Available))
}
