package containeredits

import (
	"fmt"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Options is what the configuration decides about the Edits. It is a value: nobody changes it, or
// what its slices hold, after it was made.
type Options struct {
	// Strategies are the ways in which the devices are passed to the runtime. All of them are used.
	Strategies []Strategy
	// IDs says how devices are named to the runtime.
	IDs IDStrategy
	// Void sets NVIDIA_VISIBLE_DEVICES=void in CDI specs, and for the container where all strategies
	// are CDI, so that what an image says there has no effect, and what another strategy says has none
	// where the runtime knows CDI.
	Void bool
	// DeviceNodes gives the container the nodes of its devices too, if one strategy at least is not
	// CDI.
	DeviceNodes bool
	// DevRoot is the host's directory that dev/ is in.
	DevRoot string
	// AnnotationPrefix begins the keys of CDI annotations.
	AnnotationPrefix string
	// IMEX gives the container IMEX channel 0 where the node has it.
	IMEX bool
	// GDRCopy, GDS and MOFED say when the container is given these companions of the driver.
	GDRCopy, GDS, MOFED Companion
	// MPSRoot is the host's directory of MPS state.
	MPSRoot string
}

// UsesCDI reports whether devices are passed to the runtime by names of a CDI spec.
func (o Options) UsesCDI() bool {
	return slices.ContainsFunc(o.Strategies, Strategy.cdi)
}

// OnlyCDI reports whether devices are passed to the runtime by CDI names alone.
func (o Options) OnlyCDI() bool {
	return !slices.ContainsFunc(o.Strategies, func(s Strategy) bool { return !s.cdi() })
}

// GivesNodes reports whether containers are given the nodes of their devices by kubelet, which
// takes them from the host.
func (o Options) GivesNodes() bool { return o.DeviceNodes && !o.OnlyCDI() }

// wants reports whether containers of a node with these device nodes are to have a companion of the
// driver.
func (o Options) wants(node, control inventory.ControlNodes) bool {
	there := control.Has(node)
	return node == inventory.NodeIMEXChannel0 && o.IMEX ||
		node == inventory.NodeGDRCopy && o.GDRCopy.wanted(there) || node == inventory.NodeGDS && o.GDS.wanted(there) ||
		// many nodes have RDMA for other purposes
		node == inventory.NodeRDMA && o.MOFED.wanted(there && control.Has(inventory.NodeGDS))
}

// Companion says when containers are given something beside their GPUs.
type Companion int

// When containers are given a companion of the driver.
const (
	// Never gives it to no container.
	Never Companion = iota
	// Always asks for it on each node; a node that lacks it gives none.
	Always
	// Auto asks for it on nodes that have it. RDMA devices are given on nodes that also have GPUDirect
	// Storage, as NVIDIA's operator gives them.
	Auto
)

func (c Companion) String() string { return [...]string{"false", "true", "auto"}[c] }

func (c Companion) wanted(there bool) bool { return c == Always || c == Auto && there }

// Strategy is a way to pass the devices of a container to the runtime.
type Strategy int

// The strategies.
const (
	// EnvVar lists the devices in NVIDIA_VISIBLE_DEVICES.
	EnvVar Strategy = iota
	// VolumeMounts mounts a file named after each device, which a container cannot do by itself.
	VolumeMounts
	// CDIAnnotations lists CDI names in an annotation.
	CDIAnnotations
	// CDICRI lists CDI names in the field of kubelet's API that is for them.
	CDICRI
)

// AllStrategies are all strategies there are.
var AllStrategies = [...]Strategy{EnvVar, VolumeMounts, CDIAnnotations, CDICRI}

func (s Strategy) String() string {
	switch s {
	case EnvVar:
		return "envvar"
	case VolumeMounts:
		return "volume-mounts"
	case CDIAnnotations:
		return "cdi-annotations"
	case CDICRI:
		return "cdi-cri"
	}
	return fmt.Sprintf("Strategy(%d)", int(s))
}

func (s Strategy) cdi() bool { return s == CDIAnnotations || s == CDICRI }

// IDStrategy is how devices are named to the runtime.
type IDStrategy int

// The ID strategies.
const (
	// ByUUID names devices by UUID.
	ByUUID IDStrategy = iota
	// ByIndex names GPUs by index "i" and MIG devices by "i:j".
	ByIndex
)

func (s IDStrategy) String() string {
	switch s {
	case ByUUID:
		return "uuid"
	case ByIndex:
		return "index"
	}
	return fmt.Sprintf("IDStrategy(%d)", int(s))
}
