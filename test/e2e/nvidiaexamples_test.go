package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// The files of the README.
const (
	readmeFlags = "version: v1\nflags:\n  migStrategy: %q\n  failOnInitError: true\n  nvidiaDriverRoot: \"/\"\n" +
		"  plugin:\n    passDeviceSpecs: false\n    deviceListStrategy: envvar\n    deviceIDStrategy: uuid\n"
	readmeSharing = "version: v1\nsharing:\n  %s:\n%s    resources:\n    - name: nvidia.com/gpu\n      replicas: 10\n"
)

// severalFiles is the example with a file for each kind of node.
var severalFiles = chartExample{
	name: "several files and a label", plugin: chartPlugin, machine: "a100-mig-mixed", chosen: "config0", gfd: true,
	files: map[string]string{"config0": fmt.Sprintf(readmeFlags, "none"), "config1": fmt.Sprintf(readmeFlags, "mixed")},
	want:  map[string]int{gpu: gpus}, check: followsTheLabel,
}

// chartExamples are all others.
var chartExamples = []chartExample{
	{name: "nvidia-device-plugin.yml", plugin: staticPlugin, check: seesOneGPU},
	{
		name: "nvidia-device-plugin-compat-with-cpumanager.yml", plugin: staticPlugin, env: map[string]string{"PASS_DEVICE_SPECS": "true"},
		change: func(pod *corev1.PodSpec) {
			main := &pod.Containers[0]
			main.Env = slices.DeleteFunc(main.Env, func(e corev1.EnvVar) bool { return e.Name == "FAIL_ON_INIT_ERROR" })
			main.SecurityContext = &corev1.SecurityContext{Privileged: ptr.To(true)}
		},
		check: hasNodesOfTheHost,
	},
	{name: "helm upgrade -i", plugin: chartPlugin, check: seesOneGPU},
	{name: "one file", plugin: chartPlugin, files: map[string]string{"config": fmt.Sprintf(readmeFlags, "none")},
		check: seesOneGPU},
	{
		name: "renameByDefault after pods have ended", plugin: chartPlugin, files: map[string]string{"config": fmt.Sprintf(readmeFlags, "none")},
		check: renamesAfterPodsHaveEnded,
	},
	{
		name: "a ConfigMap of one's own", plugin: chartPlugin, files: map[string]string{"config": fmt.Sprintf(readmeFlags,
			"none")}, external: true,
		check: seesOneGPU,
	},
	{
		name: "compatWithCPUManager with resources", plugin: chartPlugin, env: map[string]string{"PASS_DEVICE_SPECS": "true"},
		change: func(pod *corev1.PodSpec) {
			pod.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: ptr.To(true)}
			pod.Containers[0].Resources = corev1.ResourceRequirements{
				Requests: corev1.ResourceList{corev1.ResourceCPU: apiresource.MustParse("100m")},
				Limits:   corev1.ResourceList{corev1.ResourceMemory: apiresource.MustParse("512Mi")},
			}
		},
		check: hasNodesOfTheHost,
	},
	{
		name: "compatWithCPUManager and migStrategy mixed", plugin: chartPlugin, machine: "a100-mig-mixed",
		env: map[string]string{"PASS_DEVICE_SPECS": "true", "MIG_STRATEGY": "mixed", "NVIDIA_MIG_MONITOR_DEVICES": "all"},
		change: func(pod *corev1.PodSpec) {
			pod.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: ptr.To(true)}
		},
		want: mixedA100, check: hasNodesOfTheHost,
	},
	{name: "gfd.enabled", plugin: chartPlugin, gfd: true, check: writesNodeFeature("8", "NVIDIA-H100-80GB-HBM3")},
	{
		name: "gpu-feature-discovery alone", gfd: true, machine: "a100-mig-mixed", want: map[string]int{},
		check: writesNodeFeature("8", "NVIDIA-A100-SXM4-80GB"),
	},
	{
		name: "time-slicing", plugin: chartPlugin, files: map[string]string{"config": fmt.Sprintf(readmeSharing,
			"timeSlicing", "")},
		want: map[string]int{gpu: 10 * gpus}, check: seesOneGPU,
	},
	{
		name: "time-slicing and renameByDefault", plugin: chartPlugin, want: map[string]int{gpu + ".shared": 10 * gpus},
		files: map[string]string{"config": fmt.Sprintf(readmeSharing, "timeSlicing",
			"    renameByDefault: true\n    failRequestsGreaterThanOne: true\n")},
		check: refusesTwo,
	},
	{
		name: "MPS", plugin: chartPlugin, mps: true, files: map[string]string{"config": fmt.Sprintf(readmeSharing, "mps",
			"")},
		want: map[string]int{gpu: 10 * gpus}, check: isClientOfMPS(gpu),
	},
	{
		name: "MPS and renameByDefault", plugin: chartPlugin, mps: true,
		files: map[string]string{"config": fmt.Sprintf(readmeSharing, "mps", "    renameByDefault: true\n")},
		want:  map[string]int{gpu + ".shared": 10 * gpus}, check: isClientOfMPS(gpu + ".shared"),
	},
	{
		name: "an IMEX channel", plugin: chartPlugin, machine: "gb300-nvl72", files: map[string]string{"config": "version: v1\nimex: {channelIDs: [0]}\n"},
		want: map[string]int{gpu: 4}, check: seesOneGPU,
	},
	{
		name: "deviceListStrategy cdi-cri and nvidiaDriverRoot", plugin: chartPlugin,
		env:    map[string]string{"DEVICE_LIST_STRATEGY": "cdi-cri", "NVIDIA_DRIVER_ROOT": driverRoot},
		change: mountsDriverRoot, check: hasNodesOfTheHost,
	},
	{
		name: "deviceListStrategy volume-mounts and deviceIDStrategy index", plugin: chartPlugin,
		env: map[string]string{"DEVICE_LIST_STRATEGY": "volume-mounts", "DEVICE_ID_STRATEGY": "index"}, check: isGivenAnIndex,
	},
	{
		name: "runtimeClassName", plugin: chartPlugin, change: func(pod *corev1.PodSpec) { pod.RuntimeClassName = ptr.To("nvidia") }, check: seesOneGPU,
	},
	{
		name: "variables of the main container", plugin: chartPlugin, env: map[string]string{"DP_DISABLE_HEALTHCHECKS": "xids"}, check: seesOneGPU,
	},
}

