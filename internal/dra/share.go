package dra

import (
	"encoding/json"
	"slices"
)

// A GPU that several claims can have at the same time has the capacity memory, of which each claim takes a part: a share. A claim that asks
// for no part takes all of it, and has the GPU alone. So claims that know nothing of shares are given GPUs as ever.

// MemoryCapacity is the name of the capacity that is divided among shares.
const MemoryCapacity = "memory"

// shareStep is what shares are rounded up to, in bytes: control daemons of MPS limit memory in MiB.
const shareStep = 1 << 20

// Shared returns the pool with all GPUs given in shares, to at most so many claims each; below 2 the pool stays as it is. MIG devices, and
// GPUs whose memory is not known, are given whole.
func (p Pool) Shared(most int) Pool {
	return p.withShares(func(d Device) Capacity {
		if most < 2 || d.Attributes["type"].Value != typeGPU {
			return 0
		}
		return d.Capacity[MemoryCapacity] / Capacity(most) / shareStep * shareStep
	})
}

// Unshared returns the pool with all GPUs given whole.
func (p Pool) Unshared() Pool { return p.withShares(func(Device) Capacity { return 0 }) }

func (p Pool) withShares(smallest func(Device) Capacity) Pool {
	p.Slices = slices.Clone(p.Slices)
	for i, slice := range p.Slices {
		p.Slices[i].Devices = slices.Clone(slice.Devices) // nil stays nil
		for j, d := range p.Slices[i].Devices {
			p.Slices[i].Devices[j].SmallestShare = smallest(d)
		}
	}
	return p
}

// Shared reports whether a device of the slice is given in shares.
func (s Slice) Shared() bool {
	return slices.ContainsFunc(s.Devices, func(d Device) bool { return d.SmallestShare != 0 })
}

// Share returns how much of the memory of a device a claim has by a result, in bytes; 0 if it has all of it. It also returns 0 if the share
// is not known, and for shares that this driver never gives: a part of a MIG device, or less memory than MPS can limit.
func (r Result) Share(of Device) int64 {
	bytes, known := quantity(r.ConsumedCapacity[MemoryCapacity])
	if r.ShareID == "" || !known || of.Attributes["type"].Value != typeGPU || bytes < shareStep || bytes >= int64(wholeSteps(of)) {
		return 0
	}
	return bytes
}

// wholeSteps is the memory of a device in whole steps.
func wholeSteps(d Device) Capacity { return d.Capacity[MemoryCapacity] / shareStep * shareStep }

// A requestPolicy says how much of a capacity a claim can have.
type requestPolicy struct {
	Default    amount     `json:"default"` // of a claim that asks for none
	ValidRange validRange `json:"validRange"`
}

type validRange struct {
	Min  amount `json:"min"`
	Step amount `json:"step"`
}

// policy returns that of the memory of a device that is given in shares.
func (d Device) policy() requestPolicy {
	return requestPolicy{amount(wholeSteps(d)), validRange{amount(d.SmallestShare), shareStep}}
}

type plainDevice Device

// MarshalJSON returns the device as resource.k8s.io/v1 has it.
func (d Device) MarshalJSON() ([]byte, error) {
	if d.SmallestShare == 0 {
		return json.Marshal(plainDevice(d))
	}
	type capacity struct {
		Value         amount         `json:"value"`
		RequestPolicy *requestPolicy `json:"requestPolicy,omitempty"`
	}
	all := map[string]capacity{}
	for name, value := range d.Capacity {
		all[name] = capacity{Value: amount(value)}
	}
	policy := d.policy()
	all[MemoryCapacity] = capacity{amount(d.Capacity[MemoryCapacity]), &policy}
	return json.Marshal(struct {
		plainDevice
		AllowMultipleAllocations bool                `json:"allowMultipleAllocations"`
		Capacity                 map[string]capacity `json:"capacity"`
	}{plainDevice(d), true, all})
}

// UnmarshalJSON reads a device. One that is given in shares by other rules than those of this driver has the SmallestShare -1.
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
	policies := 0
	for _, c := range more.Capacity {
		if c.RequestPolicy != nil {
			policies++
		}
	}
	d.SmallestShare = 0
	if policy := more.Capacity[MemoryCapacity].RequestPolicy; policy != nil {
		d.SmallestShare = Capacity(policy.ValidRange.Min)
	}
	ours := more.AllowMultipleAllocations && policies == 1 && d.SmallestShare > 0 && *more.Capacity[MemoryCapacity].RequestPolicy == d.policy()
	if (more.AllowMultipleAllocations || policies > 0) && !ours {
		d.SmallestShare = -1
	}
	return nil
}
