package containeredits

import (
	"fmt"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Options are the parts of the configuration for Edits. They are immutable, including the contents
// of the slices.
type Options struct {
	// Strategies are the ways to pass devices to the runtime. All of them are used.
	Strategies []Strategy
	// IDs decides the names of devices for the runtime.
	IDs IDStrategy
	// Void sets NVIDIA_VISIBLE_DEVICES=void in CDI specs, and for the container if all strategies
	// are CDI. It overrides the value of the image and, where the runtime supports CDI, the value
	// of other strategies.
	Void bool
	// DeviceNodes also gives the container the nodes of its devices, if at least one strategy is
	// not CDI.
	DeviceNodes bool
	// DevRoot is the host's directory that contains dev/.
	DevRoot string
	// AnnotationPrefix begins the keys of CDI annotations.
	AnnotationPrefix string
	// IMEX gives the container IMEX channel 0 on nodes with the channel.
	IMEX bool
	// GDRCopy, GDS and MOFED decide when containers get these companions of the driver.
	GDRCopy, GDS, MOFED Companion
	// MPSRoot is the host's directory of MPS state.
	MPSRoot string
}

// UsesCDI reports whether devices are passed to the runtime by names in a CDI spec.
func (o Options) UsesCDI() bool {
	return slices.ContainsFunc(o.Strategies, Strategy.cdi)
}

// OnlyCDI reports whether devices are passed to the runtime by CDI names alone.
func (o Options) OnlyCDI() bool {
	return !slices.ContainsFunc(o.Strategies, func(s Strategy) bool { return !s.cdi() })
}

// GivesNodes reports whether the kubelet gives containers the nodes of their devices, from the
// host.
func (o Options) GivesNodes() bool { return o.DeviceNodes && !o.OnlyCDI() }

// wants reports whether containers get a companion of the driver on a node with these device nodes.
func (o Options) wants(node, control inventory.ControlNodes) bool {
	there := control.Has(node)
	return node == inventory.NodeIMEXChannel0 && o.IMEX ||
		node == inventory.NodeGDRCopy && o.GDRCopy.wanted(there) || node == inventory.NodeGDS && o.GDS.wanted(there) ||
		// Many nodes have RDMA for other purposes.
		node == inventory.NodeRDMA && o.MOFED.wanted(there && control.Has(inventory.NodeGDS))
}

// Companion decides when containers get a device beside their GPUs.
type Companion int

// The values of Companion.
const (
	// Never gives the companion to no container.
	Never Companion = iota
	// Always expects the companion on every node; containers on a node without it get none.
	Always
	// Auto gives the companion on nodes with it. RDMA devices also need GPUDirect Storage on the
	// node, as in NVIDIA's operator.
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
	// VolumeMounts mounts a file named after each device, which no container can do by itself.
	VolumeMounts
	// CDIAnnotations lists CDI names in an annotation.
	CDIAnnotations
	// CDICRI lists CDI names in the field of the kubelet's API for CDI devices.
	CDICRI
)

// AllStrategies are all strategies.
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

// IDStrategy decides the names of devices for the runtime.
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
