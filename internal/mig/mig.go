// Package mig owns how the GPUs of the node are divided: it makes the MIG layout that the operator
// wants, while the rest of the node works. It holds only the devices that a change ends, waits
// until nobody uses them, writes down what it is about to do, and undoes on one GPU what failed
// there.
//
// Package daemon builds it; gpu-node-agent gives it an Evictor. Package choice, below it, decides
// which layout the node should have: the configuration file's, the Node label's or that of
// mig apply.
package mig

import (
	"context"
	"reflect"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

// A Wish is how the operator wants the GPUs of the node to be divided. The zero Wish asks for
// nothing.
type Wish struct {
	// Layout is the name of the layout; empty asks for nothing.
	Layout string
	// File has the layout; nil for a built-in one. It is immutable.
	File *layout.File
	// GPUs are the indexes or UUIDs of the GPUs that the Wish is about; empty for all. The others stay
	// as they are.
	GPUs []string
	// Replace allows to destroy GPU instances that this program did not make. No instance that is in
	// use is ever destroyed.
	Replace bool
	// Evict says that pods are evicted that hold devices which the layout does not have. EvictTimeout
	// is how long that is tried; 0 for no limit.
	Evict        bool
	EvictTimeout time.Duration
	// Pause says that DaemonSets are paused whose pods have open a GPU that is to change and that the
	// driver calls in use.
	Pause bool
	// Origin says where the Wish comes from: "configuration file", "label", "mig apply". A Wish from
	// elsewhere is tried at once.
	Origin string
	// Again is a number: when it changes, what failed is tried again at once.
	Again uint64
}

// A ConfigState is how far the node is with its Wish, in the words that NVIDIA's mig-manager puts
// into nvidia.com/mig.config.state.
type ConfigState string

// The states.
const (
	// StateNone: there is no Wish.
	StateNone ConfigState = ""
	// StatePending: some GPUs are being changed, or wait until nobody uses them.
	StatePending ConfigState = "pending"
	// StateRebooting: a MIG mode was set that is in force after a reset of the GPU or a restart of the
	// node. Nothing here restarts a node.
	StateRebooting ConfigState = "rebooting"
	// StateSuccess: all GPUs are as the Wish says.
	StateSuccess ConfigState = "success"
	// StateFailed: some GPU is not as the Wish says. What may succeed later is tried again.
	StateFailed ConfigState = "failed"
)

// A Status is the state of the owner and of each GPU.
type Status struct {
	State ConfigState
	// Layout and Again are those of the Wish that the other fields are about.
	Layout string
	Again  uint64
	// Reason says why the State is not success; empty if it is, or if there is no Wish.
	Reason string
	// GPUs are the GPUs that have multi-instance mode, by ascending Index.
	GPUs []GPU
	// Resume says that DaemonSets that were paused for a change go on: it is known of all GPUs how far
	// they are with the Wish, no change needs DaemonSets paused, and no other process of this program
	// changes GPUs.
	Resume bool
}

// Equal reports whether two Statuses say the same.
func (s Status) Equal(other Status) bool { return reflect.DeepEqual(s, other) }

// A Phase is how far one GPU is.
type Phase string

// The phases.
const (
	// PhaseUnknown: it was not read yet how the GPU is divided.
	PhaseUnknown Phase = "unknown"
	// PhaseKept: nothing is wanted of this GPU; Reason says why if there is a Wish.
	PhaseKept Phase = "kept"
	// PhaseWaiting: the GPU is to be changed, and Reason says what is waited for.
	PhaseWaiting Phase = "waiting"
	// PhaseChanging: the steps are being made.
	PhaseChanging Phase = "changing"
	// PhaseReset: the mode is in force after a reset of the GPU or a restart of the node.
	PhaseReset Phase = "waiting for a reset"
	// PhaseDone: the GPU is as the Wish says.
	PhaseDone Phase = "done"
	// PhaseFailed: the GPU cannot be as the Wish says, or a step failed; Reason says why.
	PhaseFailed Phase = "failed"
)

// A GPU is how far one GPU is with the Wish.
type GPU struct {
	Index       int
	UUID, Model string
	Phase       Phase
	// Reason is a sentence without a full stop; empty if there is nothing to say.
	Reason string
	// Holders are the users that must end first.
	Holders []Holder
	// Change is what the Wish makes of the GPU: the rows before and after, and the steps. It is that
	// of the last time the GPU was read.
	Change layout.GPUChange
	// Retry is when what failed is tried again; zero if nothing is.
	Retry time.Time
}

// A Holder is a user of a device that the layout does not have.
type Holder struct {
	// Device is the UUID of the GPU or MIG device.
	Device string
	// Pod is the pod that holds it; zero for a process.
	Pod Pod
	// PID is a process that computes on it, as far as the driver shows it to this process, or has it
	// open; 0 for a pod. Name is that of its program; empty if it is not known.
	PID  int
	Name string
}

// A Pod names a pod. Either Name or UID may be empty.
type Pod struct{ Namespace, Name, UID string }

// A Driver divides GPUs. All methods return by the end of ctx.
type Driver interface {
	// Partitions returns how a GPU is divided, by UUID.
	Partitions(ctx context.Context, uuid string) (inventory.Partitions, error)
	// Repartition makes one step, and returns the ID of the instance that was created. After
	// inventory.ErrNoAnswer or the end of ctx the step may still happen; Partitions fails until that
	// is over.
	Repartition(ctx context.Context, uuid string, step inventory.MIGStep) (int, error)
	// Processes returns the processes that compute on GPUs, by UUID.
	Processes(ctx context.Context, gpus []string) (map[string][]inventory.Process, error)
}

// Users knows who uses devices.
type Users interface {
	// Users returns which pods hold the given GPUs or MIG devices, by UUID. No error says that no
	// other pod holds one, and that none gets one as long as they are listed as Unhealthy. The error
	// says why that is not known now.
	Users(ctx context.Context, devices []string) ([]kubelet.HeldDevice, error)
}

// An Evictor has pods evicted.
type Evictor interface {
	// Evict returns nil if the pod was told to end, or is gone. The error says why it is not evicted
	// now, such as a disruption budget.
	Evict(ctx context.Context, pod Pod) error
}

// A Pauser pauses DaemonSets by the labels nvidia.com/gpu.deploy.NAME of the node, as NVIDIA's
// mig-manager does it. They run again when the Status says Resume.
type Pauser interface {
	// Pause sets the labels that end the pods with these UIDs. It returns when the labels are set; the
	// error says why some pod does not end by that.
	Pause(ctx context.Context, pods []string) error
}
