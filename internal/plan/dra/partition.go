package dra

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Divisions are the divisions of GPUs in MIG mode, and of GPUs whose mode follows claims, by the
// UUID of the GPU.
type Divisions map[string]Divided

// divides reports whether MIG devices of a GPU are created for claims.
func (d Divisions) divides(g inventory.GPU) bool {
	division, known := d[g.UUID]
	return known && division.Fixed == "" && (g.MIG == inventory.MIGEnabled || division.Switched)
}

// whole reports whether claims can get the GPU whole, possibly beside other forms.
func (d Divisions) whole(g inventory.GPU) bool {
	return g.MIG != inventory.MIGEnabled || d[g.UUID].Switched && d.divides(g)
}

// Steady returns a Snapshot without the effects of MIG mode on GPUs whose mode follows claims:
// their links and memory stay as in the last result of Steady. A change of the mode thus writes no
// slice.
func Steady(s, before inventory.Snapshot, divisions Divisions) inventory.Snapshot {
	switched := func(uuid string) bool {
		g, _ := s.GPU(uuid)
		return g.MIG == inventory.MIGEnabled && divisions.whole(g)
	}
	s.GPUs = slices.Clone(s.GPUs)
	for i, g := range s.GPUs {
		was, known := before.GPU(g.UUID)
		if !known {
			continue
		}
		if switched(g.UUID) {
			s.GPUs[i].MemoryBytes, s.GPUs[i].AddressingMode, s.GPUs[i].Clique = was.MemoryBytes, was.AddressingMode,
				was.Clique
		}
		s.GPUs[i].Links = slices.Clone(g.Links)
		for j, l := range g.Links {
			at := slices.IndexFunc(was.Links, func(o inventory.Link) bool { return o.Peer == l.Peer })
			if at >= 0 && (switched(g.UUID) || switched(l.Peer)) {
				s.GPUs[i].Links[j] = was.Links[at]
				s.GPUs[i].Links[j].PeerIndex = l.PeerIndex
			}
		}
	}
	return s
}

// A Divided describes the division of a GPU in MIG mode by claims, and the parts still available.
type Divided struct {
	// Profiles are the MIG profiles of the GPU.
	Profiles []inventory.MIGProfile
	// Switched reports whether MIG mode is switched on for claims with MIG devices of the GPU, and
	// off for claims with the whole GPU. Both are then published, in either mode.
	Switched bool
	// Own are the places of the GPU instances created for claims.
	Own []inventory.MIGPlacement
	// Fixed is why nothing on the GPU is created for claims, a sentence without a full stop;
	// otherwise empty. A fixed GPU, or its MIG devices not created for claims, are published
	// unchanged.
	Fixed string
}

// A Partition is a GPU instance, filled by one compute instance, to be created for a claim.
type Partition struct {
	// Profile is the name of the MIG profile, such as "1g.10gb".
	Profile string
	// Slices is the number of compute slices.
	Slices    int
	Placement inventory.MIGPlacement
	// Switched reports whether MIG mode is switched on for the partition.
	Switched bool
}

// A CounterSet has the counters shared by the devices of a GPU. The scheduler allocates devices
// while each counter is large enough.
type CounterSet struct {
	Name     string              `json:"name"`
	Counters map[string]Capacity `json:"counters"`
}

// A CounterUse is the part of a CounterSet taken by a device.
type CounterUse struct {
	CounterSet string              `json:"counterSet"`
	Counters   map[string]Capacity `json:"counters"`
}

// Limits of the API server with counters: two GPUs share a slice of devices, and eight a slice of
// counters.
const (
	gpusOfPartitions = 2
	gpusOfCounters   = 8
	maxPartitions    = MaxSlice / gpusOfPartitions
	maxCounters      = 32
	maxMemorySlices  = 16 // more than any GPU has, and leaves room for the other counters
)

// usable returns the profiles for publication.
func (d Divided) usable() []inventory.MIGProfile {
	return slices.DeleteFunc(slices.Clone(d.Profiles), func(p inventory.MIGProfile) bool {
		impossible := func(start int) bool { return start < 0 || start+p.Size > maxMemorySlices }
		return p.Size <= 0 || p.Count <= 0 || p.Attributes.GISlices <= 0 || slices.ContainsFunc(p.Starts, impossible)
	})
}