// The checks run pods as the README does.

const examplePod = "gpu-pod"

// seesOneGPU runs the README's pod: one device, by NVIDIA_VISIBLE_DEVICES.
func seesOneGPU(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	runPod(ctx, t, n, examplePod, gpu, 1)
	if held, seen := heldDevices(ctx, t, kubelet, examplePod), visibleDevices(ctx, t, n, examplePod); !slices.Equal(seen,
		[]string{uuidOf(held[0])}) {
		t.Errorf("the pod was given %v and sees %v", held, seen)
	}
	waitGoneNow(ctx, t, n)
}

// waitGoneNow removes the README's pod.
func waitGoneNow(ctx context.Context, t *testing.T, n *node.Node) {
	t.Helper()
	deletePod(ctx, t, n, examplePod)
	waitGone(ctx, t, n, examplePod)
}

// hasNodesOfTheHost: the pod has exactly the device nodes of what it was given.
func hasNodesOfTheHost(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	namespace, set := chartNamespace, chartPlugin
	if _, err := setPod(ctx, n, namespace, set); err != nil {
		namespace, set = "kube-system", staticPlugin
	}
	var all []simulated
	out := kubectl(ctx, t, n, "--namespace", namespace, "exec", "ds/"+set, "--container", "nvidia-device-plugin-ctr", "--",
		"gpu-device-plugin", "simulate", "list", "--output", "json")
	if err := json.Unmarshal([]byte(out), &all); err != nil {
		t.Fatal(err)
	}
	makeNodes(t, "/", all)
	makeNodes(t, driverRoot, all)
	resource := gpu
	if slices.ContainsFunc(all, func(g simulated) bool { return len(g.MIG) > 0 }) {
		resource = third
	}
	runPod(ctx, t, n, examplePod, resource, 1)
	hasNodesOf(ctx, t, n, kubelet, examplePod, all)
	waitGoneNow(ctx, t, n)
}

// followsTheLabel: the label of the node chooses the other file and, without it, the default again.
// gpu-feature-discovery follows, too.
func followsTheLabel(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	for _, choice := range []struct {
		label, strategy string
		want            map[string]int
	}{
		{configLabel + "=config1", `mig.strategy: mixed`, mixedA100}, {configLabel + "-", "", map[string]int{gpu: gpus}},
	} {
		start := time.Now()
		kubectl(ctx, t, n, "label", "node", node.Name, choice.label)
		waitAllocatables(ctx, t, n, choice.want)
		t.Logf("label %s: in the Node object after %v", choice.label, time.Since(start).Round(time.Millisecond))
		waitFeatures(ctx, t, n, choice.strategy, `nvidia.com/gpu.product: NVIDIA-A100-SXM4-80GB`)
	}
	seesOneGPU(ctx, t, n, kubelet)
}

// writesNodeFeature: gpu-feature-discovery tells node-feature-discovery of the GPUs.
func writesNodeFeature(count, product string) func(context.Context, *testing.T, *node.Node,
	podresources.PodResourcesListerClient) {
	return func(ctx context.Context, t *testing.T, n *node.Node, _ podresources.PodResourcesListerClient) {
		waitFeatures(ctx, t, n, fmt.Sprintf("nvidia.com/gpu.count: %q", count), "nvidia.com/gpu.product: "+product)
	}
}

