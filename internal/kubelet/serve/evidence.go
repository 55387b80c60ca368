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
	// checkpointOnly says that only the kubelet's checkpoint names the pod. The pod may have ended
	// since.
	checkpointOnly bool
	container      string
}

// A source is the kubelet that named the holders of devices. A holder has ended only if the same
// kubelet no longer names the holder. The zero value means no kubelet.
type source struct{ incarnation, connections uint64 }

// evidence is what the kubelet's checkpoint and PodResources say, at one moment, about the pods
// that hold devices.
type evidence struct {
	kubelet uint64    // incarnation of the running kubelet; 0 if none runs
	source  source    // of what PodResources has told
	began   time.Time // when the accounts were read; zero if they were not
	held    map[deviceKey]holder
	// unknownBecause is why a pod may hold a device missing from held; empty if no pod can.
	unknownBecause string
	partial        bool // there is a gap, and held is what one of the accounts says
	unreadable     bool // the checkpoint cannot be read
	// noCheckpoint says that the checkpoint does not exist although the kubelet has answered. The
	// kubelet writes a checkpoint as soon as it has a device.
	noCheckpoint bool
	// noPodResources says that PodResources cannot be asked. Then the kubelet's checkpoint names ended
	// pods until the kubelet gives devices to another pod.
	noPodResources bool
	checkpoint     kubelet.Checkpoint
	// healthy are the devices that the kubelet considers healthy, by resource. alone says that no
	// other GPU device plugin listens. Both are known only after readOthers.
	healthy map[string][]string
	alone   bool
}

// tells reports whether at least one of the accounts says who holds devices.
func (e evidence) tells() bool { return e.unknownBecause == "" || e.partial }

// accounts reads the kubelet's checkpoint and asks PodResources. Use it from one goroutine only.
type accounts struct {
	Collaborators
	kubelet  uint64 // incarnation of the kubelet at the last reading
	answered bool   // this kubelet has answered through PodResources
}

// read returns which pods hold devices.
//
// The checkpoint names every pod that holds a device, because the kubelet itself starts from the
// checkpoint. PodResources leaves out init containers, and most pods until the kubelet is connected
// to the API server. PodResources adds only the pods that the kubelet could not write to the
// checkpoint.
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
	e.noPodResources = e.kubelet != 0 && errors.Is(failed, kubelet.ErrNoPodResources)
	if a.kubelet != e.kubelet {
		a.kubelet, a.answered = e.kubelet, false
	}
	switch {
	case e.kubelet == 0:
		e.unknownBecause = "the kubelet is not running"
	case a.Incarnation.Value() != e.kubelet, connected != before && connected > 1:
		e.unknownBecause = "kubelet has just restarted"
	case unreadable != nil:
		e.unknownBecause, e.unreadable, e.partial = unreadable.Error(), true, failed == nil
		e.noCheckpoint = failed == nil && errors.Is(unreadable, fs.ErrNotExist)
	case failed != nil && a.answered:
		e.unknownBecause, e.partial = failed.Error(), true
	}
	a.answered = a.answered || failed == nil
	if e.unknownBecause == "" && failed == nil {
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

// readOthers adds to the evidence whether other plugins serve devices.
//
// PodResources shows the kubelet's memory. The checkpoint may have devices of a stopped plugin.
// Neither shows a plugin whose devices are all Unhealthy, but such a plugin listens.
func (a *accounts) readOthers(ctx context.Context, e *evidence) {
	ctx, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	healthy, err := a.Accountant.Allocatable(ctx)
	if err != nil {
		healthy = e.checkpoint.Healthy
	}
	e.healthy, e.alone = healthy, len(a.Registrar.Listening(ctx)) == 0
}

// heldIn returns the devices held by pods according to a checkpoint.
func heldIn(checkpoint kubelet.Checkpoint) map[deviceKey]holder {
	held := make(map[deviceKey]holder, len(checkpoint.Held))
	for _, d := range checkpoint.Held {
		held[deviceKey{d.Resource, d.ID}] = holder{pod: d.Pod, container: d.Container, checkpointOnly: true}
	}
	return held
}
