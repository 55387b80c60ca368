package status

import (
	"fmt"
	"time"
)

// A Holder is a container that holds a device of the node.
type Holder struct {
	// Device is the UUID of the GPU or MIG device.
	Device string `json:"device"`
	// Namespace, Pod and Container name the container and its pod.
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	Container string `json:"container"`
	// Claim is the name of the container's ResourceClaim for the device; empty if the container
	// requested a resource such as nvidia.com/gpu.
	Claim string `json:"claim,omitempty"`
	// Receipt describes the limits of a container with units of the GPU; nil for any other
	// container.
	Receipt *Receipt `json:"receipt,omitempty"`
}

// A Receipt is the memory and the threads that a container with units of a GPU requested, and how
// the limits are enforced.
type Receipt struct {
	// MemoryMiB is the memory of the requested units. Percentage is the requested share of the
	// threads; 0 if none was requested.
	MemoryMiB  int `json:"memoryMiB"`
	Percentage int `json:"percentage,omitempty"`
	// Layer is mps if the processes are clients of MPS with limits, driver if the driver limits the
	// cgroup, none if units are only counted, and empty if unknown.
	Layer string `json:"layer,omitempty"`
	// ReadMiB is the limit of the container's cgroup as read back from the driver; 0 if it was not
	// read.
	ReadMiB int `json:"readMiB,omitempty"`
	// Since is when the container was given the units; zero if unknown.
	Since time.Time `json:"since,omitzero"`
	// Differences are sentences. Each names a difference between the request and either the
	// allocation recorded by the kubelet or the answer of the MPS control daemon.
	Differences []string `json:"differences,omitempty"`
}

// Short returns the container's limits in a few words, and whether they differ from the request.
func (r Receipt) Short() string {
	text := fmt.Sprintf("%d MiB", r.MemoryMiB)
	if r.Percentage > 0 {
		text += fmt.Sprintf(", %d percent", r.Percentage)
	}
	switch r.Layer {
	case "none":
		text += ", only counted"
	case "":
		text += ", by an unknown layer"
	default:
		text += ", by " + r.Layer
	}
	if r.ReadMiB > 0 {
		text += ", read back"
	}
	if len(r.Differences) > 0 {
		text += ", not as requested"
	}
	return text
}

// String returns the container's limits, their age and each difference from the request.
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
