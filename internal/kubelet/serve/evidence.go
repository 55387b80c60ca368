package serve

import (
	"context"
	"errors"
	"io/fs"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
)

// accounts reads the kubelet's checkpoint and asks PodResources. Use it from one
// goroutine only.
type accounts struct {
	Collaborators
	kubelet  uint64 // incarnation of the kubelet at the last reading
	answered bool   // this kubelet has answered through PodResources
}

// read returns which pods hold devices.
//
// The checkpoint names every pod that holds a device, because the kubelet itself
// starts from the checkpoint. PodResources leaves out init containers, and most
// pods until the kubelet is connected to the API server. PodResources adds only the
// pods that the kubelet could not write to the checkpoint.
func (a *accounts) read(ctx context.Context) listing.Reading {
	there, began := a.Incarnation.Value(), a.Clock.Now()
	checkpoint, unreadable := a.Checkpoint()
	e := listing.Reading{Account: accountOf(checkpoint)}
	e.Kubelet, e.Began = there, began
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

// readOthers adds to the reading whether other plugins serve devices.
//
// PodResources shows the kubelet's memory. The checkpoint may have devices of a
// stopped plugin. Neither shows a plugin whose devices are all Unhealthy, but such
// a plugin listens.
func (a *accounts) readOthers(ctx context.Context, r *listing.Reading) {
	ctx, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	healthy, err := a.Accountant.Allocatable(ctx)
	if err != nil {
		healthy = r.Listed
	}
	r.Healthy, r.Alone = healthy, len(a.Registrar.Listening(ctx)) == 0
}

// accountOf returns what a checkpoint says about the devices that pods hold and
// about all devices.
func accountOf(checkpoint kubelet.Checkpoint) holders.Account {
	a := holders.Account{Listed: checkpoint.Healthy, Held: make(map[holders.Key]holders.Holder, len(checkpoint.Held)),
		Nodes: make(map[holders.Key][]int64, len(checkpoint.Held))}
	for _, d := range checkpoint.Held {
		key := holders.Key{Resource: d.Resource, ID: d.ID}
		a.Held[key] = holders.Holder{Pod: d.Pod, Container: d.Container, CheckpointOnly: true}
		a.Nodes[key] = append(a.Nodes[key], d.NUMANodes...)
	}
	return a
}
