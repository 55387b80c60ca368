package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

const (
	operatorNamespace = "gpu-operator"
	validations       = "/run/nvidia/validations"
	pluginApp         = "nvidia-device-plugin-daemonset"
	discoveryApp      = "gpu-feature-discovery"
	mpsApp            = "nvidia-device-plugin-mps-control-daemon"
	deployPlugin      = "nvidia.com/gpu.deploy.device-plugin"
	deployDiscovery   = "nvidia.com/gpu.deploy.gpu-feature-discovery"
	mpsCapable        = "nvidia.com/mps.capable"
)

// driverReady is what the operator's validator writes where a driver container has brought the
// driver.
const driverReady = `IS_HOST_DRIVER=false
NVIDIA_DRIVER_ROOT=/run/nvidia/driver
DRIVER_ROOT_CTR_PATH=/driver-root
NVIDIA_DEV_ROOT=/run/nvidia/driver
DEV_ROOT_CTR_PATH=/driver-root
`

// hostDriverReady is what it writes where the driver is installed on the node itself.
const hostDriverReady = `IS_HOST_DRIVER=true
NVIDIA_DRIVER_ROOT=/
DRIVER_ROOT_CTR_PATH=/host
NVIDIA_DEV_ROOT=/
DEV_ROOT_CTR_PATH=/host
`

// underTheOperator and underAnEarlierOperator do this for two releases of the operator.
func underTheOperator(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	installModules(t, "gdrdrv", "nvidia_fs")
	underOperator(ctx, t, n, kubelet, "operator-26.7", "NVIDIA_GDRCOPY", "NVIDIA_GDS", "NVIDIA_MOFED")
}

func underAnEarlierOperator(ctx context.Context, t *testing.T, n *node.Node,
	kubelet podresources.PodResourcesListerClient) {
	// The namespace of the story before may be going still.
	kubectl(ctx, t, n, "delete", "--ignore-not-found", "--kustomize", filepath.Join(*source, "test/e2e/testdata/operator"))
	underOperator(ctx, t, n, kubelet, "operator")
}

