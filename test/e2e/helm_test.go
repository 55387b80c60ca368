package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet/scenario"
)

// installed is how long it may take from the start of helm install until the kubelet counts all
// GPUs.
const installed = 5 * time.Second

// nvidiaValues has the values of NVIDIA's chart.
const nvidiaValues = "test/manifests/testdata/nvidia-values.yaml"

// helmValues are those of every release here: the image that was loaded by hand, and simulated
// GPUs.
const helmValues = `
image: {repository: docker.io/library/gpu-device-plugin, tag: e2e, pullPolicy: Never}
simulate: dgx-h100
logVerbosity: 4
`

// helm runs helm, which must succeed. It is not tried again: a second install is another thing.
func helm(ctx context.Context, t *testing.T, n *node.Node, args ...string) string {
	t.Helper()
	out, err := n.Helm(ctx, append([]string{"--namespace", namespace}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// chartWith returns the arguments that name the release and the chart, with helmValues and these
// values.
func chartWith(t *testing.T, values string) []string {
	t.Helper()
	args := []string{daemonSet, *chart}
	for _, text := range []string{helmValues, values} {
		args = append(args, "--values", valuesFile(t, text))
	}
	return args
}

// withoutDaemon takes the static DaemonSet away until the story ends.
func withoutDaemon(ctx context.Context, t *testing.T, n *node.Node) {
	t.Helper()
	// The account of other stories is none of the release.
	kubectl(ctx, t, n, "--namespace", namespace, "delete", "daemonset/"+daemonSet, "serviceaccount/"+daemonSet,
		"--ignore-not-found")
	waitNoDaemon(ctx, t, n)
	t.Cleanup(func() {
		ctx := context.Background() // the test's has ended by then
		if _, err := n.Helm(ctx, "--namespace", namespace, "uninstall", daemonSet, "--ignore-not-found"); err != nil {
			t.Error(err)
		}
		waitNoDaemon(ctx, t, n)
		apply(ctx, t, n, "overlay")
		wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	})
}

// waitNoDaemon waits until no pod of the daemon is left.
func waitNoDaemon(ctx context.Context, t *testing.T, n *node.Node) {
	t.Helper()
	wait(ctx, t, func(ctx context.Context) error {
		pods, err := n.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("%d pods of the daemon are left", len(pods.Items))
		}
		return err
	})
}

// installedByHelm: one release is installed, upgraded to other values, rolled back and uninstalled,
// while pods run. With -long there are more values, and a MIG device is held when the release goes.
func installedByHelm(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	withoutDaemon(ctx, t, n)
	before := waitPod(ctx, t, n, holder, isRunning)

	start := time.Now()
	helm(ctx, t, n, append([]string{"install"}, chartWith(t, "")...)...)
	ran := time.Since(start)
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	took := time.Since(start)
	waitNode(ctx, t, n, gpu, gpus, gpus, start)
	t.Logf("helm install took %v, the kubelet counts %d GPUs after %v and the Node object after %v, %v wanted",
		ran.Round(time.Millisecond), gpus, took.Round(time.Millisecond), time.Since(start).Round(time.Millisecond), installed)
	if took > far*installed {
		t.Errorf("the kubelet counts %d GPUs %v after helm install began, want %v", gpus, took, installed)
	}
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	if out := helm(ctx, t, n, "test", daemonSet); !strings.Contains(out, "Succeeded") {
		t.Errorf("helm test says: %s", out)
	}
	kubectl(ctx, t, n, "--namespace", namespace, "delete", "pod", daemonSet+"-test")

	const replicas = 4
	upgrade(ctx, t, n, fmt.Sprintf("config: {map: {default: 'sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: %d}]}}'}}", replicas))
	const shared = (gpus-2)*replicas + 2 // a pod holds two GPUs whole
	waitAllocatables(ctx, t, n, map[string]int{gpu: shared})
	runPod(ctx, t, n, "helm-shares", gpu, 1)
	if held := heldDevices(ctx, t, kubelet, "helm-shares"); !strings.Contains(held[0], "::") {
		t.Errorf("the kubelet gave %v, want a replica", held)
	}
	deletePod(ctx, t, n, "helm-shares")

	helm(ctx, t, n, "rollback", daemonSet, "1")
	waitAllocatables(ctx, t, n, map[string]int{gpu: gpus})
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	if _, err := n.Client.CoreV1().ConfigMaps(namespace).Get(ctx, daemonSet+"-config",
		metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the ConfigMap of the later revision is there still: %v", err)
	}

	stay := []*corev1.Pod{before}
	if *long {
		labelsByHelm(ctx, t, n)
		stay = append(stay, devicesByHelm(ctx, t, n, kubelet))
	}

	helm(ctx, t, n, "uninstall", daemonSet)
	waitNoDaemon(ctx, t, n)
	waitAllocatables(ctx, t, n, map[string]int{})
	for _, pod := range stay {
		waitPod(ctx, t, n, pod.Name, isSame(pod))
	}
	left := kubectl(ctx, t, n, "get", "--all-namespaces", "--selector", "app.kubernetes.io/instance="+daemonSet,
		"--output", "name",
		"daemonsets,pods,configmaps,serviceaccounts,clusterroles,clusterrolebindings,roles,rolebindings,"+
			"validatingadmissionpolicies,validatingadmissionpolicybindings,secrets")
	if left != "" {
		t.Errorf("helm uninstall left %s", left)
	}
}

// labelsByHelm: with the values for which NVIDIA's chart starts gpu-feature-discovery and
// config-manager, the daemon labels its Node, and a label of the Node chooses the configuration
// file.
func labelsByHelm(ctx context.Context, t *testing.T, n *node.Node) {
	startProxy(t) // the pod's way to the API server
	publishCA(ctx, t, n, namespace)
	start := time.Now()
	upgrade(ctx, t, n, `
gfd: {enabled: true}
config:
  default: whole
  map:
    whole: "version: v1"
    shared: "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}"
devicePlugin:
  containers:
    main:
      env: [{name: KUBERNETES_SERVICE_HOST, value: 192.0.2.1}, {name: KUBERNETES_SERVICE_PORT, value: "6444"}]
`)
	waitNodeSays(ctx, t, n, "the labels, from helm upgrade on", start, stepLimit, hasLabel("nvidia.com/gpu.count", "8"))
	waitAllocatables(ctx, t, n, map[string]int{gpu: gpus})
	kubectl(ctx, t, n, "label", "node", node.Name, configLabel+"=shared")
	waitAllocatables(ctx, t, n, map[string]int{gpu: (gpus-2)*2 + 2})
	kubectl(ctx, t, n, "label", "node", node.Name, configLabel+"-")
	waitAllocatables(ctx, t, n, map[string]int{gpu: gpus})

	// Labels stay when the daemon stops writing them; another story looks for them.
	upgrade(ctx, t, n, "")
	kubectl(ctx, t, n, "label", "node", node.Name, "nvidia.com/gpu.count-", "nvidia.com/gpu.product-", healthLabel+"-")
}

// devicesByHelm has the release give device nodes by CDI, of whole GPUs and then of MIG devices. It
// returns the pod that holds one of these.
func devicesByHelm(ctx context.Context, t *testing.T, n *node.Node,
	kubelet podresources.PodResourcesListerClient) *corev1.Pod {
	t.Helper()
	installDriver(ctx, t)
	makeNodes(t, driverRoot, simulatedGPUs(ctx, t, n))
	upgrade(ctx, t, n, "{deviceListStrategy: cdi-cri, nvidiaDriverRoot: "+driverRoot+"}")
	waitAllocatables(ctx, t, n, map[string]int{gpu: gpus})
	runPod(ctx, t, n, "helm-cdi", gpu, 2)
	hasNodes(ctx, t, n, kubelet, "helm-cdi")
	deletePod(ctx, t, n, "helm-cdi")

	upgrade(ctx, t, n, "{simulate: a100-mig-mixed, migStrategy: mixed, deviceListStrategy: [cdi-annotations, cdi-cri], nvidiaDriverRoot: "+driverRoot+"}")
	waitAllocatables(ctx, t, n, mixedA100)
	makeNodes(t, driverRoot, simulatedGPUs(ctx, t, n))
	pod := runPod(ctx, t, n, "helm-mig", "nvidia.com/mig-3g.40gb", 1)
	hasNodes(ctx, t, n, kubelet, "helm-mig")
	return pod
}

// besideTheOperator: the chart with the values of docs/migrate.md takes the GPUs over where
// NVIDIA's operator runs all but its device plugin, and a runtime of NVIDIA's that is not the
// default one. It is there before the operator's plugin goes: the GPUs stay allocatable. It goes
// and comes with the operator's label.
func besideTheOperator(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	all := simulatedGPUs(ctx, t, n)
	withoutDaemon(ctx, t, n)
	before := waitPod(ctx, t, n, holder, isRunning)
	values := documented(t, "docs/migrate.md", "TestValuesBesideTheOperator")
	startProxy(t)
	publishCA(ctx, t, n, namespace)
	installDriver(ctx, t)
	makeNodes(t, driverRoot, all)
	installToolkit(t)
	installRuntime(ctx, t, n)
	kubectl(ctx, t, n, "label", "node", node.Name, deployPlugin+"=true")
	t.Cleanup(func() {
		if _, err := n.Kubectl(context.Background(), "label", "node", node.Name, deployPlugin+"-"); err != nil {
			t.Error(err)
		}
	})
	theirs, err := scenario.StartPlugin(pluginSockets, "nvidia-gpu.sock", gpu, scenario.Script{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(theirs.Stop)
	var devices []*v1beta1.Device
	for _, g := range all {
		devices = append(devices, &v1beta1.Device{ID: g.UUID, Health: v1beta1.Healthy})
	}
	theirs.Send(devices...)
	if err := theirs.Register(ctx); err != nil {
		t.Fatal(err)
	}
	waitAllocatable(ctx, t, kubelet, gpu, gpus, promptly)
	end := watch(ctx, t, kubelet, gpu, "beside the operator, whose plugin goes afterwards")
	helm(ctx, t, n, append([]string{"install"}, append(chartWith(t, values), "--values", valuesFile(t, `
cdi: {nvidiaHookPath: /run/nvidia/toolkit/nvidia-cdi-hook}
devicePlugin:
  containers:
    main:
      env: [{name: KUBERNETES_SERVICE_HOST, value: 192.0.2.1}, {name: KUBERNETES_SERVICE_PORT, value: "6444"}]
`))...)...)
	start := time.Now()
	waitNodeSays(ctx, t, n, "the condition", start, stepLimit, func(object *corev1.Node) bool {
		return slices.ContainsFunc(object.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == "GPUHealthy" && c.Status == corev1.ConditionTrue
		})
	})
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	processes := daemonProcesses(t)
	for _, pid := range processes {
		found, err := filepath.Glob(fmt.Sprintf("/proc/%d/root/dev/nvidia[0-9]*", pid))
		if err != nil || len(found) != gpus {
			t.Errorf("the daemon has the device nodes %v, error %v, want those of %d GPUs", found, err, gpus)
		}
	}
	if len(processes) == 0 {
		t.Error("there is no process of the daemon")
	}
	theirs.Stop()
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	if lowest, longest := end().below(gpus); lowest < gpus && isKubelet("1.37") {
		t.Errorf("the kubelet counted %d for %v, want never below %d", lowest, longest, gpus)
	}
	runPod(ctx, t, n, "beside-the-operator", gpu, 1)
	hasNodesOf(ctx, t, n, kubelet, "beside-the-operator", all)
	shell(ctx, t, n, "beside-the-operator", "ls /usr/bin/nvidia-smi")
	deletePod(ctx, t, n, "beside-the-operator")

	kubectl(ctx, t, n, "label", "--overwrite", "node", node.Name, deployPlugin+"=paused-for-mig-change")
	waitNoDaemon(ctx, t, n)
	if processes := daemonProcesses(t); len(processes) > 0 {
		t.Errorf("processes %v may have the driver open during the pause", processes)
	}
	kubectl(ctx, t, n, "label", "--overwrite", "node", node.Name, deployPlugin+"=true")
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	waitPod(ctx, t, n, holder, isSame(before))
}

// documented returns the values of a document that say what holds them.
func documented(t *testing.T, document, by string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(*source, document))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), by+" -->\n```yaml\n")
	values, _, found := strings.Cut(rest, "```")
	if !found {
		t.Fatalf("%s has no values that are held by %s", document, by)
	}
	return values
}