// The media engines of instances, by the end of the profile's name.
func oneExtension(p inventory.MIGProfile) bool  { return strings.HasSuffix(p.Name, "+me") }
func allExtensions(p inventory.MIGProfile) bool { return strings.HasSuffix(p.Name, "+me.all") }
func noMedia(p inventory.MIGProfile) bool       { return strings.HasSuffix(p.Name, "-me") }

// amounts returns the counters for the amounts of an instance of a profile, without a place. The
// names are those of NVIDIA's driver, because quotas use them. An amount of 0 has no counter.
func amounts(p inventory.MIGProfile) map[string]Capacity {
	counters := map[string]Capacity{}
	if p.MemoryBytes > 0 {
		counters[MemoryCapacity] = Capacity(min(p.MemoryBytes, math.MaxInt64/maxMemorySlices))
	}
	for _, e := range engines {
		if n := e.of(p.Attributes); n > 0 {
			counters[e.counter] = Capacity(n)
		}
	}
	return counters
}

// uses returns the part of the GPU's counters taken by an instance of a profile. The profiles are
// all profiles of the GPU.
func uses(p inventory.MIGProfile, start int, profiles []inventory.MIGProfile) map[string]Capacity {
	counters := map[string]Capacity{}
	for i := range p.Size {
		counters[fmt.Sprintf("memory-slice-%d", start+i)] = 1
	}
	maps.Copy(counters, amounts(p))
	if oneExtension(p) {
		counters["media-extension"] = 1
	}
	if slices.ContainsFunc(profiles, allExtensions) && !noMedia(p) {
		if counters["media-engines"] = 1; allExtensions(p) {
			counters["media-engines"] = maxMemorySlices
		}
	}
	if p.Count < apart(p) {
		counters[fmt.Sprintf("instances-%d", p.ID)] = 1
	}
	return counters
}

// apart returns the number of instances of a profile that fit beside each other by place alone.
func apart(p inventory.MIGProfile) int {
	n, free := 0, 0
	for _, start := range slices.Sorted(slices.Values(p.Starts)) {
		if start >= free {
			n, free = n+1, start+p.Size
		}
	}
	return n
}

// counterSet returns the counters of a GPU. Each counter is as large as the largest need of one
// profile, or of all instances of one profile together: amounts refuse nothing with a place.
func counterSet(name string, profiles []inventory.MIGProfile) CounterSet {
	set := CounterSet{Name: name, Counters: map[string]Capacity{}}
	for _, p := range profiles {
		for counter, n := range amounts(p) {
			set.Counters[counter] = max(set.Counters[counter], n*Capacity(max(min(p.Count, apart(p)), 1)))
		}
		for _, start := range p.Starts {
			for counter, n := range uses(p, start, profiles) {
				set.Counters[counter] = max(set.Counters[counter], n)
			}
		}
		if limit := fmt.Sprintf("instances-%d", p.ID); set.Counters[limit] > 0 {
			set.Counters[limit] = Capacity(p.Count)
		}
	}
	return set
}

