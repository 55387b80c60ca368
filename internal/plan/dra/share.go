package dra

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
)

// Devices for several claims at the same time are allocated in shares. By memory, each claim takes
// a part of the capacity memory of a GPU; a claim without such a request takes all memory and has
// the GPU alone. Claims without knowledge of shares thus get whole GPUs. By count, and without a
// limit, a claim without a request gets a share. An attribute marks such devices, and a DeviceClass
// for whole GPUs excludes them.

// A ShareBy is the unit of shares of a device. NVIDIA's driver has the same three forms.
type ShareBy string

// The forms.
const (
	ByMemory  ShareBy = "memory"    // parts of the memory
	ByCount   ShareBy = "count"     // number of claims
	Unlimited ShareBy = "unlimited" // nothing
)

const (
	// MemoryCapacity is the name of the capacity divided by shares by memory.
	MemoryCapacity = "memory"
	// SharesCapacity is the name of the capacity of shares by count. Each claim takes one.
	SharesCapacity = "shares"
	// SharedAttribute is an attribute of devices that give a share to a claim without a request.
	// Its value is a ShareBy.
	SharedAttribute = Domain + "/shared"
)

// shareStep is the unit of rounded shares, in bytes, because MPS control daemons limit memory in
// MiB.
const shareStep = 1 << 20

// Shared returns the pool with all GPUs in shares by memory, for at most so many claims each; below
// 2 the pool is unchanged. MIG devices, and GPUs with unknown memory, are allocated whole.
func (p Pool) Shared(most int) Pool { return p.SharedBy(ByMemory, most) }

// SharedBy returns the pool with devices in shares, for at most so many claims each. Below 2 the
// pool is unchanged, except with Unlimited. By memory, GPUs are shared; by count and without a
// limit also MIG devices, except those created for claims.
func (p Pool) SharedBy(by ShareBy, most int) Pool {
	return p.each(func(d Device) Device {
		d.SmallestShare = 0
		switch {
		case len(d.ConsumesCounters) > 0, most < 2 && by != Unlimited:
		case by == ByCount, by == Unlimited:
			return d.sharedBy(by, most)
		case d.Attributes["type"].Value == typeGPU:
			d.SmallestShare = d.Capacity[MemoryCapacity] / Capacity(most) / shareStep * shareStep
		}
		return d
	})
}

// sharedBy returns the device in shares by count, or without a limit.
func (d Device) sharedBy(by ShareBy, most int) Device {
	d.SharedBy, d.Attributes, d.Capacity = by, maps.Clone(d.Attributes), maps.Clone(d.Capacity)
	d.text(SharedAttribute, string(by))
	if by == ByCount {
		d.Capacity[SharesCapacity] = Capacity(most)
	}
	if len(d.Attributes)+len(d.Capacity) > maxProperties {
		maps.DeleteFunc(d.Capacity, func(name string, _ Capacity) bool { return strings.HasPrefix(name, memorySlice) })
	}
	return d
}

// Unshared returns the pool with whole devices.
func (p Pool) Unshared() Pool {
	return p.each(func(d Device) Device {
		if d.SmallestShare = 0; d.SharedBy == "" {
			return d
		}
		d.SharedBy, d.Attributes, d.Capacity = "", maps.Clone(d.Attributes), maps.Clone(d.Capacity)
		delete(d.Attributes, SharedAttribute)
		delete(d.Capacity, SharesCapacity)
		return d
	})
}

// each returns the pool with changed devices.
func (p Pool) each(change func(Device) Device) Pool {
	p.Slices = slices.Clone(p.Slices)
	for i, slice := range p.Slices {
		p.Slices[i].Devices = slices.Clone(slice.Devices) // nil stays nil
		for j, d := range p.Slices[i].Devices {
			p.Slices[i].Devices[j] = change(d)
		}
	}
	return p
}

// Shared reports whether a device of the slice is in shares.
func (s Slice) Shared() bool {
	return slices.ContainsFunc(s.Devices, func(d Device) bool { return d.SmallestShare != 0 || d.SharedBy != "" })
}