// valuesFile writes values into a file.
func valuesFile(t *testing.T, values string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(file, []byte(values), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// upgrade upgrades the release to other values, and waits until the DaemonSet is rolled out.
func upgrade(ctx context.Context, t *testing.T, n *node.Node, values string) {
	t.Helper()
	helm(ctx, t, n, append([]string{"upgrade"}, chartWith(t, values)...)...)
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
}

// takesOverByHelm: the chart comes to a node on which a plugin serves that behaves as NVIDIA's, and
// leaves it to that plugin again, in each of the two orders. The plugin has NVIDIA's socket name
// and device IDs, says its list once and registers once.
func takesOverByHelm(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	withoutDaemon(ctx, t, n)
	before := waitPod(ctx, t, n, holder, isRunning)
	install := func() { helm(ctx, t, n, append([]string{"install"}, chartWith(t, "")...)...) }
	uninstall := func() {
		helm(ctx, t, n, "uninstall", daemonSet)
		waitNoDaemon(ctx, t, n)
	}
	served := func(what, pod string, theirs bool) {
		t.Helper()
		waitAllocatable(ctx, t, kubelet, gpu, gpus, promptly)
		waitPod(ctx, t, n, holder, isSame(before))
		runPod(ctx, t, n, pod, gpu, 1)
		if by := strings.TrimSpace(shell(ctx, t, n, pod, "echo $SERVED_BY")); (by == "nvidia-gpu.sock") != theirs {
			t.Errorf("%s: the pod was served by %q", what, by)
		}
		deletePod(ctx, t, n, pod)
		waitGone(ctx, t, n, pod)
	}

	install()
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	var devices []*v1beta1.Device
	for _, g := range simulatedGPUs(ctx, t, n) {
		devices = append(devices, &v1beta1.Device{ID: g.UUID, Health: v1beta1.Healthy})
	}
	start := func() *scenario.Plugin {
		t.Helper()
		theirs, err := scenario.StartPlugin(pluginSockets, "nvidia-gpu.sock", gpu, scenario.Script{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(theirs.Stop)
		theirs.Send(devices...)
		if err := theirs.Register(ctx); err != nil {
			t.Fatal(err)
		}
		return theirs
	}

	// Back to theirs, ours first: the way that docs/migrate.md gives.
	uninstall()
	theirs := start()
	served("back, ours ended first", "back-1", true)

	// To ours, which is installed first.
	end := watch(ctx, t, kubelet, gpu, "to ours, which is installed first")
	endChurn := startChurn(ctx, t, n)
	install()
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	theirs.Stop()
	waitAllocatable(ctx, t, kubelet, gpu, gpus, promptly)
	noneFailed(t, endChurn(), "to ours, which is installed first")
	served("to ours, which is installed first", "to-1", false)
	lowest, longest := end().below(gpus)
	switch {
	case lowest < gpus && isKubelet("1.37"):
		t.Errorf("to ours, which is installed first: the kubelet counted %d, want never below %d", lowest, gpus)
	case longest > far*time.Second:
		t.Errorf("to ours, which is installed first: below %d for %v, want a second", gpus, longest)
	}

	// Back to theirs, which is started first. Kubelet 1.36 ends theirs, too, when ours ends, and
	// theirs must be started again.
	end = watch(ctx, t, kubelet, gpu, "back to theirs, which is started first")
	endChurn = startChurn(ctx, t, n)
	theirs = start()
	uninstall()
	if lowest, _ := end().below(gpus); lowest < gpus {
		if isKubelet("1.37") {
			t.Errorf("back to theirs, which is started first: the kubelet counted %d, want never below %d", lowest, gpus)
		}
		theirs.Stop()
		theirs = start()
	}
	noneFailed(t, endChurn(), "back to theirs, which is started first")
	served("back, theirs started first", "back-2", true)

	// To ours, after theirs ended, in the release of theirs and with its values.
	helm(ctx, t, n, "install", daemonSet, chartLikeNVIDIAs(t), "--values", filepath.Join(*source, nvidiaValues))
	theirs.Stop()
	began := time.Now()
	helm(ctx, t, n, append([]string{"upgrade", "--reset-then-reuse-values"}, chartWith(t, "")...)...)
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	t.Logf("theirs ended, then helm upgrade: all GPUs after %v", time.Since(began).Round(time.Millisecond))
	served("to ours, after theirs ended", "to-2", false)
}

// noneFailed: on 1.37 no short pod fails while a plugin gives the node to another one.
func noneFailed(t *testing.T, churn *churn, what string) {
	t.Helper()
	if isKubelet("1.37") && len(churn.refused) > 0 {
		t.Errorf("%s: %d of %d pods failed, want none", what, len(churn.refused), churn.made)
	}
}

// chartLikeNVIDIAs returns a chart with one small object.
func chartLikeNVIDIAs(t *testing.T) string {
	t.Helper()
	folder := t.TempDir()
	makeFolder(t, filepath.Join(folder, "templates"))
	for name, text := range map[string]string{
		"Chart.yaml":            "{apiVersion: v2, name: nvidia-device-plugin, version: 0.20.0}",
		"templates/object.yaml": "{apiVersion: v1, kind: ConfigMap, metadata: {name: nvidias}}",
	} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

// waitGone waits until a pod is gone, and its devices with it.
func waitGone(ctx context.Context, t *testing.T, n *node.Node, pod string) {
	t.Helper()
	wait(ctx, t, func(ctx context.Context) error {
		_, err := n.Client.CoreV1().Pods(corev1.NamespaceDefault).Get(ctx, pod, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("pod %s is there still: %w", pod, err)
	})
}