// partitions returns the devices that can be created on a GPU, the GPU's counters, and omitted
// devices with reasons. The scheduler takes the first suitable device: small devices come first,
// and within a profile the devices that block the fewest others.
func partitions(
	g inventory.GPU, driver inventory.Driver, number int, division Divided,
) (found []Device, set CounterSet, leftOut []string) {
	profiles := division.usable()
	set = counterSet(fmt.Sprintf("gpu-%d", number), profiles)
	if len(profiles) == 0 || len(set.Counters) > maxCounters {
		return nil, set, []string{fmt.Sprintf("GPU %d (%s): the driver does not report its possible MIG devices",
			g.Index, g.UUID)}
	}
	order.Sort(profiles, func(a, b inventory.MIGProfile) int {
		return cmp.Or(cmp.Compare(a.Size, b.Size), cmp.Compare(a.Attributes.GISlices, b.Attributes.GISlices),
			cmp.Compare(len(a.Name), len(b.Name)), cmp.Compare(a.Name, b.Name))
	})
	names, most := map[string]bool{}, maxPartitions
	if division.Switched { // the GPU itself is one more device
		most--
	}
	for _, p := range profiles {
		for _, start := range byConflicts(p, profiles) {
			m := inventory.MIGDevice{
				Profile: p.Name, Placement: inventory.MIGPlacement{Profile: p.ID, Start: start,
					Size: p.Size}, Attributes: p.Attributes,
				MemoryBytes: p.MemoryBytes, Health: instanceAt(g, inventory.MIGPlacement{Profile: p.ID, Start: start,
					Size: p.Size}).Health,
			}
			name, reason := migName(number, m)
			switch {
			case reason == "" && names[name]:
				reason = fmt.Sprintf("another MIG device has the name %s", name)
			case reason == "" && len(found) == most:
				reason = fmt.Sprintf("a GPU can have %d devices at most", most)
			}
			if reason != "" {
				leftOut = append(leftOut, fmt.Sprintf("MIG device %s at memory slice %d of GPU %d (%s): %s", p.Name,
					start, g.Index, g.UUID, reason))
				continue
			}
			names[name] = true
			d := migDevice(name, g, m, driver)
			d.ConsumesCounters = []CounterUse{{set.Name, uses(p, start, profiles)}}
			d.Partition = &Partition{p.Name, p.Attributes.GISlices, m.Placement, division.Switched}
			found = append(found, d)
		}
	}
	return found, set, leftOut
}

// undivided returns the device of a whole GPU whose MIG mode follows claims. It takes all counters.
func undivided(g inventory.GPU, driver inventory.Driver, number int, links links, set CounterSet) Device {
	d := wholeGPU(g, driver, number, links)
	if d.Switched = true; len(set.Counters) > 0 {
		d.ConsumesCounters = []CounterUse{{set.Name, set.Counters}}
	}
	if len(d.Attributes)+len(d.Capacity)+len(engines) <= maxProperties {
		for _, e := range engines {
			d.Capacity[e.capacity] = set.Counters[e.counter]
		}
	}
	return d
}

// byConflicts returns the possible first memory slices of a profile's instances. Slices that leave
// the most room for other instances come first.
func byConflicts(p inventory.MIGProfile, profiles []inventory.MIGProfile) []int {
	cost := func(start int) (sum int) {
		for _, other := range profiles {
			for _, at := range other.Starts {
				if at < start+p.Size && start < at+other.Size {
					sum += other.Size
				}
			}
		}
		return sum
	}
	starts := slices.Sorted(slices.Values(p.Starts))
	slices.SortStableFunc(starts, func(a, b int) int { return cmp.Compare(cost(a), cost(b)) })
	return starts
}

// instanceAt returns the MIG device in the GPU instance at a place, from the last scan; a healthy
// one if there is none.
func instanceAt(g inventory.GPU, at inventory.MIGPlacement) inventory.MIGDevice {
	for _, m := range g.MIGDevices {
		if m.Placement == at && m.Attributes.CISlices == m.Attributes.GISlices {
			return m
		}
	}
	return inventory.MIGDevice{Health: inventory.Health{State: inventory.Healthy}}
}

// own reports whether a MIG device was created for a claim.
func (d Divided) own(m inventory.MIGDevice) bool { return slices.Contains(d.Own, m.Placement) }

// Unpartitioned returns the pool without counters and without MIG devices that need counters. Whole
// GPUs then need no counters.
func (p Pool) Unpartitioned() Pool {
	kept := []Slice{}
	for _, slice := range p.Slices {
		devices := slices.DeleteFunc(slices.Clone(slice.Devices),
			func(d Device) bool { return len(d.ConsumesCounters) > 0 && !d.Switched })
		for i := range devices {
			devices[i].ConsumesCounters = nil
		}
		if len(devices) > 0 {
			kept = append(kept, Slice{Devices: devices})
		}
	}
	if len(kept) == 0 && len(p.Slices) > 0 {
		kept = []Slice{{Devices: []Device{}}}
	}
	p.Slices = kept
	return p
}

// Counted reports whether the slice has counters, or a device that needs counters.
func (s Slice) Counted() bool {
	return len(s.SharedCounters) > 0 || slices.ContainsFunc(s.Devices,
		func(d Device) bool { return len(d.ConsumesCounters) > 0 })
}
