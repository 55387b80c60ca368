package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// oneFormAtATime has pods run on while GPUs are offered whole, time-sliced, as MIG devices and
// whole again. What a container finds in its environment says that no pod has a GPU that another
// holds in another form.
func oneFormAtATime(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	const (
		mig    = "nvidia.com/mig-1g.10gb"
		shared = "version: v1\nflags: {migStrategy: mixed}\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
		whole  = "version: v1\nflags: {migStrategy: mixed}\n"
	)
	setConfig(ctx, t, n, whole)
	// A replica whose pod has just ended counts as held, and is offered, until that is seen.
	waitForms(ctx, t, kubelet, func(whole, replicas int) bool { return whole == gpus && replicas == 0 })
	runPod(ctx, t, n, "form-whole", gpu, 1)
	inOneForm(ctx, t, n, kubelet)

	// Time-sliced: two GPUs of the pod that holds them all along, and that one's, stay as they are.
	setConfig(ctx, t, n, shared)
	waitForms(ctx, t, kubelet, func(_, replicas int) bool { return replicas == 4*(gpus-3) })
	for i := range 6 {
		runPod(ctx, t, n, fmt.Sprintf("form-shared-%d", i), gpu, 1)
	}
	inOneForm(ctx, t, n, kubelet)

	// MIG: of the GPU that a pod holds whole, and of one that is shared, whose pod holds it on.
	held := []string{heldDevices(ctx, t, kubelet, "form-whole")[0],
		uuidOf(heldDevices(ctx, t, kubelet, "form-shared-0")[0])}
	for _, uuid := range held {
		daemonExec(ctx, t, n, "simulate", "mig", "--gpu", uuid, "--profile", "1g.10gb", "--profile", "1g.10gb")
	}
	makeNodes(t, driverRoot, simulatedGPUs(ctx, t, n))
	waitNodeCapacity(ctx, t, n, mig, 4)
	waitAllocatable(ctx, t, kubelet, mig, 0, stepLimit)
	createPod(ctx, t, n, "form-mig", mig, 1)
	inOneForm(ctx, t, n, kubelet)
	deletePod(ctx, t, n, "form-whole")
	waitPod(ctx, t, n, "form-mig", isRunning)
	inOneForm(ctx, t, n, kubelet)

	// Whole again, with the MIG device in use, and with what is shared.
	for _, uuid := range held {
		daemonExec(ctx, t, n, "simulate", "mig", "--gpu", uuid)
	}
	setConfig(ctx, t, n, whole)
	waitForms(ctx, t, kubelet, func(whole, replicas int) bool { return replicas <= 6 && whole >= 2 }) // held ones
	for i := range 3 {
		createPod(ctx, t, n, fmt.Sprintf("form-again-%d", i), gpu, 1)
	}
	inOneForm(ctx, t, n, kubelet)
	deletePod(ctx, t, n, "form-mig")
	for i := range 6 {
		deletePod(ctx, t, n, fmt.Sprintf("form-shared-%d", i))
	}
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	inOneForm(ctx, t, n, kubelet)
}

func uuidOf(id string) string {
	uuid, _, _ := strings.Cut(id, "::")
	return uuid
}

// waitNodeCapacity waits until the Node object has that capacity of a resource.
func waitNodeCapacity(ctx context.Context, t *testing.T, n *node.Node, resource string, want int64) {
	t.Helper()
	wait(ctx, t, func(ctx context.Context) error {
		object, err := n.Client.CoreV1().Nodes().Get(ctx, node.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if has := object.Status.Capacity[corev1.ResourceName(resource)]; has.Value() != want {
			return fmt.Errorf("the Node has capacity %v of %s, want %d", &has, resource, want)
		}
		return nil
	})
}

// inOneForm fails the test if containers that run have a GPU in different forms: whole, shared, or
// a part of it.
func inOneForm(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	t.Helper()
	pods, err := n.Client.CoreV1().Pods("default").List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	gpuOf := map[string]string{}
	for _, g := range simulatedGPUs(ctx, t, n) {
		gpuOf[g.UUID] = g.UUID
		for _, m := range g.MIG {
			gpuOf[m.UUID] = g.UUID
		}
	}
	forms := map[string][]string{} // GPU → form of each of its holders
	for _, pod := range pods.Items {
		if isRunning(&pod) != nil {
			continue
		}
		ids := heldDevices(ctx, t, kubelet, pod.Name)
		seen := visibleDevices(ctx, t, n, pod.Name)
		for _, id := range ids {
			uuid, form := uuidOf(id), "whole"
			if !slices.Contains(seen, uuid) {
				t.Errorf("pod %s was given %s and sees %v", pod.Name, id, seen)
			}
			switch {
			case id != uuid:
				form = "shared"
			case gpuOf[uuid] != uuid:
				form = "part"
			}
			if gpuOf[uuid] == "" {
				continue // a MIG device that was destroyed in use, which no driver does
			}
			forms[gpuOf[uuid]] = append(forms[gpuOf[uuid]], form)
		}
	}
	for uuid, held := range forms {
		different := slices.Compact(slices.Sorted(slices.Values(held)))
		if len(different) > 1 || len(held) > 1 && held[0] == "whole" {
			t.Errorf("%s is held as %v at the same time", uuid, held)
		}
	}
}
