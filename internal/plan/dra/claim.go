package dra

import (
	"errors"
	"time"
)

// A Claim has this driver's parts of an allocated ResourceClaim.
type Claim struct {
	UID, Namespace, Name string
	// Results are the devices, in the order of the allocation.
	Results []Result
	// Pods are the UIDs of the pods in the claim's reservation.
	Pods []string
	// PodClaim is the pod's name of a claim from a template; empty for any other claim.
	PodClaim string
	// OwnerPod is the UID of the pod for which the claim was created; empty for a claim not created
	// for one pod. No other pod can use such a claim.
	OwnerPod string
	// Configs are the opaque configurations for this driver: first from classes, then from the
	// claim.
	Configs []OpaqueConfig
}

// A Result is a device allocated to a request of a claim.
type Result struct {
	// Request is the name of the request, or "<request>/<subrequest>" for an alternative of
	// firstAvailable.
	Request string
	// Pool and Device name the device.
	Pool, Device string
	// ShareID identifies a share of a device; empty for a whole device.
	ShareID string
	// ConsumedCapacity is the claim's part of a shared device, by the name of the capacity, in
	// Kubernetes quantities.
	ConsumedCapacity map[string]string
	// AdminAccess gives access to the device for monitoring, even while another claim has the
	// device.
	AdminAccess bool
	Tolerations []Toleration
}

// Sources of configuration.
const (
	FromClass = "FromClass"
	FromClaim = "FromClaim"
)

// An OpaqueConfig is a configuration for ParseConfig.
type OpaqueConfig struct {
	// Source is FromClass or FromClaim.
	Source string
	// Requests are the requests of the configuration: names of requests, or
	// "<request>/<subrequest>". Empty for all requests.
	Requests []string
	// Parameters are the JSON text of the object.
	Parameters []byte
}

// A Toleration is a kind of taint tolerated by a request, with Kubernetes' rules: an empty Operator
// is Equal, an empty Key with Exists is every key, and an empty Effect is every effect.
type Toleration struct {
	Key, Operator, Value, Effect string
}

// A Prepared is a device of a claim, ready for containers.
type Prepared struct {
	// Requests are the requests of the claim for the device. For an alternative it is the request
	// with the alternative.
	Requests []string
	// Pool, Device and ShareID are copied from the Result.
	Pool, Device, ShareID string
	// CDIDeviceIDs are the names for the container runtime, such as "k8s.gpu.nvidia.com/claim=<name>".
	CDIDeviceIDs []string
}

// A ClaimState is a prepared claim. Containers can use its devices.
type ClaimState struct {
	UID, Namespace, Name string
	// Since is the time of the first preparation.
	Since   time.Time
	Devices []DeviceState
}

// A DeviceState is a device of a claim.
type DeviceState struct {
	// Device is the name in the pool. ShareID identifies the share; empty for a whole device.
	Device, ShareID string
	// GPU is the UUID of the GPU, and MIG the UUID of the MIG device; empty for a whole GPU.
	GPU, MIG string
	// Memory is the claim's part of the memory, in bytes; 0 for all of it. Limited reports whether
	// every process is limited to it.
	Memory  int64
	Limited bool
	// Problem is why containers of the claim cannot use the device; empty if they can.
	Problem string
}

// ErrEnded is the error of a call that waited in this process during a change of the leader. The
// kubelet has to repeat the call to the new leader.
var ErrEnded = errors.New("another process of this program answers calls for claims now")

// ErrOtherName is why a process cannot lead: claims have, or may get, GPUs under another driver
// name. The kubelet can end their pods only through the driver of that name, so a new process must
// keep the name.
var ErrOtherName = errors.New("the driver has another name on this node")
