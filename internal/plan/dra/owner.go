package dra

import (
	"fmt"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// An Ownership is the way for pods to get a GPU.
type Ownership string

// The ways. A GPU without any of them is still unknown: it is in no list of the device plugin and
// in no slice.
const (
	// OwnedByPlugin: in the plan of the device plugin, and in no slice.
	OwnedByPlugin Ownership = "plugin"
	// LeavesPlugin: in no plan and in no slice. A pod may still hold the GPU, or the kubelet may
	// still list it.
	LeavesPlugin Ownership = "leaving-plugin"
	// OwnedByDRA: in a slice, and in no plan.
	OwnedByDRA Ownership = "dra"
	// LeavesDRA: in a slice with the taint TaintLeaving, and in no plan, until no record and no
	// allocated claim has the GPU.
	LeavesDRA Ownership = "leaving-dra"
	// OwnedByNobody: in no plan and in no slice. The GPU may still be in a slice at the API server,
	// or in a claim allocated from a slice.
	OwnedByNobody Ownership = "nobody"
)

// InSlice reports whether the devices of a GPU are in a slice.
func (o Ownership) InSlice() bool { return o == OwnedByDRA || o == LeavesDRA }

// Owners are the owners of GPUs, by the UUID of the GPU.
type Owners map[string]Ownership

// AllPlugin reports whether the device plugin owns every GPU.
func (o Owners) AllPlugin() bool {
	for _, owner := range o {
		if owner != OwnedByPlugin {
			return false
		}
	}
	return true
}

// All returns the owners for GPUs that are all in slices.
func All(gpus []inventory.GPU) Owners {
	owners := Owners{}
	for _, g := range gpus {
		owners[g.UUID] = OwnedByDRA
	}
	return owners
}

// MayDivide returns an error if a GPU in use must not be divided again: the device plugin does not own it.
// uuids are GPUs and MIG devices in use.
func (o Owners) MayDivide(gpus []inventory.GPU, uuids []string) error {
	for _, g := range gpus {
		isUsed := slices.Contains(uuids, g.UUID) || slices.ContainsFunc(g.MIGDevices,
			func(m inventory.MIGDevice) bool { return slices.Contains(uuids, m.UUID) })
		if isUsed && o[g.UUID] != OwnedByPlugin {
			return fmt.Errorf("GPU %d is not divided again while Dynamic Resource Allocation owns it", g.Index)
		}
	}
	return nil
}

// NotOffered returns the GPUs not offered by the device plugin, by UUID, each with the reason.
func (o Owners) NotOffered(gpus []inventory.GPU) map[string]string {
	reasons := map[string]string{}
	for _, g := range gpus {
		switch o[g.UUID] {
		case OwnedByPlugin:
		case LeavesPlugin:
			reasons[g.UUID] = "it leaves the device plugin for Dynamic Resource Allocation"
		case OwnedByDRA:
			reasons[g.UUID] = "pods get it by Dynamic Resource Allocation"
		case LeavesDRA, OwnedByNobody:
			reasons[g.UUID] = "it comes back from Dynamic Resource Allocation as soon as no ResourceSlice and no " +
				"claim has it"
		default:
			reasons[g.UUID] = "it is not known yet whether pods get it by Dynamic Resource Allocation"
		}
	}
	return reasons
}

// OwnerFacts are the facts for the decision about the owner of a GPU. Without evidence a fact is
// false.
type OwnerFacts struct {
	// Wanted reports whether pods should get the GPU in slices.
	Wanted bool
	// Before is the last decision; empty for none.
	Before Ownership
	// Free reports whether there was evidence, since Before was decided, that no pod has or gets
	// the GPU or a part of it by a device plugin.
	Free bool
	// Published reports whether the GPU may be in a slice at the API server.
	Published bool
	// Claimed reports whether a prepared claim has the GPU.
	Claimed bool
	// Unclaimed reports whether no claim at the API server had the GPU since Before was decided,
	// and since the GPU left the slices if it is in none.
	Unclaimed bool
}

// A finding is a combination of facts. It decides the next owner.
type finding int

const (
	wantedUnknown    finding = iota // wanted in slices; a pod may hold it
	wantedPublished                 // the same, and the GPU may be in a slice
	wantedFree                      // wanted in slices, and no pod holds it
	prepared                        // wanted back; a prepared claim has it
	published                       // wanted back; may be in a slice, and a claim may have it
	publishedNoClaim                // wanted back; may be in a slice, and no claim has it
	unpublished                     // wanted back; in no slice, and a claim may have it
	noClaim                         // wanted back; in no slice, and no claim has it
	findings                        // their number
)

// finding returns the finding for the facts.
func (f OwnerFacts) finding() finding {
	switch {
	case f.Wanted && f.Free:
		return wantedFree
	case f.Wanted && f.Published:
		return wantedPublished
	case f.Wanted:
		return wantedUnknown
	case f.Claimed:
		return prepared
	case f.Published && f.Unclaimed:
		return publishedNoClaim
	case f.Published:
		return published
	case f.Unclaimed:
		return noClaim
	}
	return unpublished
}

// transitions has the next owner for each owner and finding. A GPU without any slice or claim moves
// to the device plugin at once. Every other change of the owner waits for evidence that the
// previous owner has released the GPU. docs/dev/architecture.md has a diagram.
var transitions = map[Ownership][findings]Ownership{
	// wantedUnknown, wantedPublished, wantedFree, prepared, published, publishedNoClaim,
	// unpublished, noClaim
	"": {LeavesPlugin, OwnedByDRA, OwnedByDRA, LeavesDRA, LeavesDRA, LeavesDRA, OwnedByPlugin, OwnedByPlugin},
	OwnedByPlugin: {LeavesPlugin, LeavesPlugin, OwnedByDRA, LeavesPlugin, LeavesPlugin, LeavesPlugin, OwnedByPlugin,
		OwnedByPlugin},
	LeavesPlugin: {LeavesPlugin, LeavesPlugin, OwnedByDRA, LeavesPlugin, LeavesPlugin, LeavesPlugin, OwnedByPlugin,
		OwnedByPlugin},
	OwnedByDRA: {OwnedByDRA, OwnedByDRA, OwnedByDRA, LeavesDRA, LeavesDRA, LeavesDRA, LeavesDRA, LeavesDRA},
	LeavesDRA:  {OwnedByDRA, OwnedByDRA, OwnedByDRA, LeavesDRA, LeavesDRA, OwnedByNobody, LeavesDRA, OwnedByNobody},
	OwnedByNobody: {OwnedByDRA, OwnedByDRA, OwnedByDRA, LeavesDRA, OwnedByNobody, OwnedByNobody, OwnedByNobody,
		OwnedByPlugin},
}

// Decide returns the owner of a GPU.
func Decide(f OwnerFacts) Ownership { return transitions[f.Before][f.finding()] }
