package v1

// Sharing says which devices are shared by how many containers. MPS wins when both are given.
type Sharing struct {
	TimeSlicing *Replicated `json:"timeSlicing,omitempty"`
	MPS         *Replicated `json:"mps,omitempty"`
}

// Replicated is how one way of sharing is used.
type Replicated struct {
	// RenameByDefault adds ".shared" to the name of shared resources that have no Rename.
	RenameByDefault *bool `json:"renameByDefault,omitempty"`
	// FailRequestsGreaterThanOne refuses a container more than one replica. Unset means no for
	// time-slicing, yes for MPS.
	FailRequestsGreaterThanOne *bool `json:"failRequestsGreaterThanOne,omitempty"`
	// Resources are what is shared; at least one.
	Resources []ReplicatedResource `json:"resources"`
}

// ReplicatedResource is a resource whose devices are shared.
type ReplicatedResource struct {
	// Name is the name of the resource as it is without sharing; "nvidia.com/" is put before it when
	// it is missing.
	Name *string `json:"name"`
	// Rename is the name that the shared devices are offered under.
	Rename *string `json:"rename,omitempty"`
	// Devices are those that are shared: all of the resource if it is nil.
	Devices *DeviceSet `json:"devices,omitempty"`
	// Replicas is how many containers share a device: 2 or more.
	Replicas *int `json:"replicas"`
}
