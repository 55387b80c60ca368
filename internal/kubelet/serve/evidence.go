package serve

import (
	"context"
	"errors"
	"io/fs"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

type deviceKey struct{ resource, id string }

// A holder is the container that holds a device, and its pod.
type holder struct {
	pod string
	// checkpointOnly says that only kubelet's checkpoint names the pod, which may have ended since.
	checkpointOnly bool
	container      string
}

// A source is the kubelet that has told who holds devices. Only when the same kubelet no longer
// tells of a holder has that holder ended. The zero value is none.
type source struct{ incarnation, connections uint64 }

// evidence is what kubelet's checkpoint and PodResources say, at one moment, about which pods hold
// devices.
type evidence struct {
	kubelet uint64    // incarnation of the running kubelet; 0 if none runs
	source  source    // of what PodResources has told
	began   time.Time // when the accounts were read; zero if they were not
	held    map[deviceKey]holder
	// gap is why a pod may hold a device that is not in held; empty if no pod can.
	gap        string
	partly     bool // there is a gap, and held is what one of the accounts says
	unreadable bool // the checkpoint cannot be read
	// absent says that there is none, and that kubelet has answered: it writes one as soon as it has a
	// device.
	absent bool
	// unasked says that PodResources cannot be asked. Then kubelet's checkpoint names pods that have
	// ended until kubelet gives devices to another pod.
	unasked    bool
	checkpoint kubelet.Checkpoint
	// healthy are the devices that kubelet holds for healthy, by resource, and alone says that no
	// other GPU device plugin listens. Both are known only if readOthers was called.
	healthy map[string][]string
	alone   bool
}

// tells reports whether at least one of the accounts says who holds devices.
func (e evidence) tells() bool { return e.gap == "" || e.partly }

// accounts reads kubelet's checkpoint and asks PodResources. It is for one goroutine.
type accounts struct {
	Collaborators
	kubelet  uint64 // incarnation of kubelet at the last reading
	answered bool   // this kubelet has answered through PodResources
}

// read returns which pods hold devices.
//
// The checkpoint names every pod that holds a device: kubelet itself starts from it. PodResources
// leaves out init containers, and most pods until kubelet has a connection to the API server. It
// adds only the pods that kubelet could not write to the checkpoint.
func (a *accounts) read(ctx context.Context) evidence {
	there, began := a.Incarnation.Value(), a.Clock.Now()
	checkpoint, unreadable := a.Checkpoint()
	e := evidence{kubelet: there, began: began, checkpoint: checkpoint, held: heldIn(checkpoint)}
	ctx, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	before := a.connections()
	answer, failed := a.Accountant.Held(ctx)
	connected := a.connections()
	for _, d := range answer {
		e.held[deviceKey{d.Resource, d.ID}] = holder{pod: d.Pod, container: d.Container}
	}
	e.unasked = e.kubelet != 0 && errors.Is(failed, kubelet.ErrNoPodResources)
	if a.kubelet != e.kubelet {
		a.kubelet, a.answered = e.kubelet, false
	}
	switch {
	case e.kubelet == 0:
		e.gap = "kubelet does not run"
	case a.Incarnation.Value() != e.kubelet, connected != before && connected > 1:
		e.gap = "kubelet has just restarted"
	case unreadable != nil:
		e.gap, e.unreadable, e.partly = unreadable.Error(), true, failed == nil
		e.absent = failed == nil && errors.Is(unreadable, fs.ErrNotExist)
	case failed != nil && a.answered:
		e.gap, e.partly = failed.Error(), true
	}
	a.answered = a.answered || failed == nil
	if e.gap == "" && failed == nil {
		e.source = source{e.kubelet, connected}
	}
	return e
}

func (a *accounts) connections() uint64 {
	if a.Connections == nil {
		return 0
	}
	return a.Connections()
}

// readOthers adds to evidence what tells whether other plugins serve devices.
//
// PodResources says what kubelet has in memory. What is saved may have devices of a plugin that has
// ended. Neither tells of a plugin whose devices are all Unhealthy, but it listens.
func (a *accounts) readOthers(ctx context.Context, e *evidence) {
	ctx, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	healthy, err := a.Accountant.Allocatable(ctx)
	if err != nil {
		healthy = e.checkpoint.Healthy
	}
	e.healthy, e.alone = healthy, len(a.Registrar.Listening(ctx)) == 0
}

// heldIn returns the devices that pods hold according to a checkpoint.
func heldIn(checkpoint kubelet.Checkpoint) map[deviceKey]holder {
	held := make(map[deviceKey]holder, len(checkpoint.Held))
	for _, d := range checkpoint.Held {
		held[deviceKey{d.Resource, d.ID}] = holder{pod: d.Pod, container: d.Container, checkpointOnly: true}
	}
	return held
}
