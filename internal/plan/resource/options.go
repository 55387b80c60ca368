package resource

import (
	"fmt"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
)

// Options are the parts of the configuration that decide about a Plan. They are immutable,
// including the contents of the slices. The zero value offers every GPU whole as nvidia.com/gpu.
type Options struct {
	// MIG is how GPUs in MIG mode are offered.
	MIG MIGStrategy
	// Policy chooses devices for a container where several IDs belong to one physical GPU.
	Policy Policy
	// MIGParents makes Policy treat each MIG device as a GPU of its own, as NVIDIA's device plugin
	// does.
	MIGParents bool
	// GPUs name whole GPUs by their model, MIGs name MIG devices by their profile. The first match
	// counts; without a match the device has its usual name.
	GPUs, MIGs []Naming
	// Selectors select devices for special treatment; the first that selects a device counts.
	Selectors []Selector
	// Sharing chooses the shared devices.
	Sharing Sharing
	// Units is how GPUs are offered in units of their memory. A Selector chooses these GPUs.
	Units Units
	// NotOffered are the GPUs without a resource, by UUID, each with the reason: pods get them in
	// another way.
	NotOffered map[string]string
	// Required are device nodes without which no device of the node is Healthy.
	Required inventory.ControlNodes
}

// MIGStrategy is how GPUs in MIG mode are offered.
type MIGStrategy int

// The MIG strategies.
const (
	// MIGNone offers every GPU whole, partitioned or not.
	MIGNone MIGStrategy = iota
	// MIGSingle offers MIG devices, all of one profile, under the name of whole GPUs.
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

// Policy chooses IDs of shared or partitioned GPUs for a container. Package topology explains the
// values.
type Policy = topology.Policy

// The policies.
const (
	PolicyDistributed = topology.Distributed
	PolicyPacked      = topology.Packed
	PolicyDistinct    = topology.Distinct
)

// Naming gives a resource name to the devices that match a pattern.
type Naming struct {
	Pattern Pattern
	// Name is a full name, as ParseName returns it.
	Name string
}

// A Selector selects devices and their treatment. Selecting a GPU also selects all its MIG devices.
type Selector struct {
	// Where is the path of the selector in the configuration, for messages: "selectors[0]".
	Where string
	// Devices select by index or UUID.
	Devices []Ref
	// PCI selects by PCI address, as ParsePCI returns it.
	PCI []string
	// Models select by the GPU's model.
	Models []Pattern

	// Exclude leaves the devices out of every resource.
	Exclude bool
	// Rename is the resource of the devices, as ParseName returns it; empty for the usual one.
	Rename string
	// Replicas is the number of containers that share each device, regardless of Sharing. 0 leaves
	// the number to Sharing, 1 means unshared.
	Replicas int
	// Units offers the GPUs in units of their memory.
	Units bool
}

// SelectsGPU reports whether the selector selects a whole GPU.
func (s Selector) SelectsGPU(g inventory.GPU) bool { return candidate{gpu: &g}.selectedBy(&s) }

// Excludes reports whether a GPU is in no resource: the GPU is excluded as a whole, or does not
// compute.
func (o Options) Excludes(g inventory.GPU) bool {
	i := slices.IndexFunc(o.Selectors, func(s Selector) bool { return s.SelectsGPU(g) })
	return displayOnly(g.Model) || i >= 0 && o.Selectors[i].Exclude
}

// Sharing decides how many containers share each device.
type Sharing struct {
	// Mode is how devices are shared, also those with replicas from a Selector.
	Mode SharingMode
	// RenameByDefault appends ".shared" to the name of shared devices without another name.
	RenameByDefault bool
	// OnePerRequest refuses several IDs to a container if one of them is a replica.
	OnePerRequest bool
	// Rules choose the shared devices; of several matching rules, the first with the most replicas
	// counts.
	Rules []SharingRule
}

// SharingRule shares devices of one resource.
type SharingRule struct {
	// Where is the path of the rule in the configuration, for messages:
	// "sharing.timeSlicing.resources[0]".
	Where string
	// Name is the resource without sharing.
	Name string
	// Rename is the resource of the shared devices; empty for the usual name.
	Rename string
	// First restricts the rule to this number of devices of the resource, from the lowest index; 0
	// for no limit.
	First int
	// Devices restrict the rule to these devices; nil for no limit.
	Devices []Ref
	// Replicas is the number of containers that share each device: 2 or more.
	Replicas int
}

// SharingMode is how several containers share a device.
type SharingMode int

// The modes of sharing.
const (
	// Unshared devices have one container each.
	Unshared SharingMode = iota
	// TimeSliced devices run their containers in turns, without limits.
	TimeSliced
	// MPS devices run their containers at the same time, by CUDA's Multi-Process Service.
	MPS
	// InUnits devices are units of the memory of a GPU. Each unit belongs to one container. Nothing
	// enforces the limits.
	InUnits
	// InMPSUnits devices are units whose limits are enforced by CUDA's Multi-Process Service.
	InMPSUnits
	// InDriverUnits devices are units whose limits are enforced by the driver on the cgroup of the
	// container.
	InDriverUnits
	// Percentage devices are tokens of the node, each for one percent of the threads that a
	// container may use.
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

// RuleOf returns the sharing rule for a resource, by its name without sharing; of several, the
// first with the most replicas.
func (s Sharing) RuleOf(name string) (rule SharingRule, shared bool) {
	if r := s.largest(func(r *SharingRule) bool { return r.Name == name }); r != nil {
		return *r, true
	}
	return SharingRule{}, false
}

// GPUName returns the resource of whole GPUs of a model, before sharing and Selectors.
func (o Options) GPUName(model string) string {
	return firstNaming(o.GPUs, model, WholeGPU)
}

// MIGName returns the resource of MIG devices of a profile, before sharing and Selectors.
func (o Options) MIGName(profile string) string {
	if o.MIG == MIGMixed {
		return firstNaming(o.MIGs, profile, ProfileName(profile))
	}
	return firstNaming(o.MIGs, profile, WholeGPU)
}

// firstNaming returns the name from the first matching Naming, otherwise the usual name.
func firstNaming(namings []Naming, key, usual string) string {
	for _, n := range namings {
		if n.Pattern.Match(key) {
			return n.Name
		}
	}
	return usual
}
