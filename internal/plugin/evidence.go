package plugin

import (
	"context"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

type deviceKey struct{ resource, id string }

// A holder is the pod that holds a device.
type holder struct {
	pod       string
	savedOnly bool // only what kubelet has saved says so, and the pod may have ended since
}

// evidence is what kubelet's accounts say, at one moment, of who holds devices.
type evidence struct {
	kubelet uint64 // incarnation of the kubelet that was there; 0 if none was
	held    map[deviceKey]holder
	// gap is why a device that is not held by this may be held nevertheless; empty if it cannot.
	gap     string
	unsaved bool               // what kubelet has saved cannot be read
	saved   kubelet.Checkpoint // what it has saved
}

// accounts reads both accounts of kubelet. It is for one goroutine.
type accounts struct {
	Collaborators
	kubelet  uint64 // incarnation of the kubelet that was there when they were read last
	answered bool   // that kubelet has answered through PodResources
}

// read says who holds devices.
//
// What kubelet has saved names every holder: kubelet itself starts from it. PodResources tells less: no init containers, and
// hardly a pod until kubelet has heard from the API server. It can only add to what is saved, where kubelet could not save.
func (a *accounts) read(ctx context.Context) evidence {
	there := a.Incarnation.Value()
	saved, unsaved := a.Checkpoint()
	e := evidence{kubelet: there, saved: saved, held: heldIn(saved)}
	ctx, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	told, untold := a.Accountant.Held(ctx)
	for _, d := range told {
		e.held[deviceKey{d.Resource, d.ID}] = holder{pod: d.Pod}
	}
	if a.kubelet != e.kubelet {
		a.kubelet, a.answered = e.kubelet, false
	}
	switch {
	case e.kubelet == 0:
		e.gap = "kubelet is not there"
	case a.Incarnation.Value() != e.kubelet:
		e.gap = "kubelet has just restarted"
	case unsaved != nil:
		e.gap, e.unsaved = unsaved.Error(), true
	case untold != nil && a.answered:
		e.gap = untold.Error()
	}
	a.answered = a.answered || untold == nil
	return e
}

// heldIn returns the holders that kubelet has saved.
func heldIn(saved kubelet.Checkpoint) map[deviceKey]holder {
	held := make(map[deviceKey]holder, len(saved.Held))
	for _, d := range saved.Held {
		held[deviceKey{d.Resource, d.ID}] = holder{pod: d.Pod, savedOnly: true}
	}
	return held
}
