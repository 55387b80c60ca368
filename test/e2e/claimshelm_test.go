package e2e

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// agentValues are what a release with gpu-node-agent needs on the node of the tests.
const agentValues = `
nvidiaDriverRoot: ` + driverRoot + `
devicePlugin:
  containers:
    main:
      env: [{name: KUBERNETES_SERVICE_HOST, value: 192.0.2.1}, {name: KUBERNETES_SERVICE_PORT, value: "6444"}]
`

// enableLabel is a label by which clusters say how nodes give GPUs to pods.
const enableLabel = "nvidia-device-enable"

var deviceNodes = regexp.MustCompile(`device nodes: /dev/(nvidia\d+)\n`)

// claimsByHelm: with the values of docs/dra.md a label of the Node has its GPUs go into slices, and back. helm test has a pod with a claim and
// one that asks for nvidia.com/gpu, which see one GPU each.
func claimsByHelm(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	withoutDaemon(ctx, t, n)
	before := waitPod(ctx, t, n, holder, isRunning)
	startProxy(t)
	publishCA(ctx, t, n, namespace)
	installDriver(ctx, t)
	values := agentValues + documented(t, "docs/dra.md", `the story "claims by Helm"`) + "test: {deviceClass: gpu.nvidia.com}\n"
	helm(ctx, t, n, append([]string{"install"}, chartWith(t, values)...)...)
	t.Cleanup(func() {
		if t.Failed() {
			explain(t, n)
			out, err := n.Kubectl(context.Background(), "--namespace", namespace, "get", "pods,resourceclaims,resourceslices", "--output", "yaml")
			t.Logf("error %v:\n%s", err, out)
		}
		for _, args := range [][]string{
			{"--namespace", namespace, "delete", "--ignore-not-found", "pod/" + daemonSet + "-test", "pod/" + daemonSet + "-test-claim",
				"resourceclaimtemplate/" + daemonSet + "-test-claim"},
			{"label", "node", node.Name, enableLabel + "-"},
		} {
			if _, err := n.Kubectl(context.Background(), args...); err != nil {
				t.Error(err)
			}
		}
	})
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	all := simulatedGPUs(ctx, t, n)
	makeNodes(t, driverRoot, all)
	held := heldNodes(ctx, t, n, all)

	start := time.Now()
	kubectl(ctx, t, n, "label", "node", node.Name, enableLabel+"=pgpu-dra")
	waitDevices(ctx, t, n, gpus-2)
	phase("six GPUs in slices after a label", start)
	// The scheduler knows it by the Node, whose status follows.
	waitNodeSays(ctx, t, n, "no GPU of the device plugin", start, stepLimit, func(object *corev1.Node) bool {
		left := object.Status.Allocatable[gpu]
		return left.IsZero()
	})
	if out := helm(ctx, t, n, "test", daemonSet); !strings.Contains(out, "Succeeded") || strings.Contains(out, "Failed") {
		t.Errorf("helm test says: %s", out)
	}
	for _, pod := range []string{daemonSet + "-test", daemonSet + "-test-claim"} {
		logs := kubectl(ctx, t, n, "--namespace", namespace, "logs", pod)
		if got := deviceNodes.FindStringSubmatch(logs); len(got) != 2 || slices.Contains(held, got[1]) {
			t.Errorf("%s says %q, want one device node, and not of %v", pod, logs, held)
		}
		kubectl(ctx, t, n, "--namespace", namespace, "delete", "pod", pod)
	}

	start = time.Now()
	kubectl(ctx, t, n, "label", "--overwrite", "node", node.Name, enableLabel+"=pgpu")
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	waitDevices(ctx, t, n, 0)
	phase("all GPUs back after a label", start)
	if err := isSame(before)(getPod(ctx, t, n, holder)); err != nil {
		t.Error(err)
	}
}

// paceOfClaims: on a node that gives some GPUs in each way, it takes about as long from the creation of a claim until its pod runs as from the
// creation of a pod that asks for nvidia.com/gpu. Pods of both kinds take turns, and containers get the same by CDI.
func paceOfClaims(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	const measured = 20
	withoutDaemon(ctx, t, n)
	startProxy(t)
	publishCA(ctx, t, n, namespace)
	installDriver(ctx, t)
	helm(ctx, t, n, append([]string{"install"}, chartWith(t, agentValues+`
deviceListStrategy: cdi-cri
dra: {enabled: true}
config: {map: {default: "dra: {mode: split, gpus: {indices: [5, 6, 7]}}"}}
`)...)...)
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	makeNodes(t, driverRoot, simulatedGPUs(ctx, t, n))
	waitDevices(ctx, t, n, 3)
	waitAllocatable(ctx, t, kubelet, gpu, gpus-3, stepLimit)

	until := func(name string) time.Duration {
		start := time.Now()
		pod := podOf(name, gpu, 1)
		var err error
		if strings.HasPrefix(name, "claimed") {
			claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: oneGPU}
			pod = podWith(name, corev1.PodResourceClaim{ResourceClaimName: &name})
			_, err = n.Client.ResourceV1().ResourceClaims(corev1.NamespaceDefault).Create(ctx, claim, metav1.CreateOptions{})
		}
		if err == nil {
			_, err = n.Client.CoreV1().Pods(corev1.NamespaceDefault).Create(ctx, pod, metav1.CreateOptions{})
		}
		if err != nil {
			t.Fatal(err)
		}
		limited, cancel := context.WithTimeout(ctx, stepLimit)
		defer cancel()
		err = node.Wait(limited, 10*time.Millisecond, func(ctx context.Context) error {
			pod, err := n.Client.CoreV1().Pods(corev1.NamespaceDefault).Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			return isRunning(pod)
		})
		if err != nil {
			t.Fatal(err)
		}
		took := time.Since(start)
		if len(nodesIn(ctx, t, n, name)) != 1 {
			t.Errorf("pod %s has not one GPU", name)
		}
		kubectl(ctx, t, n, "delete", "pod", name) // which waits until it has gone
		if strings.HasPrefix(name, "claimed") {
			kubectl(ctx, t, n, "delete", "resourceclaim", name)
			// A pod without a grace period has gone before its container: the next one would wait for the GPU.
			wait(ctx, t, func(context.Context) error { return prepared(0) })
		}
		return took
	}
	var claimed, plain []time.Duration
	for i := range measured + 1 {
		one, other := until(fmt.Sprintf("claimed-%d", i)), until(fmt.Sprintf("plain-%d", i))
		if i > 0 { // the first of each kind reads programs from the disk
			claimed, plain = append(claimed, one), append(plain, other)
		}
	}
	slices.Sort(claimed)
	slices.Sort(plain)
	figures := func(of []time.Duration) string {
		return fmt.Sprintf("median %v, p90 %v", of[len(of)/2].Round(time.Millisecond), of[len(of)*9/10].Round(time.Millisecond))
	}
	ratio := float64(claimed[measured/2]) / float64(plain[measured/2])
	fmt.Printf("e2e: claim created until its pod runs: %s; nvidia.com/gpu: %s; %d each; %.2f x, to be below 1.2\n",
		figures(claimed), figures(plain), measured, ratio)
	if ratio > far {
		t.Errorf("claims take %.2f times as long as the device plugin", ratio)
	}
}
