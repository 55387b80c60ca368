package holders

import "time"

// A Key names a device at the kubelet.
type Key struct{ Resource, ID string }

// A Holder is the container that holds a device, and its pod.
type Holder struct {
	Pod string
	// CheckpointOnly says that only the kubelet's checkpoint names the pod. The pod
	// may have ended since.
	CheckpointOnly bool
	Container      string
}

// Reason says that the holder's pod holds the device.
func (h Holder) Reason() string { return "pod " + h.Pod + " holds it" }

// A Source is the kubelet that named the holders of devices. A holder has ended only if the same
// kubelet no longer names the holder. The zero value means no kubelet.
type Source struct{ Incarnation, Connections uint64 }

// An Account is what the kubelet's checkpoint and PodResources say, at one moment,
// about the pods that hold devices.
type Account struct {
	Kubelet uint64    // incarnation of the running kubelet; 0 if none runs
	Source  Source    // of what PodResources has told
	Began   time.Time // when the accounts were read; zero if they were not
	Held    map[Key]Holder
	// Listed are the devices that the checkpoint counts as healthy, by resource. Nodes are the
	// devices that pods hold according to the checkpoint, with their NUMA nodes.
	Listed map[string][]string
	Nodes  map[Key][]int64
	// UnknownBecause is why a pod may hold a device missing from Held; empty if no pod can.
	UnknownBecause string
	Partial        bool // there is a gap, and Held is what one of the accounts says
	Unreadable     bool // the checkpoint cannot be read
	// NoCheckpoint says that the checkpoint does not exist although the kubelet has
	// answered. The kubelet writes a checkpoint as soon as it has a device.
	NoCheckpoint bool
	// NoPodResources says that PodResources cannot be asked. Then the kubelet's
	// checkpoint names ended pods until the kubelet gives devices to another pod.
	NoPodResources bool
}

// Tells reports whether at least one of the accounts says who holds devices.
func (a Account) Tells() bool { return a.UnknownBecause == "" || a.Partial }

// Known returns all devices of a resource in the checkpoint, by ID, with the NUMA
// nodes of held devices.
func (a Account) Known(resource string) map[string][]int64 {
	nodes := map[string][]int64{}
	for _, id := range a.Listed[resource] {
		nodes[id] = nil
	}
	for key, of := range a.Nodes {
		if key.Resource == resource {
			nodes[key.ID] = of
		}
	}
	return nodes
}
