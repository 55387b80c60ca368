package daemon

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

const (
	dcgmLabel = "nvidia.com/gpu.deploy.dcgm"
	paused    = "paused-for-mig-change"
	dcgmPod   = "0f3e9d52-1c1b-4f0a-9c8e-5d1f6a7b8c9d"
)

// TestClientsArePausedByLabel: DCGM has one of eight GPUs open. The daemon finds its DaemonSet,
// pauses it by its label for as long as the change takes, and has it go on; so does the next
// daemon, when this one was killed meanwhile.
func TestClientsArePausedByLabel(t *testing.T) {
	t.Parallel()
	d := newDivisible(t, "--mig-disruption=pause")
	err := d.api.AddPod(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "gpu-operator", Name: "nvidia-dcgm-x", UID: dcgmPod,
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "nvidia-dcgm", UID: "o",
				Controller: new(true)}},
		},
		Spec: corev1.PodSpec{NodeName: nodeName, NodeSelector: map[string]string{dcgmLabel: "true"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.api.ChangeNode(nodeName, func(n *corev1.Node) { n.Labels[dcgmLabel] = "true" }); err != nil {
		t.Fatal(err)
	}
	dcgm := func() string {
		n, err := d.api.Node(nodeName)
		if err != nil {
			t.Error(err)
			return ""
		}
		return n.Labels[dcgmLabel]
	}
	var running, stays, pauses atomic.Bool
	ctx, cancel := context.WithCancel(t.Context())
	var controller sync.WaitGroup
	controller.Go(func() { // it ends the DaemonSet's pod, and has it run again
		for tick := time.NewTicker(20 * time.Millisecond); ; {
			select {
			case <-ctx.Done():
				tick.Stop()
				return
			case <-tick.C:
			}
			label := dcgm()
			if label == paused {
				pauses.Store(true)
			}
			f := simulator.Fault{Kind: simulator.KindClients, GPU: "5"}
			if want := label == "true" || stays.Load() && running.Load(); want != running.Load() {
				if want {
					f.Clients = []string{dcgmPod}
				}
				if control.Call(ctx, d.ControlSocket(), "simulate.inject", f, nil) == nil {
					running.Store(want)
				}
			}
		}
	})
	defer func() { cancel(); controller.Wait() }()
	goesOn := func() {
		t.Helper()
		d.eventually("DCGM goes on", func() bool { return dcgm() == "true" && running.Load() })
	}
	goesOn()
	for _, layout := range []string{"all-balanced", "all-disabled"} {
		resource := map[string]string{"all-balanced": third, "all-disabled": gpu}[layout]
		pauses.Store(false)
		began := time.Now()
		d.label(layout)
		d.until(layout, func() bool { return d.Allocatable(resource) == 8 })
		d.told("success", "")
		goesOn()
		t.Logf("%s: success, and DCGM again, %v after the label", layout, time.Since(began).Round(time.Millisecond))
		if !pauses.Load() {
			t.Errorf("%s: DCGM was not paused", layout)
		}
	}
	stays.Store(true)
	d.label("all-balanced")
	d.told("pending", "(nv-hostengine)")
	d.eventually("DCGM is paused", func() bool { return dcgm() == paused })
	d.kill()
	if dcgm() != paused {
		t.Error("DCGM goes on without a daemon")
	}
	stays.Store(false)
	d.start()
	d.told("success", "")
	goesOn()
}
