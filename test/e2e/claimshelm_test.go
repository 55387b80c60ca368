package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/ptr"

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

const (
	// enableLabel is a label by which clusters say how nodes give GPUs to pods, and gpuLabel one that
	// says which nodes do.
	enableLabel = "nvidia-device-enable"
	gpuLabel    = "gpu"
	// controlDaemons is the chart's DaemonSet of MPS.
	controlDaemons = daemonSet + "-mps-control-daemon"
)

var deviceNodes = regexp.MustCompile(`device nodes: /dev/(nvidia\d+)\n`)

// claimsByHelm: with the values of docs/dra.md a label of the Node says whether it has the daemon,
// and another one has its GPUs go into slices, and back. helm test has a pod with a claim and,
// from Kubernetes 1.36 on, one that asks for nvidia.com/gpu, which see one GPU each. Two pods share a claim by MPS, whose status
// and metadata say which GPU that is.
func claimsByHelm(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	withoutDaemon(ctx, t, n)
	before := waitPod(ctx, t, n, holder, isRunning)
	startProxy(t)
	publishCA(ctx, t, n, namespace)
	installDriver(ctx, t)
	values := agentValues + documented(t, "docs/dra.md", `the story "claims by Helm"`) +
		"test: {deviceClass: gpu.nvidia.com}\nnodeSelector: {" + gpuLabel + ": \"on\"}\nmps: {enabled: true}\n"
	set := "features.labels=node,dra.claimStatus=true,dra.metadata=true"
	if *long { // the daemon sees the device nodes of containers
		set += ",hostPID=true,securityContext.privileged=true"
	}
	helm(ctx, t, n, append([]string{"install", "--set", set}, chartWith(t, values)...)...)
	t.Cleanup(func() {
		if t.Failed() {
			explain(t, n)
			for _, args := range [][]string{
				{"get", "pods,resourceclaims,resourceslices", "--output", "yaml"},
				{"logs", "daemonset/" + controlDaemons, "--all-containers", "--prefix", "--tail", "100"},
			} {
				out, err := n.Kubectl(context.Background(), append([]string{"--namespace", namespace}, args...)...)
				t.Logf("kubectl %s, error %v:\n%s", args[0], err, out)
			}
		}
		for _, args := range [][]string{
			{"--namespace", namespace, "delete", "--ignore-not-found", "pod/" + daemonSet + "-test",
				"pod/" + daemonSet + "-test-claim",
				"resourceclaimtemplate/" + daemonSet + "-test-claim"},
			{"label", "node", node.Name, enableLabel + "-", gpuLabel + "-", mpsCapable + "-"},
		} {
			if _, err := n.Kubectl(context.Background(), args...); err != nil {
				t.Error(err)
			}
		}
	})
	installMPS(t)
	findMPS(ctx, t, n, controlDaemons, mpsProgram)
	hasNoDaemon(ctx, t, n)
	start := time.Now()
	kubectl(ctx, t, n, "label", "node", node.Name, gpuLabel+"=on")
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	phase("the daemon serves after a label", start)
	all := simulatedGPUs(ctx, t, n)
	makeNodes(t, driverRoot, all)
	held := heldNodes(ctx, t, n, all)

	start = time.Now()
	kubectl(ctx, t, n, "label", "node", node.Name, enableLabel+"=pgpu-dra")
	waitDevices(ctx, t, n, gpus-2)
	phase("six GPUs in slices after a label", start)
	// The scheduler knows it by the Node, whose status follows.
	waitNodeSays(ctx, t, n, "no GPU of the device plugin", start, stepLimit, func(object *corev1.Node) bool {
		left := object.Status.Allocatable[gpu]
		return left.IsZero()
	})
	test, tested := []string{"test", daemonSet}, []string{daemonSet + "-test", daemonSet + "-test-claim"}
	if isOld() { // the pod that asks for nvidia.com/gpu would wait for a node of the device plugin
		tested = tested[1:]
		test = append(test, "--filter", "name="+tested[0])
	}
	if out := helm(ctx, t, n, test...); !strings.Contains(out, "Succeeded") || strings.Contains(out, "Failed") {
		t.Errorf("helm test says: %s", out)
	}
	for _, pod := range tested {
		logs := kubectl(ctx, t, n, "--namespace", namespace, "logs", pod)
		if got := deviceNodes.FindStringSubmatch(logs); len(got) != 2 || slices.Contains(held, got[1]) {
			t.Errorf("%s says %q, want one device node, and not of %v", pod, logs, held)
		}
		kubectl(ctx, t, n, "--namespace", namespace, "delete", "pod", pod)
	}
	sharedByMPS(ctx, t, n, held, all)

	start = time.Now()
	kubectl(ctx, t, n, "label", "--overwrite", "node", node.Name, enableLabel+"=pgpu")
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	waitDevices(ctx, t, n, 0)
	phase("all GPUs back after a label", start)
	if err := isSame(before)(getPod(ctx, t, n, holder)); err != nil {
		t.Error(err)
	}
}

