package status

import (
	"fmt"
	"time"
)

// A Holder is a container that holds a device of the node.
type Holder struct {
	// Device is the UUID of the GPU or MIG device.
	Device string `json:"device"`
	// Namespace, Pod and Container are the names of the container and its pod.
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	Container string `json:"container"`
	// Claim is the name of the ResourceClaim by which the container holds the device; empty if it
	// holds it by a resource such as nvidia.com/gpu.
	Claim string `json:"claim,omitempty"`
	// Receipt is what holds the container to its part of the GPU; nil for a container that does not
	// have the device in units.
	Receipt *Receipt `json:"receipt,omitempty"`
}

// A Receipt says what a container with units of a GPU's memory asked for, and what holds it to
// that.
type Receipt struct {
	// MemoryMiB is the memory of its units, and Percentage the part of the threads that it may use; 0
	// if it asked for none.
	MemoryMiB  int `json:"memoryMiB"`
	Percentage int `json:"percentage,omitempty"`
	// Layer is mps where its processes are clients of MPS with limits, driver where the driver limits
	// its cgroup, none where units are only counted, and empty where that is not known.
	Layer string `json:"layer,omitempty"`
	// ReadMiB is the limit that the driver says it has for the container's cgroup; 0 if it was not
	// read.
	ReadMiB int `json:"readMiB,omitempty"`
	// Since is when it was given the units; zero if that is not known.
	Since time.Time `json:"since,omitzero"`
	// Differences are sentences: how what it was given, as kubelet keeps it, and what the MPS control
	// daemon says now differ from what it asked for.
	Differences []string `json:"differences,omitempty"`
}

// Short says what the container has, and whether that differs from what it asked for, in few words.
func (r Receipt) Short() string {
	text := fmt.Sprintf("%d MiB", r.MemoryMiB)
	if r.Percentage > 0 {
		text += fmt.Sprintf(", %d percent", r.Percentage)
	}
	switch r.Layer {
	case "none":
		text += ", only counted"
	case "":
		text += ", by a layer that is not known"
	default:
		text += ", by " + r.Layer
	}
	if r.ReadMiB > 0 {
		text += ", read back"
	}
	if len(r.Differences) > 0 {
		text += ", not as asked for"
	}
	return text
}

// String says what the container has, since when, and how that differs from what it asked for.
func (r Receipt) String() string {
	text := r.Short()
	if !r.Since.IsZero() {
		text += ", since " + Stamp(r.Since)
	}
	for _, d := range r.Differences {
		text += "; " + d
	}
	return text
}
