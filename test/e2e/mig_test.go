package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

const (
	layoutLabel  = "nvidia.com/mig.config"
	layoutState  = "nvidia.com/mig.config.state"
	layoutReason = "gpu-device-plugin.github.io/mig.config.reason"
	// third is the resource of the largest MIG device of each divided GPU.
	third = "nvidia.com/mig-3g.40gb"
	// divided is how long a node may take from the label to its state where no pod is in the way.
	divided = 3 * time.Second
	// released is how long after its end a pod may count as a holder.
	released = 30 * time.Second
)

// dividedByLabel: a label of the node divides two GPUs while all others stay allocatable, then all
// that no pod holds, and makes them whole again; the GPUs and MIG devices of pods wait until these
// end. The account can write nothing else.
func dividedByLabel(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	startProxy(t)
	publishCA(ctx, t, n, namespace)
	start := time.Now()
	apply(ctx, t, n, "node-agent-mig")
	t.Cleanup(func() { undivide(t, n) })
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	phase("gpu-node-agent divides GPUs", start)
	before := getPod(ctx, t, n, holder)

	// Two GPUs that no pod holds: the others lose nothing.
	seen := watch(ctx, t, kubelet, gpu, "two GPUs are divided")
	layout(ctx, t, n, fmt.Sprintf("pair-%d", freePair(ctx, t, n, kubelet)), "success", "", far*divided)
	waitAllocatable(ctx, t, kubelet, third, 2, stepLimit)
	if record := seen(); record.asked == 0 {
		t.Error("nothing was seen")
	} else if lowest, longest := record.below(gpus - 2); lowest < gpus-2 {
		t.Errorf("%d GPUs were allocatable, for %v; six are not concerned", lowest, longest)
	}
	slice := runPod(ctx, t, n, "slice", third, 1)

	layout(ctx, t, n, "all-unknown", "failed", "give one of all-balanced, all-disabled", far*told)
	why := kubectl(ctx, t, n, "get", "node", node.Name, "-o", // as docs/mig.md has it
		`jsonpath={.metadata.annotations.gpu-device-plugin\.github\.io/mig\.config\.reason}`)
	if !strings.Contains(why, "all-balanced") {
		t.Errorf("the reason is %q", why)
	}
	layout(ctx, t, n, "all-balanced", "pending", holder, far*divided)
	waitAllocatable(ctx, t, kubelet, third, gpus-2, stepLimit)
	layout(ctx, t, n, "all-disabled", "pending", "slice", far*divided)
	waitAllocatable(ctx, t, kubelet, gpu, gpus-1, stepLimit)
	for _, pod := range []*corev1.Pod{before, slice} {
		if err := isSame(pod)(getPod(ctx, t, n, pod.Name)); err != nil {
			t.Error(err)
		}
	}
	deletePod(ctx, t, n, "slice")
	layout(ctx, t, n, "all-disabled", "success", "", released)
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	if err := isSame(before)(getPod(ctx, t, n, holder)); err != nil {
		t.Error(err)
	}
	writesLayoutStateOnly(ctx, t, n)
}

// layout labels the node, and waits until it has a state and a reason with a text.
func layout(ctx context.Context, t *testing.T, n *node.Node, name, state, reason string, limit time.Duration) {
	t.Helper()
	kubectl(ctx, t, n, "label", "--overwrite", "node", node.Name, layoutLabel+"="+name)
	waitNodeSays(ctx, t, n, fmt.Sprintf("%s: %s %s", name, state, reason), time.Now(), limit,
		func(object *corev1.Node) bool {
			why := object.Annotations[layoutReason]
			return object.Labels[layoutState] == state && strings.Contains(why, reason) && (reason != "" || why == "")
		})
}

// freePair returns the index of the first of two neighbours that no pod holds.
func freePair(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) int {
	t.Helper()
	all, held := simulatedGPUs(ctx, t, n), heldDevices(ctx, t, kubelet, holder)
	for i := 0; i+1 < len(all); i += 2 {
		if !slices.Contains(held, all[i].UUID) && !slices.Contains(held, all[i+1].UUID) {
			return i
		}
	}
	t.Fatalf("pod %s holds %v", holder, held)
	return 0
}

func getPod(ctx context.Context, t *testing.T, n *node.Node, name string) *corev1.Pod {
	t.Helper()
	pod, err := n.Client.CoreV1().Pods("default").Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return pod
}

// writesLayoutStateOnly: of what is about layouts, the daemon's account may write the state and the
// reason of its own node.
func writesLayoutStateOnly(ctx context.Context, t *testing.T, n *node.Node) {
	bound := clientWith(t, kubectl(ctx, t, n, "--namespace", namespace, "create", "token", "gpu-device-plugin",
		"--bound-object-kind", "Pod", "--bound-object-name", theDaemonPod(ctx, t, n).Name))
	for body, refused := range map[string]string{
		`{"metadata":{"labels":{"` + layoutState + `":"success"}}}`:                                          "",
		`{"metadata":{"annotations":{"` + layoutReason + `":"x"}}}`:                                          "",
		`{"metadata":{"labels":{"` + layoutLabel + `":"all-balanced"}}}`:                                     "no other labels",
		`{"metadata":{"annotations":{"x":"y"}}}`:                                                             "no other annotation",
		`{"metadata":{"annotations":{"` + layoutReason + `":"y","volumes.kubernetes.io/x":"y"}}}`:            "no other annotation",
		`{"metadata":{"finalizers":["example.com/x"]}}`:                                                      "finalizers",
		`{"metadata":{"labels":{"` + layoutState + `":"failed"},"annotations":{"` + layoutReason + `":""}}}`: "",
	} {
		_, err := bound.CoreV1().Nodes().Patch(ctx, node.Name, types.MergePatchType, []byte(body), metav1.PatchOptions{})
		switch {
		case refused == "" && err != nil:
			t.Errorf("%s: %v", body, err)
		case refused != "" && (err == nil || !strings.Contains(err.Error(), refused)):
			t.Errorf("%s: %v, want it refused with %q", body, err, refused)
		}
	}
	_, err := bound.CoreV1().Nodes().Patch(ctx, node.Name, types.MergePatchType,
		[]byte(`{"metadata":{"labels":{"`+layoutState+`":"pending"}}}`), metav1.PatchOptions{}, "status")
	if err == nil || !strings.Contains(err.Error(), "no other labels") {
		t.Errorf("the state through nodes/status: %v, want it refused", err)
	}
	if err := bound.CoreV1().Pods("default").Delete(ctx, holder, metav1.DeleteOptions{}); err == nil {
		t.Error("the account may delete pods")
	}
}

// undivide takes the labels away, and leaves what the other stories have.
func undivide(t *testing.T, n *node.Node) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), stepLimit)
	defer cancel()
	if _, err := n.Kubectl(ctx, "label", "node", node.Name, layoutLabel+"-"); err != nil {
		t.Error(err)
	}
	leaveTheCluster(t, n)
}
