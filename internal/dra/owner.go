package dra

import "github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"

// An Ownership says by which way a GPU is given to pods.
type Ownership string

// The ways. A GPU that has none of them belongs to nobody: it is in no list of the device plugin and in no slice.
const (
	// OwnedByPlugin: in the plan of the device plugin, and in no slice.
	OwnedByPlugin Ownership = "plugin"
	// LeavesPlugin: in no plan and in no slice. A pod may still hold it, or kubelet may still list it.
	LeavesPlugin Ownership = "leaving-plugin"
	// OwnedByDRA: in a slice, and in no plan.
	OwnedByDRA Ownership = "dra"
	// LeavesDRA: in a slice with the taint TaintLeaving, and in no plan, until no record and no allocated claim has it.
	LeavesDRA Ownership = "leaving-dra"
)

// InSlice reports whether the devices of a GPU are in a slice.
func (o Ownership) InSlice() bool { return o == OwnedByDRA || o == LeavesDRA }

// Owners are the owners of GPUs, by the UUID of the GPU.
type Owners map[string]Ownership

// All returns the owners when every GPU is in a slice.
func All(gpus []inventory.GPU) Owners {
	owners := Owners{}
	for _, g := range gpus {
		owners[g.UUID] = OwnedByDRA
	}
	return owners
}