// installModules says which modules of the kernel are loaded, as far as the plugin's script is
// concerned.
func installModules(t *testing.T, modules ...string) {
	t.Helper()
	const folder = "/run/nvidia/modules"
	makeFolder(t, folder)
	text := "Module Size Used by\n"
	for _, m := range modules {
		text += m + " 24576 0\n"
	}
	if err := os.WriteFile(filepath.Join(folder, "loaded"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// underOperator: the DaemonSets of NVIDIA's GPU operator start the image compat in the place of
// NVIDIA's. They wait for the operator's validations; a label of the node chooses the
// configuration; a pod gets its GPU by CDI; and labels of the node remove the pods and bring them
// back, as they do while the MIG layout or the driver changes. Before and after, the daemon of the
// other stories serves the GPUs.
func underOperator(
	ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient, fixture string, companions ...string,
) {
	before := waitPod(ctx, t, n, holder, isRunning)
	startProxy(t)
	installDriver(ctx, t)
	all := simulatedGPUs(ctx, t, n)
	makeNodes(t, driverRoot, all)
	installToolkit(t)
	installMPS(t)
	apply(ctx, t, n, fixture)
	t.Cleanup(func() { leaveTheOperator(t, n) })
	publishCA(ctx, t, n, operatorNamespace)

	kubectl(ctx, t, n, "label", "node", node.Name, deployPlugin+"=true", deployDiscovery+"=true", mpsCapable+"=true")
	apps := []string{pluginApp, discoveryApp, mpsApp}
	for _, app := range apps {
		waitLog(ctx, t, n, app, "toolkit-validation", "waiting for nvidia container stack to be setup")
	}
	validate(t, "toolkit-ready", "")
	for app, container := range map[string]string{pluginApp: "nvidia-device-plugin", discoveryApp: discoveryApp} {
		waitLog(ctx, t, n, app, container, "waiting for the driver validations to be ready")
	}

	// The daemon that was there serves until the operator's has the driver.
	end := watch(ctx, t, kubelet, gpu, "the operator's plugin takes over")
	endChurn := startChurn(ctx, t, n)
	start := time.Now()
	validate(t, "driver-ready", driverReady)
	for _, app := range apps {
		wait(ctx, t, func(ctx context.Context) error { return operandRuns(ctx, n, app) })
	}
	waitLog(ctx, t, n, pluginApp, "nvidia-device-plugin", "Registered")
	kubectl(ctx, t, n, "-n", namespace, "delete", "daemonset", daemonSet)
	wait(ctx, t, func(ctx context.Context) error {
		pods, err := n.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("the daemon has %d pods, want none", len(pods.Items))
		}
		return err
	})
	waitAllocatable(ctx, t, kubelet, gpu, gpus, promptly)
	phase("the operator's plugin serves", start)
	noneFailed(t, endChurn(), "the operator's plugin takes over")
	if lowest, longest := end().below(gpus); lowest < gpus && isKubelet("1.37") {
		t.Errorf("the kubelet counted %d for %v while the operator's plugin took over, want %d throughout", lowest, longest,
			gpus)
	}

	pod := runPod(ctx, t, n, "under-the-operator", gpu, 1)
	if found := strings.Fields(shell(ctx, t, n, pod.Name, "ls /dev/nvidia[0-9]* /usr/bin/nvidia-smi")); len(found) != 2 {
		t.Errorf("the pod has %v, want one GPU and nvidia-smi", found)
	}
	for _, name := range companions { // the simulated node has no device nodes of them, but the runtime is told
		if got := strings.TrimSpace(shell(ctx, t, n, pod.Name, "echo $"+name)); got != "enabled" {
			t.Errorf("the operator's script found the module for %s, and the pod has the value %q", name, got)
		}
	}
	discovered(ctx, t, n)
	if _, err := os.Stat("/run/nvidia/mps/shm"); err != nil {
		t.Errorf("the MPS control daemon's init container has made no shm: %v", err)
	}

	// The sidecar signals the plugin.
	start = time.Now()
	kubectl(ctx, t, n, "label", "node", node.Name, configLabel+"=shared")
	waitAllocatable(ctx, t, kubelet, gpu, 2*(gpus-3)+3, stepLimit) // two pods hold three GPUs whole
	t.Logf("GPUs are shared %v after the label of the node asked for it", time.Since(start).Round(time.Millisecond))

	// By MPS, with a control daemon in the other DaemonSet, whose sidecar signals that.
	start = time.Now()
	kubectl(ctx, t, n, "label", "--overwrite", "node", node.Name, configLabel+"=mps")
	waitAllocatable(ctx, t, kubelet, gpu, 4*(gpus-3)+3, stepLimit)
	t.Logf("GPUs are shared by MPS %v after the label of the node asked for it", time.Since(start).Round(time.Millisecond))
	runPod(ctx, t, n, "client-of-mps", gpu, 1)
	usesMPS(ctx, t, n, "client-of-mps", gpu, "set_default_active_thread_percentage 25")
	deletePod(ctx, t, n, "client-of-mps")
	kubectl(ctx, t, n, "label", "node", node.Name, configLabel+"-")
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)

	// What mig-manager does before it changes the layout, and afterwards.
	start = time.Now()
	kubectl(ctx, t, n, "label", "--overwrite", "node", node.Name, deployPlugin+"=paused-for-mig-change",
		deployDiscovery+"=paused-for-mig-change")
	for _, app := range apps {
		wait(ctx, t, func(ctx context.Context) error { return operandIsGone(ctx, n, app) })
	}
	t.Logf("the pods are gone %v after the pause", time.Since(start).Round(time.Millisecond))
	if processes := daemonProcesses(t); len(processes) > 0 {
		t.Errorf("processes %v may have the driver open during the pause", processes)
	}
	waitAllocatable(ctx, t, kubelet, gpu, 0, promptly)
	deletePod(ctx, t, n, pod.Name)

	// Afterwards the driver is the node's own.
	installHostDriver(ctx, t, all)
	validate(t, "driver-ready", hostDriverReady)
	start = time.Now()
	kubectl(ctx, t, n, "label", "--overwrite", "node", node.Name, deployPlugin+"=true", deployDiscovery+"=true")
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	t.Logf("all GPUs are allocatable %v after the pause's end", time.Since(start).Round(time.Millisecond))
	runPod(ctx, t, n, "with-the-hosts-driver", gpu, 1)
	const hosts = libraryFolder + "/libcuda.so." + driverVersion
	if found := strings.Fields(shell(ctx, t, n, "with-the-hosts-driver", "ls /dev/nvidia[0-9]* "+hosts)); len(found) != 2 {
		t.Errorf("the pod has %v, want one GPU and %s", found, hosts)
	}
	deletePod(ctx, t, n, "with-the-hosts-driver")
	// A pod may have had a share of before. Its GPU is offered neither in shares nor whole until the
	// kubelet has taken the share off offer.
	waitNodeCapacity(ctx, t, n, gpu, gpus)

	// Back: ours is there before the operator's pods go.
	keepLog(t, n, pluginApp, "nvidia-device-plugin")
	end = watch(ctx, t, kubelet, gpu, "back from the operator's plugin")
	endChurn = startChurn(ctx, t, n)
	apply(ctx, t, n, "overlay")
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	kubectl(ctx, t, n, "label", "--overwrite", "node", node.Name, deployPlugin+"=false", deployDiscovery+"=false")
	for _, app := range apps {
		wait(ctx, t, func(ctx context.Context) error { return operandIsGone(ctx, n, app) })
	}
	waitAllocatable(ctx, t, kubelet, gpu, gpus, promptly)
	noneFailed(t, endChurn(), "back from the operator's plugin")
	if lowest, longest := end().below(gpus); lowest < gpus && isKubelet("1.37") {
		t.Errorf("the kubelet counted %d for %v while the operator's plugin went, want %d throughout", lowest, longest, gpus)
	}
	waitPod(ctx, t, n, holder, isSame(before))
}

// leaveTheOperator removes what the other stories do not have.
func leaveTheOperator(t *testing.T, n *node.Node) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), stepLimit)
	defer cancel()
	if t.Failed() {
		for app, containers := range map[string][]string{
			pluginApp:    {"config-manager-init", "nvidia-device-plugin", "config-manager"},
			discoveryApp: {"config-manager-init", discoveryApp, "config-manager"},
			mpsApp:       {"mps-control-daemon-mounts", "config-manager-init", "mps-control-daemon-ctr", "config-manager"},
		} {
			for _, container := range containers {
				out, err := operandLog(ctx, n, app, container)
				t.Logf("the log of %s in %s, error %v:\n%s", container, app, err, out)
			}
		}
	}
	for _, name := range []string{"driver-ready", "toolkit-ready"} { // as the validator does when it ends
		if err := os.Remove(filepath.Join(validations, name)); err != nil && !os.IsNotExist(err) {
			t.Error(err)
		}
	}
	for _, args := range [][]string{
		{"label", "node", node.Name, deployPlugin + "-", deployDiscovery + "-", mpsCapable + "-", configLabel + "-"},
		{"delete", "--wait=false", "--ignore-not-found", "--kustomize", filepath.Join(*source, "test/e2e/testdata/operator")},
	} {
		if _, err := n.Kubectl(ctx, args...); err != nil {
			t.Error(err)
		}
	}
}

