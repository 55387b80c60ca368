package mig

import (
	"context"
	"fmt"
	"reflect"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/eviction"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

// A DesiredLayout is the division of the node's GPUs that the operator wants. The zero
// DesiredLayout changes nothing.
type DesiredLayout struct {
	// Layout is the name of the layout; empty for none.
	Layout string
	// File contains the layout; nil for a built-in layout. It is immutable.
	File *layout.File
	// GPUs are the indexes or UUIDs of the GPUs to divide; empty for all. Other GPUs stay unchanged.
	GPUs []string
	// Replace allows the Controller to destroy GPU instances created by other programs. An
	// instance in use is never destroyed.
	Replace bool
	// Evict allows the Controller to evict pods from devices outside the layout.
	// EvictTimeout limits the attempts; 0 for no limit.
	Evict        bool
	EvictTimeout time.Duration
	// Pause allows the Controller to pause DaemonSets whose pods have a GPU open, if the
	// driver refuses to change the GPU because it is in use.
	Pause bool
	// Origin is the source of the layout: "configuration file", "label" or "mig apply". A change of
	// Origin starts a new attempt at once.
	Origin string
	// OrderNumber counts the runs of mig apply. A change starts a new attempt at once, also after a
	// failure.
	OrderNumber uint64
}

// A ConfigState is the progress of the node, in the words of NVIDIA's mig-manager for the label
// nvidia.com/mig.config.state.
type ConfigState string

// The states of a node.
const (
	// StateNone: no layout is wanted.
	StateNone ConfigState = ""
	// StatePending: some GPUs are being changed, or are still in use.
	StatePending ConfigState = "pending"
	// StateRebooting: a MIG mode is set, and takes effect after a reset of the GPU or a restart of the
	// node. This program never restarts the node.
	StateRebooting ConfigState = "rebooting"
	// StateSuccess: all GPUs have the layout.
	StateSuccess ConfigState = "success"
	// StateFailed: at least one GPU does not have the layout. The Controller retries if a
	// retry may succeed.
	StateFailed ConfigState = "failed"
)

// A Status is the state of the node and of each GPU.
type Status struct {
	State ConfigState
	// Layout and OrderNumber identify the DesiredLayout to which the other fields refer.
	Layout      string
	OrderNumber uint64
	// Reason says why State is not success; empty for success, and if no layout is wanted.
	Reason string
	// GPUs are the GPUs that support MIG, by ascending Index.
	GPUs []GPU
	// Resume says that paused DaemonSets may run again: the progress of all GPUs is known, no change
	// needs paused DaemonSets, and no other process of this program changes GPUs.
	Resume bool
}

// Equal reports whether two Statuses are equal.
func (s Status) Equal(other Status) bool { return reflect.DeepEqual(s, other) }

// A Phase is the progress of one GPU.
type Phase string

// The phases of a GPU.
const (
	// PhaseUnknown: the division of the GPU has not been read yet.
	PhaseUnknown Phase = "unknown"
	// PhaseKept: no change is wanted for this GPU. If a layout is wanted, Reason says why
	// not for this GPU.
	PhaseKept Phase = "kept"
	// PhaseWaiting: the GPU is to be changed; Reason says what the change waits for.
	PhaseWaiting Phase = "waiting"
	// PhaseChanging: the steps are in progress.
	PhaseChanging Phase = "changing"
	// PhaseReset: the mode takes effect after a reset of the GPU or a restart of the node.
	PhaseReset Phase = "waiting for a reset"
	// PhaseDone: the GPU has the layout.
	PhaseDone Phase = "done"
	// PhaseFailed: the GPU cannot have the layout, or a step failed; Reason says why.
	PhaseFailed Phase = "failed"
)

// A GPU is the progress of one GPU towards the DesiredLayout.
type GPU struct {
	Index       int
	UUID, Model string
	Phase       Phase
	// Reason is a sentence without a full stop; empty if there is nothing to say.
	Reason string
	// Holders are the users that must stop first.
	Holders []Holder
	// Change has the division before and after, and the steps, as of the last time the GPU was read.
	Change layout.GPUChange
	// Retry is the time of the next attempt after a failure; zero if none is planned.
	Retry time.Time
}

// A Holder is a user of a device that the layout does not have: a pod or a process.
type Holder struct {
	// Device is the UUID of the GPU or MIG device.
	Device string
	// Pod is the pod that holds the device; zero for a process.
	Pod Pod
	// PID is a process that has the device open or computes on it, as far as the driver
	// shows processes; 0 for a pod. Name is the name of its program; empty if unknown.
	PID  int
	Name string
}

// String names the user.
func (h Holder) String() string {
	switch {
	case h.Pod.Name != "":
		return "pod " + h.Pod.Namespace + "/" + h.Pod.Name
	case h.Pod.UID != "":
		return "pod with UID " + h.Pod.UID
	}
	return fmt.Sprintf("process %d", h.PID)
}

// A Pod identifies a pod. Either Name or UID may be empty.
type Pod = eviction.Pod

// A Driver divides GPUs. All methods return when ctx ends.
type Driver interface {
	// Partitions returns the division of the GPU with this UUID.
	Partitions(ctx context.Context, uuid string) (inventory.Partitions, error)
	// Repartition executes one step, and returns the ID of the created instance. After
	// inventory.ErrNoAnswer or the end of ctx the step may still take effect; Partitions
	// returns an error until the outcome is known.
	Repartition(ctx context.Context, uuid string, step inventory.MIGStep) (int, error)
	// Processes returns the processes that compute on GPUs, by the UUID of the GPU.
	Processes(ctx context.Context, gpus []string) (map[string][]inventory.Process, error)
}

// An Evictor evicts pods.
type Evictor interface {
	// Evict returns nil if the pod is terminating or gone. The error says why the pod is not evicted
	// now, for example because of a disruption budget.
	Evict(ctx context.Context, pod Pod) error
}

// A Pauser pauses DaemonSets by the node labels nvidia.com/gpu.deploy.NAME, as NVIDIA's mig-manager
// does. The DaemonSets run again when the Status says Resume.
type Pauser interface {
	// Pause sets the labels that end the pods with these UIDs, and returns after setting
	// them. The error says why a pod does not end.
	Pause(ctx context.Context, pods []string) error
}