// Share returns the memory of a device for a claim by a result, in bytes; 0 for all memory, and
// without a request for memory. It also returns 0 for unknown shares and for shares that this
// driver never allocates: a part of an unshared MIG device, or less memory than MPS can limit.
func (r Result) Share(of Device) int64 {
	bytes, known := quantity(r.ConsumedCapacity[MemoryCapacity])
	mayBe := of.SharedBy != "" || of.Attributes["type"].Value == typeGPU
	if r.ShareID == "" || !known || !mayBe || bytes < shareStep || bytes >= int64(wholeSteps(of)) && of.SharedBy == "" {
		return 0
	}
	return bytes
}

// Count returns the number of a claim's shares of a device by a result; 0 if shares are not
// counted.
func (r Result) Count() int64 {
	count, known := quantity(r.ConsumedCapacity[SharesCapacity])
	if r.ShareID == "" || !known || count < 0 {
		return 0
	}
	return count
}

// wholeSteps returns the memory of a device, rounded down to whole steps.
func wholeSteps(d Device) Capacity { return d.Capacity[MemoryCapacity] / shareStep * shareStep }

// A requestPolicy limits the part of a capacity for a claim.
type requestPolicy struct {
	Default    amount     `json:"default"` // for a claim without a request
	ValidRange validRange `json:"validRange"`
}

type validRange struct {
	Min  amount `json:"min"`
	Step amount `json:"step,omitempty"`
}

// policies returns the policies for the capacities of a shared device. By count, and without a
// limit, a claim takes nothing of a capacity without a request; without a policy the claim would
// take all.
func (d Device) policies() map[string]requestPolicy {
	all := map[string]requestPolicy{}
	if d.SharedBy == "" {
		all[MemoryCapacity] = requestPolicy{amount(wholeSteps(d)), validRange{amount(d.SmallestShare), shareStep}}
		return all
	}
	for name, value := range d.Capacity {
		switch {
		case name == SharesCapacity:
			all[name] = requestPolicy{1, validRange{1, 1}}
		case name == MemoryCapacity && value >= shareStep:
			all[name] = requestPolicy{0, validRange{0, shareStep}}
		default:
			all[name] = requestPolicy{}
		}
	}
	return all
}

type plainDevice Device

// MarshalJSON returns the device in the form of resource.k8s.io/v1.
func (d Device) MarshalJSON() ([]byte, error) {
	if d.SmallestShare == 0 && d.SharedBy == "" {
		return json.Marshal(plainDevice(d))
	}
	type capacity struct {
		Value         amount         `json:"value"`
		RequestPolicy *requestPolicy `json:"requestPolicy,omitempty"`
	}
	all, policies := map[string]capacity{}, d.policies()
	for name, value := range d.Capacity {
		shown := capacity{Value: amount(value)}
		if policy, has := policies[name]; has {
			shown.RequestPolicy = &policy
		}
		all[name] = shown
	}
	return json.Marshal(struct {
		plainDevice
		AllowMultipleAllocations bool                `json:"allowMultipleAllocations"`
		Capacity                 map[string]capacity `json:"capacity"`
	}{plainDevice(d), true, all})
}

// UnmarshalJSON reads a device. A device in shares by the rules of another driver has the
// SmallestShare -1.
func (d *Device) UnmarshalJSON(text []byte) error {
	var more struct {
		AllowMultipleAllocations bool
		Capacity                 map[string]struct{ RequestPolicy *requestPolicy }
	}
	if err := json.Unmarshal(text, (*plainDevice)(d)); err != nil {
		return err
	}
	if err := json.Unmarshal(text, &more); err != nil {
		return err
	}
	policies := map[string]requestPolicy{}
	for name, c := range more.Capacity {
		if c.RequestPolicy != nil {
			policies[name] = *c.RequestPolicy
		}
	}
	d.SmallestShare, d.SharedBy = 0, ""
	if !more.AllowMultipleAllocations && len(policies) == 0 {
		return nil
	}
	if d.SharedBy = ShareBy(d.Attributes[SharedAttribute].Value); d.SharedBy == "" {
		d.SmallestShare = Capacity(policies[MemoryCapacity].ValidRange.Min)
	}
	if !more.AllowMultipleAllocations || d.SharedBy == "" && d.SmallestShare <= 0 ||
		!maps.Equal(policies, d.policies()) {
		d.SmallestShare, d.SharedBy = -1, ""
	}
	return nil
}