// hasNoDaemon: no pod of the DaemonSet is for the node, which lacks the label.
func hasNoDaemon(ctx context.Context, t *testing.T, n *node.Node) {
	t.Helper()
	wait(ctx, t, func(ctx context.Context) error {
		set, err := n.Client.AppsV1().DaemonSets(namespace).Get(ctx, daemonSet, metav1.GetOptions{})
		if err == nil && set.Status.ObservedGeneration != set.Generation {
			err = errors.New("the DaemonSet has not been looked at yet")
		}
		if err == nil && set.Status.DesiredNumberScheduled != 0 {
			t.Errorf("%d pods for a node without the label", set.Status.DesiredNumberScheduled)
		}
		return err
	})
}

// sharedByMPS: two pods on one claim that is shared by MPS are clients of one control daemon, which
// has the claim's limits. After them nothing is left of it.
func sharedByMPS(ctx context.Context, t *testing.T, n *node.Node, held []string, all []simulated) {
	t.Helper()
	const name = "shared-by-mps"
	start := time.Now()
	wait(ctx, t, func(ctx context.Context) error {
		pod, err := setPod(ctx, n, namespace, controlDaemons)
		if err != nil {
			return err
		}
		return isRunning(pod)
	})
	phase("mps-control-daemon runs after the labels", start)
	start = time.Now()
	spec := oneGPU.DeepCopy()
	spec.Devices.Config = []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{
		Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: "gpu.nvidia.com", Parameters: runtime.RawExtension{Raw: []byte(
			`{"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": {"strategy": "MPS", "mpsConfig":
				{"defaultActiveThreadPercentage": 25, "defaultPinnedDeviceMemoryLimit": "10Gi"}}}`)}},
	}}}
	claims := n.Client.ResourceV1().ResourceClaims(corev1.NamespaceDefault)
	claim, err := claims.Create(ctx, &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: *spec},
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		deletePod(context.Background(), t, n, name+"-1")
		deletePod(context.Background(), t, n, name+"-2")
		_ = claims.Delete(context.Background(), name, metav1.DeleteOptions{})
	})
	var seen []string
	for _, pod := range []string{name + "-1", name + "-2"} {
		object := podWith(pod, corev1.PodResourceClaim{ResourceClaimName: ptr.To(name)})
		if _, err := n.Client.CoreV1().Pods(corev1.NamespaceDefault).Create(ctx, object, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		waitPod(ctx, t, n, pod, isRunning)
		phase("pod "+pod+" runs", start)
		usesMPS(ctx, t, n, pod, "claims/"+string(claim.UID)+"-0", "set_default_active_thread_percentage 25")
		usesMPS(ctx, t, n, pod, "claims/"+string(claim.UID)+"-0", "set_default_device_pinned_mem_limit 0 10240M")
		seen = append(seen, nodesIn(ctx, t, n, pod)...)
	}
	if len(seen) != 2 || seen[0] != seen[1] || slices.Contains(held, seen[0]) {
		t.Errorf("the pods that share a claim see %v, want one and the same GPU, and not of %v", seen, held)
	} else {
		tellsDevices(ctx, t, n, name, name+"-2", uuidOfNode(all, seen[0]))
	}
	log, err := os.ReadFile("/run/nvidia/mps/claims/" + string(claim.UID) + "-0/log/control.log")
	if daemons := strings.Count(string(log), "Starting control daemon"); daemons != 1 {
		t.Errorf("the claim has had %d control daemons (%v):\n%s", daemons, err, log)
	}

	start = time.Now()
	deletePod(ctx, t, n, name+"-1")
	deletePod(ctx, t, n, name+"-2")
	wait(ctx, t, func(context.Context) error {
		left, err := filepath.Glob("/run/nvidia/mps/claims/*")
		if _, mark := os.Stat("/run/nvidia/mps/.exclusive"); err == nil && (len(left) > 0 || mark == nil) {
			err = fmt.Errorf("%v are left of MPS; GPUs are exclusive: %t", left, mark == nil)
		}
		return errors.Join(err, prepared(0), noMetadata())
	})
	phase("nothing is left of MPS after the pods", start)
	if err := claims.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		t.Error(err)
	}
}

// paceOfClaims: on a node that gives some GPUs in each way, it takes at most a fifth longer from
// the creation of a claim until its pod runs than from the creation of a pod that asks for
// nvidia.com/gpu. Containers get the same by CDI.
func paceOfClaims(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
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

	seesOne := func(name string) {
		if len(nodesIn(ctx, t, n, name)) != 1 {
			t.Errorf("pod %s has not one GPU", name)
		}
	}
	claimed := func(name string) time.Duration {
		start := time.Now()
		claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: oneGPU}
		if _, err := n.Client.ResourceV1().ResourceClaims(corev1.NamespaceDefault).Create(ctx, claim,
			metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		took := untilRuns(ctx, t, n, start, podWith(name, corev1.PodResourceClaim{ResourceClaimName: &name}), seesOne)
		kubectl(ctx, t, n, "delete", "resourceclaim", name)
		// A pod without a grace period has gone before its container: the next one would wait for the
		// GPU.
		wait(ctx, t, func(context.Context) error { return prepared(0) })
		return took
	}
	plain := func(name string) time.Duration {
		return untilRuns(ctx, t, n, time.Now(), podOf(name, gpu, 1), seesOne)
	}
	keepsPace(t, kind{"claim", claimed}, kind{gpu, plain})
}
