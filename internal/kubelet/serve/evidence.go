package serve

import (
	"context"
	"errors"
	"io/fs"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
)

// accounts reads the kubelet's checkpoint and asks PodResources. Use it from one goroutine only.
type accounts struct {
	Collaborators
	evidence holders.Evidence
}

// read returns which pods hold devices.
func (a *accounts) read(ctx context.Context) listing.Reading {
	r := holders.Answers{PodResources: map[holders.Key]holders.Holder{}}
	there, began := a.Incarnation.Value(), a.Clock.Now()
	checkpoint, err := a.Checkpoint()
	r.Checkpoint, r.CheckpointErr, r.NoCheckpoint = accountOf(checkpoint), err, errors.Is(err, fs.ErrNotExist)
	r.Checkpoint.Kubelet, r.Checkpoint.Began = there, began
	ctx, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	r.Before = a.Connections()
	answer, err := a.Accountant.Held(ctx)
	r.PodResourcesErr, r.NoPodResources = err, errors.Is(err, kubelet.ErrNoPodResources)
	r.Connected, r.Restarted = a.Connections(), a.Incarnation.Value() != there
	for _, d := range answer {
		r.PodResources[holders.Key{Resource: d.Resource, ID: d.ID}] = holders.Holder{Pod: d.Pod, Container: d.Container}
	}
	return listing.Reading{Account: a.evidence.Account(r)}
}

// readOthers adds to the reading whether other plugins serve devices.
//
// PodResources shows the kubelet's memory. The checkpoint may have devices of a stopped plugin.
// Neither shows a plugin whose devices are all Unhealthy, but such a plugin listens.
func (a *accounts) readOthers(ctx context.Context, r *listing.Reading) {
	ctx, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	healthy, err := a.Accountant.Allocatable(ctx)
	if err != nil {
		healthy = r.Listed
	}
	r.Healthy, r.Alone = healthy, len(a.Registrar.Listening(ctx)) == 0
}

// accountOf returns what a checkpoint says about the devices that pods hold and about all devices.
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
