package status

// A Holder is a container that holds a device of the node.
type Holder struct {
	// Device is the UUID of the GPU or MIG device.
	Device string `json:"device"`
	// Namespace, Pod and Container are the names of the container and its pod.
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	Container string `json:"container"`
	// Claim is the name of the ResourceClaim by which the container holds the device; empty if it holds it by a resource such as
	// nvidia.com/gpu.
	Claim string `json:"claim,omitempty"`
}
