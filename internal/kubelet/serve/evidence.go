package serve

import (
	"context"
	"errors"
	"io/fs"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
)

// evidence is one reading of the kubelet's accounts.
type evidence struct {
	holders.Account
	others
}

// others is what an account says about the devices of other plugins.
type others struct {
	checkpoint kubelet.Checkpoint
	// healthy are the devices that the kubelet considers healthy, by resource. alone says that no
	// other GPU device plugin listens. Both are known only after readOthers.
	healthy map[string][]string
	alone   bool
}

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
	e := evidence{holders.Account{Kubelet: there, Began: began, Held: heldIn(checkpoint)}, others{checkpoint: checkpoint}}
	ctx, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	before := a.connections()
	answer, failed := a.Accountant.Held(ctx)
	connected := a.connections()
	for _, d := range answer {
		e.Held[holders.Key{Resource: d.Resource, ID: d.ID}] = holders.Holder{Pod: d.Pod, Container: d.Container}
	}
	e.NoPodResources = e.Kubelet != 0 && errors.Is(failed, kubelet.ErrNoPodResources)
	if a.kubelet != e.Kubelet {
		a.kubelet, a.answered = e.Kubelet, false
	}
	switch {
	case e.Kubelet == 0:
		e.UnknownBecause = "the kubelet is not running"
	case a.Incarnation.Value() != e.Kubelet, connected != before && connected > 1:
		e.UnknownBecause = "kubelet has just restarted"
	case unreadable != nil:
		e.UnknownBecause, e.Unreadable, e.Partial = unreadable.Error(), true, failed == nil
		e.NoCheckpoint = failed == nil && errors.Is(unreadable, fs.ErrNotExist)
	case failed != nil && a.answered:
		e.UnknownBecause, e.Partial = failed.Error(), true
	}
	a.answered = a.answered || failed == nil
	if e.UnknownBecause == "" && failed == nil {
		e.Source = holders.Source{Incarnation: e.Kubelet, Connections: connected}
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
func heldIn(checkpoint kubelet.Checkpoint) map[holders.Key]holders.Holder {
	held := make(map[holders.Key]holders.Holder, len(checkpoint.Held))
	for _, d := range checkpoint.Held {
		held[holders.Key{Resource: d.Resource, ID: d.ID}] = holders.Holder{Pod: d.Pod, Container: d.Container,
			CheckpointOnly: true}
	}
	return held
}
