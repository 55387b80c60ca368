package e2e

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// claimsInShares: two pods have a part of one GPU each, a third one, for which it has not enough memory left, and one that asks for
// nvidia.com/gpu have others. Where the API server knows no shares, GPUs are given whole.
func claimsInShares(ctx context.Context, t *testing.T, n *node.Node, _ podresources.PodResourcesListerClient) {
	startProxy(t)
	held := changeToClaims(ctx, t, n)
	setEnv(ctx, t, n, "DRA_SHARES=4")
	t.Cleanup(func() { setEnv(context.Background(), t, n, "DRA_SHARES-") })
	shared := func(ctx context.Context) error {
		return saysOfSlices(ctx, n, "{.items[*].spec.devices[*].allowMultipleAllocations}", strings.TrimSpace(strings.Repeat("true ", gpus-2)))
	}
	wait(ctx, t, shared)
	kubectl(ctx, t, n, "apply", "--validate=strict", "--filename", filepath.Join(*source, "test/e2e/testdata/claim-share.yaml"))
	t.Cleanup(func() { _, _ = n.Kubectl(context.Background(), "delete", "resourceclaimtemplate", "part-of-gpu") })
	got := map[string]string{}
	for _, name := range []string{"share-one", "share-two", "share-three", "share-whole"} {
		start := time.Now()
		if name == "share-whole" {
			runPod(ctx, t, n, name, gpu, 1)
		} else {
			startPod(ctx, t, n, podWith(name, corev1.PodResourceClaim{ResourceClaimTemplateName: ptr.To("part-of-gpu")}))
			waitPod(ctx, t, n, name, isRunning)
			phase("a pod with a part of a GPU runs", start)
		}
		t.Cleanup(func() { deletePod(context.Background(), t, n, name) })
		nodes := nodesIn(ctx, t, n, name)
		if len(nodes) != 1 || slices.Contains(held, nodes[0]) {
			t.Fatalf("%s has the device nodes %v, and a pod of the device plugin has %v", name, nodes, held)
		}
		got[name] = nodes[0]
	}
	if got["share-one"] != got["share-two"] || got["share-three"] == got["share-one"] || got["share-whole"] == got["share-one"] ||
		got["share-whole"] == got["share-three"] {
		t.Errorf("the pods have %v", got)
	}
	if out := daemonExec(ctx, t, n, "status"); strings.Count(out, "; 30720 MiB of gpu-") != 3 || !strings.Contains(out, ", not a limit") {
		t.Errorf("status does not show three shares:\n%s", out)
	}
	for name := range got {
		deletePod(ctx, t, n, name)
	}
	setEnv(ctx, t, n, "DRA_SHARES=0")
	wait(ctx, t, func(ctx context.Context) error {
		return saysOfSlices(ctx, n, "{.items[*].spec.devices[*].allowMultipleAllocations}", "")
	})
	n.StopAPIServer()
	if err := n.StartAPIServer(ctx, "--feature-gates=DRAConsumableCapacity=false"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		n.StopAPIServer()
		if err := n.StartAPIServer(context.Background()); err != nil {
			t.Error(err)
		}
	})
	setEnv(ctx, t, n, "DRA_SHARES=4")
	wait(ctx, t, func(ctx context.Context) error {
		return contains(daemonExec(ctx, t, n, "status"), "the API server knows no shares of devices: GPUs are given whole")
	})
	waitDevices(ctx, t, n, gpus-2)
	start := time.Now()
	runPod(ctx, t, n, "share-off", gpu, 1)
	phase("a pod has a whole GPU where the API server knows no shares", start)
	deletePod(ctx, t, n, "share-off")
}

// saysOfSlices asks whether the slices of the driver have something.
func saysOfSlices(ctx context.Context, n *node.Node, path, want string) error {
	out, err := n.Kubectl(ctx, "get", "resourceslices", "--field-selector", "spec.driver=gpu.nvidia.com", "--output", "jsonpath="+path)
	if err != nil {
		return err
	}
	if got := strings.TrimSpace(out); got != want {
		return fmt.Errorf("the slices have %q, want %q", got, want)
	}
	return nil
}

func contains(text, part string) error {
	if !strings.Contains(text, part) {
		return fmt.Errorf("there is no %q in\n%s", part, text)
	}
	return nil
}
