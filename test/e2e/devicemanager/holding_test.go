package devicemanager

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// A container and an init container hold GPUs on a node with a Topology Manager policy, the
// configuration begins to share GPUs, and kubelet restarts while the API server is away. The GPUs
// that are held stay listed, so that kubelet does not crash when it admits the pods again; the
// others are dropped. When the pods have ended, theirs are, too, and their GPUs are shared.
func TestDevicesThatPodsHoldStayListed(t *testing.T) {
	n := newNode(t)
	d := startDaemon(t, n)
	n.await(t, gpus)
	pods := []kubelet.Container{
		{Pod: "p", Name: "main", Resource: resource.WholeGPU, Count: 1, SingleNode: true},
		{Pod: "i", Name: "init", Resource: resource.WholeGPU, Count: 1, SingleNode: true, Init: true},
	}
	for _, c := range pods {
		if _, err := n.Admit(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	var snapshot inventory.Snapshot
	for i := range gpus {
		snapshot.GPUs = append(snapshot.GPUs, inventory.GPU{
			UUID:  fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i),
			Index: i, Minor: i, NUMANode: i / 4, Health: inventory.Health{State: inventory.Healthy},
		})
	}
	const replicas = 2
	sharing := resource.Sharing{Mode: resource.TimeSliced, Rules: []resource.SharingRule{{Name: resource.WholeGPU,
		Replicas: replicas}}}
	d.set.Apply(resource.New(snapshot, resource.Options{Sharing: sharing}),
		serve.Options{Edits: containeredits.Options{Strategies: []containeredits.Strategy{containeredits.EnvVar}}}, 2)
	given := replicas*(gpus-len(pods)) + len(pods) // a GPU that a pod holds is not shared before it is free
	n.await(t, given)

	n.SetPodsKnown(false)
	if err := n.Restart(); err != nil {
		t.Fatal(err)
	}
	n.await(t, given)
	n.awaitCapacity(t, replicas*gpus+len(pods))
	n.SetPodsKnown(true)
	for _, c := range pods {
		var refused *kubelet.PodError
		_, err := n.Admit(t.Context(), c)
		if errors.Is(err, kubelet.ErrCrash) || errors.As(err, &refused) && refused.Reason == kubelet.TopologyAffinity {
			t.Errorf("pod %s after the restart: %v", c.Pod, err)
		}
	}
	for _, c := range pods {
		n.Remove(c.Pod)
	}
	n.awaitCapacity(t, replicas*gpus)
	n.await(t, replicas*gpus)
}

// awaitCapacity waits until the node shows so many GPUs, Healthy or not.
func (n *node) awaitCapacity(t *testing.T, count int) {
	t.Helper()
	deadline, look := time.NewTimer(patience), time.NewTicker(10*time.Millisecond)
	defer deadline.Stop()
	defer look.Stop()
	for n.Resources()[resource.WholeGPU].Capacity != count {
		select {
		case <-deadline.C:
			t.Fatalf("capacity has not come to %d: the node shows %v", count, n.Resources())
		case <-look.C:
		}
	}
}
