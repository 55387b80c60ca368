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
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// claimsInShares: two pods have a part of one GPU each, a third one, for which it has not enough
// memory left, and one that asks for nvidia.com/gpu have others. Where the API server knows no
// shares, GPUs are given whole.
func claimsInShares(ctx context.Context, t *testing.T, n *node.Node, _ podresources.PodResourcesListerClient) {
	startProxy(t)
	held := changeToClaims(ctx, t, n)
	setEnv(ctx, t, n, "DRA_SHARES=4")
	t.Cleanup(func() { setEnv(context.Background(), t, n, "DRA_SHARES-") })
	shared := func(ctx context.Context) error {
		return saysOfSlices(ctx, n, "{.items[*].spec.devices[*].allowMultipleAllocations}",
			strings.TrimSpace(strings.Repeat("true ", gpus-2)))
	}
	wait(ctx, t, shared)
	kubectl(ctx, t, n, "apply", "--validate=strict", "--filename",
		filepath.Join(*source, "test/e2e/testdata/claim-share.yaml"))
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
	if got["share-one"] != got["share-two"] || got["share-three"] == got["share-one"] ||
		got["share-whole"] == got["share-one"] ||
		got["share-whole"] == got["share-three"] {
		t.Errorf("the pods have %v", got)
	}
	if out := daemonExec(ctx, t, n, "status"); strings.Count(out, "; 30720 MiB of gpu-") != 3 ||
		!strings.Contains(out, ", not a limit") {
		t.Errorf("status does not show three shares:\n%s", out)
	}
	for name := range got {
		deletePod(ctx, t, n, name)
	}
	sharedByName(ctx, t, n)
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

// sharedByName: with the class that plan prints for it, pods that ask for nvidia.com/gpu.shared
// have one GPU, two at a time. One that asks for nvidia.com/gpu gets none of these.
func sharedByName(ctx context.Context, t *testing.T, n *node.Node) {
	t.Helper()
	const shared = "nvidia.com/gpu.shared"
	setEnv(ctx, t, n, "DRA_SHARES=2", "DRA_SHARE_BY=count")
	t.Cleanup(func() {
		_, _ = n.Kubectl(context.Background(), "-n", namespace, "set", "env", "daemonset/"+daemonSet, "DRA_SHARE_BY-")
	})
	wait(ctx, t, func(ctx context.Context) error {
		return saysOfSlices(ctx, n, "{.items[*].spec.devices[*].capacity.shares.value}",
			strings.TrimSpace(strings.Repeat("2 ", gpus-2)))
	})
	var values struct {
		DRA struct {
			Classes []struct{ Name, ExtendedResourceName, Selector string }
		}
	}
	if err := yaml.Unmarshal([]byte(daemonExec(ctx, t, n, "plan", "-o", "classes")), &values); err != nil ||
		len(values.DRA.Classes) != 1 {
		t.Fatalf("classes %+v, %v", values, err)
	}
	class := values.DRA.Classes[0]
	if class.ExtendedResourceName != shared {
		t.Fatalf("a class for %s", class.ExtendedResourceName)
	}
	_, err := n.Client.ResourceV1().DeviceClasses().Create(ctx, &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: class.Name},
		Spec: resourceapi.DeviceClassSpec{ExtendedResourceName: &class.ExtendedResourceName,
			Selectors: []resourceapi.DeviceSelector{
				{CEL: &resourceapi.CELDeviceSelector{Expression: class.Selector}},
			}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = n.Kubectl(context.Background(), "delete", "deviceclass", class.Name) })
	has := map[string][]string{}
	for i := range 3 {
		name := fmt.Sprintf("named-%d", i)
		start := time.Now()
		runPod(ctx, t, n, name, shared, 1)
		phase("a pod that asks for "+shared+" runs", start)
		t.Cleanup(func() { deletePod(context.Background(), t, n, name) })
		nodes := nodesIn(ctx, t, n, name)
		if len(nodes) != 1 {
			t.Fatalf("%s has %v", name, nodes)
		}
		has[nodes[0]] = append(has[nodes[0]], name)
	}
	if len(has) != 2 {
		t.Errorf("three pods with shares have %v, want two of them on one GPU", has)
	}
	for i := range 3 {
		deletePod(ctx, t, n, fmt.Sprintf("named-%d", i))
	}
	setEnv(ctx, t, n, "DRA_SHARE_BY-") // it needs a number of shares
}

// saysOfSlices asks whether the slices of the driver have something.
func saysOfSlices(ctx context.Context, n *node.Node, path, want string) error {
	out, err := n.Kubectl(ctx, "get", "resourceslices", "--field-selector", "spec.driver=gpu.nvidia.com", "--output",
		"jsonpath="+path)
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
