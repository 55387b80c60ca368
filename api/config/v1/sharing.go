package v1

// Sharing decides how many containers share which devices. MPS takes precedence over
// TimeSlicing.
type Sharing struct {
	TimeSlicing *Replicated `json:"timeSlicing,omitempty"`
	MPS         *Replicated `json:"mps,omitempty"`
}

// Replicated has the rules of one way of sharing.
type Replicated struct {
	// RenameByDefault appends ".shared" to the name of shared resources without Rename.
	RenameByDefault *bool `json:"renameByDefault,omitempty"`
	// FailRequestsGreaterThanOne refuses several replicas for one container. By default it
	// is false for time-slicing, and true for MPS.
	FailRequestsGreaterThanOne *bool `json:"failRequestsGreaterThanOne,omitempty"`
	// Resources are the shared resources; at least one.
	Resources []ReplicatedResource `json:"resources"`
}

// ReplicatedResource is a resource whose devices are shared.
type ReplicatedResource struct {
	// Name is the name of the resource without sharing; "nvidia.com/" may be omitted.
	Name *string `json:"name"`
	// Rename is the name of the resource of shared devices.
	Rename *string `json:"rename,omitempty"`
	// Devices are the shared devices: nil for all devices of the resource.
	Devices *DeviceSet `json:"devices,omitempty"`
	// Replicas is the number of containers that share a device: 2 or more.
	Replicas *int `json:"replicas"`
}
