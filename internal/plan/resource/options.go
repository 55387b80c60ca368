package resource

import (
	"fmt"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
)

// Options are the parts of the configuration that decide about a Plan. It is a value: nobody
// changes it, or what its slices hold, after it was made. The zero value offers every GPU whole as
// nvidia.com/gpu.
type Options struct {
	// MIG says how GPUs in MIG mode are offered.
	MIG MIGStrategy
	// Policy says which devices a container should be given where several IDs belong to one physical
	// GPU.
	Policy Policy
	// MIGParents has Policy look at each MIG device as at a GPU of its own, as NVIDIA's device plugin
	// does.
	MIGParents bool
	// GPUs name whole GPUs by their model, MIGs name MIG devices by their profile. The first that
	// matches counts; what none matches has its usual name.
	GPUs, MIGs []Naming
	// Selectors select devices that are treated differently; the first that selects a device counts.
	Selectors []Selector
	// Sharing says which devices are shared.
	Sharing Sharing
	// Units says how GPUs are offered that a Selector has offered in units of their memory.
	Units Units
	// NotOffered are GPUs that no resource has, by UUID, each with the reason: pods get them in
	// another way.
	NotOffered map[string]string
	// Required are device nodes without which no device of the node is Healthy.
	Required inventory.ControlNodes
}

// MIGStrategy says how GPUs in MIG mode are offered.
type MIGStrategy int

// The MIG strategies.
const (
	// MIGNone offers every GPU whole, whether it is partitioned or not.
	MIGNone MIGStrategy = iota
	// MIGSingle offers MIG devices under the name of whole GPUs; all of the node are of one profile.
	MIGSingle
	// MIGMixed offers MIG devices under the names of their profiles, beside whole GPUs.
	MIGMixed
)

func (s MIGStrategy) String() string {
	switch s {
	case MIGNone:
		return "none"
	case MIGSingle:
		return "single"
	case MIGMixed:
		return "mixed"
	}
	return fmt.Sprintf("MIGStrategy(%d)", int(s))
}

// Policy says which IDs of shared or partitioned GPUs a container is preferably given. Package
// topology explains the values.
type Policy = topology.Policy

// The policies.
const (
	PolicyDistributed = topology.Distributed
	PolicyPacked      = topology.Packed
	PolicyDistinct    = topology.Distinct
)

// Naming gives a resource name to what a pattern matches.
type Naming struct {
	Pattern Pattern
	// Name is a full name, as ParseName returns it.
	Name string
}

// A Selector selects devices and says how they are treated. A selected GPU is selected with all its
// MIG devices.
type Selector struct {
	// Where is its path in the configuration, for messages: "selectors[0]".
	Where string
	// Devices select by index or UUID.
	Devices []Ref
	// PCI selects by PCI address, as ParsePCI returns it.
	PCI []string
	// Models select by the GPU's model.
	Models []Pattern

	// Exclude leaves the devices out of every resource.
	Exclude bool
	// Rename is the resource they belong to, as ParseName returns it; empty for the usual one.
	Rename string
	// Replicas is how many containers share each of them, whatever Sharing says; 0 leaves it to
	// Sharing, 1 means one.
	Replicas int
	// Units offers the GPUs in units of their memory.
	Units bool
}

// SelectsGPU reports whether the selector selects a whole GPU.
func (s Selector) SelectsGPU(g inventory.GPU) bool { return candidate{gpu: &g}.selectedBy(&s) }

// Excludes reports whether a GPU is in no resource: it is excluded as a whole, or does not compute.
func (o Options) Excludes(g inventory.GPU) bool {
	i := slices.IndexFunc(o.Selectors, func(s Selector) bool { return s.SelectsGPU(g) })
	return displayOnly(g.Model) || i >= 0 && o.Selectors[i].Exclude
}

// Sharing says which devices are shared by how many containers.
type Sharing struct {
	// Mode is how devices are shared, those that a Selector gives replicas included.
	Mode SharingMode
	// RenameByDefault adds ".shared" to the name of shared devices that have no other.
	RenameByDefault bool
	// OnePerRequest refuses a container more than one ID when one of them is a replica.
	OnePerRequest bool
	// Rules are what is shared; of those that match a device, the first with the most replicas counts.
	Rules []SharingRule
}

// SharingRule shares devices of one resource.
type SharingRule struct {
	// Where is its path in the configuration, for messages: "sharing.timeSlicing.resources[0]".
	Where string
	// Name is the resource as it is without sharing.
	Name string
	// Rename is the resource of the shared devices; empty for the usual name.
	Rename string
	// First restricts the rule to so many devices of the resource, from the lowest index; 0 for no
	// such limit.
	First int
	// Devices restrict the rule to these; nil for no such limit.
	Devices []Ref
	// Replicas is how many containers share each device: 2 or more.
	Replicas int
}

// SharingMode is how several containers share a device.
type SharingMode int

// The modes of sharing.
const (
	// Unshared devices have one container each.
	Unshared SharingMode = iota
	// TimeSliced devices run the work of their containers in turns, without limits.
	TimeSliced
	// MPS devices run it at the same time, with CUDA's Multi-Process Service.
	MPS
	// InUnits devices are units of the memory of a GPU, each of which one container has. Nothing
	// enforces what a container uses.
	InUnits
	// InMPSUnits devices are such units; CUDA's Multi-Process Service enforces what a container uses.
	InMPSUnits
	// InDriverUnits devices are such units; the driver limits what the cgroup of a container uses.
	InDriverUnits
	// Percentage devices are tokens of the node, each for one percent of the threads that a container
	// may use.
	Percentage
)

func (m SharingMode) String() string {
	switch m {
	case Unshared:
		return "none"
	case TimeSliced:
		return "time-slicing"
	case MPS:
		return "mps"
	case InUnits:
		return "units"
	case InMPSUnits:
		return "units by mps"
	case InDriverUnits:
		return "units by driver"
	case Percentage:
		return "percentage"
	}
	return fmt.Sprintf("SharingMode(%d)", int(m))
}

// RuleOf returns the rule that shares the devices of a resource, given its name without sharing; of
// several, the first with the most replicas.
func (s Sharing) RuleOf(name string) (rule SharingRule, shared bool) {
	if r := s.largest(func(r *SharingRule) bool { return r.Name == name }); r != nil {
		return *r, true
	}
	return SharingRule{}, false
}

// GPUName returns the resource of whole GPUs of a model, without sharing and without what Selectors
// change.
func (o Options) GPUName(model string) string {
	return named(o.GPUs, model, WholeGPU)
}

// MIGName returns the resource of MIG devices of a profile, without sharing and without what
// Selectors change.
func (o Options) MIGName(profile string) string {
	if o.MIG == MIGMixed {
		return named(o.MIGs, profile, ProfileName(profile))
	}
	return named(o.MIGs, profile, WholeGPU)
}

// named returns the name that the first matching Naming gives, or else the usual one.
func named(namings []Naming, key, usual string) string {
	for _, n := range namings {
		if n.Pattern.Match(key) {
			return n.Name
		}
	}
	return usual
}