// waitFeatures waits until the NodeFeature of the chart's namespace has these texts.
func waitFeatures(ctx context.Context, t *testing.T, n *node.Node, texts ...string) {
	t.Helper()
	wait(ctx, t, func(ctx context.Context) error {
		out, err := n.Kubectl(ctx, "-n", chartNamespace, "get", "nodefeatures", "--output", "yaml")
		for _, text := range texts {
			if err == nil && !strings.Contains(out, text) {
				err = fmt.Errorf("no NodeFeature has %q: %s", text, out)
			}
		}
		return err
	})
}

// refusesTwo: a pod runs with one replica, and one that asks for two is refused, with the words of
// the README.
func refusesTwo(ctx context.Context, t *testing.T, n *node.Node, _ podresources.PodResourcesListerClient) {
	runPod(ctx, t, n, "shares", gpu+".shared", 1)
	createPod(ctx, t, n, examplePod, gpu+".shared", 2)
	waitPod(ctx, t, n, examplePod, func(pod *corev1.Pod) error {
		if pod.Status.Reason != "UnexpectedAdmissionError" || !strings.Contains(pod.Status.Message,
			"maximum request size for shared resources is 1") {
			return fmt.Errorf("the pod is %s: %s %s", pod.Status.Phase, pod.Status.Reason, pod.Status.Message)
		}
		return nil
	})
	deletePod(ctx, t, n, "shares")
	waitGoneNow(ctx, t, n)
}

// renamesAfterPodsHaveEnded: kubelet does not see that a pod has ended which held all GPUs, and
// nobody asks it. Pods that ask for a new name get a GPU all the same, and the first of them has
// kubelet look.
func renamesAfterPodsHaveEnded(ctx context.Context, t *testing.T, n *node.Node,
	_ podresources.PodResourcesListerClient) {
	const shared = gpu + ".shared"
	runPod(ctx, t, n, examplePod, gpu, gpus)
	waitGoneNow(ctx, t, n)
	start := time.Now()
	patch := fmt.Appendf(nil, `{"data":{"config":%q}}`, fmt.Sprintf(readmeSharing, "timeSlicing",
		"    renameByDefault: true\n"))
	persist(ctx, t, "change the configuration", func(ctx context.Context) error {
		_, err := n.Client.CoreV1().ConfigMaps(chartNamespace).Patch(ctx, chartPlugin+"-configs", types.MergePatchType, patch,
			metav1.PatchOptions{})
		return err
	})
	runPod(ctx, t, n, "asks-for-the-new-name", shared, 1)
	t.Logf("the pod runs %v after the change", time.Since(start).Round(time.Millisecond))
	waitAllocatables(ctx, t, n, map[string]int{shared: 10 * gpus})
	deletePod(ctx, t, n, "asks-for-the-new-name")
	waitGone(ctx, t, n, "asks-for-the-new-name")
}

// isGivenAnIndex: the container has a file named after the index of its GPU.
func isGivenAnIndex(ctx context.Context, t *testing.T, n *node.Node, _ podresources.PodResourcesListerClient) {
	runPod(ctx, t, n, examplePod, gpu, 1)
	if got := strings.TrimSpace(shell(ctx, t, n, examplePod, "ls /var/run/nvidia-container-devices")); len(got) != 1 ||
		got < "0" || got > "7" {
		t.Errorf("the container has the file %q, want one named 0 to 7", got)
	}
	waitGoneNow(ctx, t, n)
}

// isClientOfMPS: a container finds the control daemon of its resource, which limits it to a tenth
// of threads and memory.
func isClientOfMPS(resource string) func(context.Context, *testing.T, *node.Node,
	podresources.PodResourcesListerClient) {
	return func(ctx context.Context, t *testing.T, n *node.Node, _ podresources.PodResourcesListerClient) {
		runPod(ctx, t, n, examplePod, resource, 1)
		usesMPS(ctx, t, n, examplePod, resource, "set_default_active_thread_percentage 10")
		waitGoneNow(ctx, t, n)
	}
}

// usesMPS checks that a pod's container finds the control daemon of a resource, and that this one
// was given a limit.
func usesMPS(ctx context.Context, t *testing.T, n *node.Node, pod, resource, limit string) {
	t.Helper()
	const find = `echo $CUDA_MPS_PIPE_DIRECTORY; test -S $CUDA_MPS_PIPE_DIRECTORY/control && echo socket; grep -c " /dev/shm " /proc/mounts`
	if got, want := strings.Fields(shell(ctx, t, n, pod, find)), []string{"/mps/" + resource + "/pipe", "socket",
		"1"}; !slices.Equal(got, want) {
		t.Errorf("the container finds %v, want %v", got, want)
	}
	log, err := os.ReadFile(filepath.Join("/run/nvidia/mps", resource, "log/control.log"))
	if err != nil || !strings.Contains(string(log), limit) {
		t.Errorf("the control daemon was not told %q: %v: %s", limit, err, log)
	}
}
