package dra

import (
	"errors"
	"time"
)

// A Claim has the parts of an allocated ResourceClaim that belong to this driver.
type Claim struct {
	UID, Namespace, Name string
	// Results are the devices, in the order of the allocation.
	Results []Result
	// Pods are the UIDs of the pods that may use the claim.
	Pods []string
	// PodClaim is the name that the pod has for a claim that was made from a template; empty for any
	// other claim.
	PodClaim string
	// Configs are the opaque configuration for this driver, that of classes before that of the claim.
	Configs []OpaqueConfig
}

// A Result is a device that was given to a request of a claim.
type Result struct {
	// Request is the name of the request, or "<request>/<subrequest>" for an alternative of
	// firstAvailable.
	Request string
	// Pool and Device name the device.
	Pool, Device string
	// ShareID tells shares of one device from one another; it is empty for a device that the claim has
	// alone.
	ShareID string
	// ConsumedCapacity is what the claim has of a device that is shared, by the name of the capacity,
	// as Kubernetes writes quantities.
	ConsumedCapacity map[string]string
	// AdminAccess gives the device for monitoring, also while another claim has it.
	AdminAccess bool
	Tolerations []Toleration
}

// Sources of configuration.
const (
	FromClass = "FromClass"
	FromClaim = "FromClaim"
)

// An OpaqueConfig is a configuration of the kind that ParseConfig reads.
type OpaqueConfig struct {
	// Source is FromClass or FromClaim.
	Source string
	// Requests are the requests that it is for: names of requests, or "<request>/<subrequest>".
	// Without any it is for all.
	Requests []string
	// Parameters are the text of the object, in JSON.
	Parameters []byte
}

// A Toleration is a kind of taint that a request tolerates, as Kubernetes has it: an empty Operator
// is Equal, an empty Key with Exists is every key, and an empty Effect is every effect.
type Toleration struct {
	Key, Operator, Value, Effect string
}

// A Prepared is a device of a claim that containers can be started with.
type Prepared struct {
	// Requests are the requests of the claim that the device is for; a device of an alternative is for
	// the request that has it.
	Requests []string
	// Pool, Device and ShareID are those of the Result.
	Pool, Device, ShareID string
	// CDIDeviceIDs are the names for the container runtime, such as "k8s.gpu.nvidia.com/claim=<name>".
	CDIDeviceIDs []string
}

// A ClaimState is a claim that is prepared, so that containers can use its devices.
type ClaimState struct {
	UID, Namespace, Name string
	// Since is when it was first prepared.
	Since   time.Time
	Devices []DeviceState
}

// A DeviceState is a device of a claim.
type DeviceState struct {
	// Device is its name in the pool. ShareID is that of the share, if it is one.
	Device, ShareID string
	// GPU is the UUID of the GPU, and MIG that of the MIG device, if it is one.
	GPU, MIG string
	// Memory is the part of the memory that the claim has, in bytes; 0 for all of it. Limited says
	// that every process is kept to it.
	Memory  int64
	Limited bool
	// Problem is why containers of the claim cannot use the device; empty if they can.
	Problem string
}

// ErrEnded is the error of a call that waited in this process while it handed the lead of the node
// over. Kubelet has to ask the process that leads next.
var ErrEnded = errors.New("another process of this program answers calls for claims now")

// ErrOtherName is why a process cannot lead: claims have, or may get, GPUs under another name of
// the driver. Kubelet can end their pods only by the driver of that name, so a new process keeps
// it.
var ErrOtherName = errors.New("the driver has another name on this node")