// installToolkit puts a stand-in for the toolkit's hook where CDI specs name it. It does nothing.
func installToolkit(t *testing.T) {
	t.Helper()
	const hook = "/run/nvidia/toolkit/nvidia-cdi-hook"
	makeFolder(t, filepath.Dir(hook))
	if err := os.WriteFile(hook, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
}

// installHostDriver puts the driver's libraries and device nodes where an installation on the node
// has them. The folders are the test node's own.
func installHostDriver(ctx context.Context, t *testing.T, gpus []simulated) {
	t.Helper()
	for _, name := range []string{"libcuda.so", "libnvidia-ml.so"} {
		path := filepath.Join(libraryFolder, name+"."+driverVersion)
		makeLibrary(ctx, t, path, name+".1")
		t.Cleanup(func() { _ = os.Remove(path) })
	}
	makeNodes(t, "/", gpus)
}

// validate writes a file as the operator's validator does.
func validate(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(validations, name), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// operand returns the only pod of one of the operator's DaemonSets.
func operand(ctx context.Context, n *node.Node, app string) (*corev1.Pod, error) {
	pods, err := n.Client.CoreV1().Pods(operatorNamespace).List(ctx, metav1.ListOptions{LabelSelector: "app=" + app})
	if err != nil {
		return nil, err
	}
	if len(pods.Items) != 1 {
		return nil, fmt.Errorf("%s has %d pods, want 1", app, len(pods.Items))
	}
	return &pods.Items[0], nil
}

// operandRuns asks whether all containers of an operand run, none of them for the second time.
func operandRuns(ctx context.Context, n *node.Node, app string) error {
	pod, err := operand(ctx, n, app)
	if err != nil {
		return err
	}
	for _, s := range pod.Status.ContainerStatuses {
		if s.State.Running == nil || s.RestartCount > 0 {
			return fmt.Errorf("%s of %s: %+v, %d restarts", s.Name, app, s.State, s.RestartCount)
		}
	}
	return isRunning(pod)
}

func operandIsGone(ctx context.Context, n *node.Node, app string) error {
	pods, err := n.Client.CoreV1().Pods(operatorNamespace).List(ctx, metav1.ListOptions{LabelSelector: "app=" + app})
	if err == nil && len(pods.Items) > 0 {
		err = fmt.Errorf("%s has %d pods, want none", app, len(pods.Items))
	}
	return err
}

// operandLog returns what a container of an operand has written.
func operandLog(ctx context.Context, n *node.Node, app, container string) (string, error) {
	pod, err := operand(ctx, n, app)
	if err != nil {
		return "", err
	}
	return n.Kubectl(ctx, "-n", operatorNamespace, "logs", pod.Name, "--container", container)
}

// keepLog follows the log of a container of an operand. A test that fails prints it, after the pod
// has gone too.
func keepLog(t *testing.T, n *node.Node, app, container string) {
	t.Helper()
	pod, err := operand(t.Context(), n, app)
	if err != nil {
		t.Fatal(err)
	}
	options := &corev1.PodLogOptions{Container: container, Follow: true}
	log, err := n.Client.CoreV1().Pods(operatorNamespace).GetLogs(pod.Name, options).Stream(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var (
		text    strings.Builder
		reading sync.WaitGroup
	)
	reading.Go(func() { _, err = io.Copy(&text, log) })
	t.Cleanup(func() { // the test's context has ended, and so has the stream
		reading.Wait()
		_ = log.Close()
		if t.Failed() {
			t.Logf("the log of %s in %s, which has gone, until %v:\n%s", container, pod.Name, err, &text)
		}
	})
}

// waitLog waits until a container of an operand has written a text.
func waitLog(ctx context.Context, t *testing.T, n *node.Node, app, container, text string) {
	t.Helper()
	wait(ctx, t, func(ctx context.Context) error {
		out, err := operandLog(ctx, n, app, container)
		if err == nil && !strings.Contains(out, text) {
			err = fmt.Errorf("%s of %s has not written %q: %s", container, app, text, out)
		}
		return err
	})
}

// discovered: gpu-feature-discovery has written the labels for node-feature-discovery.
func discovered(ctx context.Context, t *testing.T, n *node.Node) {
	t.Helper()
	wait(ctx, t, func(ctx context.Context) error {
		out, err := n.Kubectl(ctx, "-n", operatorNamespace, "get", "nodefeatures", "--output", "yaml")
		if err == nil && (!strings.Contains(out, `nvidia.com/gpu.count: "8"`) ||
			!strings.Contains(out, "NVIDIA-H100-80GB-HBM3")) {
			err = errors.New("no NodeFeature has the labels: " + out)
		}
		return err
	})
}
