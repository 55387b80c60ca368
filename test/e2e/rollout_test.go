package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

var configs = map[string]string{
	"whole":  "version: v1\n",
	"shared": "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n",
}

// upgradesThatShare switches time-slicing on and off by roll-outs, as an upgrade of the chart does,
// while short pods come all along. The old daemon and the new one have different lists: they must
// not speak in turn, and no device may leave the list that a pod is being given.
func upgradesThatShare(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	for name, text := range configs {
		createConfigMap(ctx, t, n, name, text)
	}
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	rollOutConfig(ctx, t, n, "whole")
	switchSharing(ctx, t, n, kubelet, func(name string) { rollOutConfig(ctx, t, n, name) })
}

// reloadsThatShare does the same by changes of the running daemon's file.
func reloadsThatShare(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	setConfig(ctx, t, n, configs["whole"])
	switchSharing(ctx, t, n, kubelet, func(name string) { setConfig(ctx, t, n, configs[name]) })
}

// switchSharing switches time-slicing on and off, and counts the short pods that fail meanwhile.
func switchSharing(
	ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient, change func(name string),
) {
	t.Helper()
	const held = 2 // GPUs that a pod holds whole all along
	before := waitPod(ctx, t, n, holder, isRunning)
	waitForms(ctx, t, kubelet, func(whole, replicas int) bool { return whole >= gpus-2 && replicas == 0 })
	seen := watch(ctx, t, kubelet, gpu, "time-slicing switched")
	end := startChurn(ctx, t, n)
	for i, name := range []string{"shared", "whole"} {
		start := time.Now()
		change(name)
		done := time.Since(start)
		waitForms(ctx, t, kubelet, func(whole, replicas int) bool {
			allRun(t, n)
			if name == "shared" {
				return whole <= held && replicas >= 4*(gpus-2)
			}
			return whole == gpus && replicas == 0
		})
		t.Logf("change %d, to %s: done in %v, in the kubelet's list alone after %v", i+1, name, done.Round(time.Millisecond),
			time.Since(start).Round(time.Millisecond))
	}
	churn := end()
	// A daemon that ends has kubelet 1.36 forget the next one, so that its end takes nothing away: on
	// a machine that is too busy, not each time.
	if zeros := seen().times(0); zeros > 1 {
		t.Errorf("the kubelet counted 0 %d times in 2 changes, want once at most", zeros)
	}
	if ours := churn.ofOurs(); len(ours) > 0 {
		t.Errorf("%d of %d pods failed for what a device plugin did", len(ours), churn.made)
	}
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	waitPod(ctx, t, n, holder, isSame(before))
}

func createConfigMap(ctx context.Context, t *testing.T, n *node.Node, name, text string) {
	t.Helper()
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"config.yaml": text}}
	if _, err := n.Client.CoreV1().ConfigMaps(namespace).Create(ctx, object, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// rollOutConfig replaces the daemon's pod by one that has another ConfigMap, and returns when the
// old one has gone.
func rollOutConfig(ctx context.Context, t *testing.T, n *node.Node, name string) {
	t.Helper()
	// The DaemonSet controller never ends a roll-out that began while the old pod had not been Ready
	// for minReadySeconds.
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	patchDaemonSet(ctx, t, n, fmt.Sprintf(`{
		"containers":[{"name":"gpu-device-plugin","env":[{"name":"CONFIG_FILE","value":"/config/config.yaml"}],
			"volumeMounts":[{"name":"config","mountPath":"/config","readOnly":true}]}],
		"volumes":[{"name":"config","configMap":{"name":%q}}]}`, name))
	wait(ctx, t, func(ctx context.Context) error {
		allRun(t, n)
		return rolledOut(ctx, n)
	})
}

// allRun fails the test if a process of the node has ended.
func allRun(t *testing.T, n *node.Node) {
	t.Helper()
	if ended := n.Ended(); len(ended) > 0 {
		t.Fatalf("processes of the node have ended: %s", strings.Join(ended, "\n"))
	}
}

// patchDaemonSet changes the specification of the daemon's pods.
func patchDaemonSet(ctx context.Context, t *testing.T, n *node.Node, spec string) {
	t.Helper()
	patch := `{"spec":{"template":{"spec":` + spec + `}}}`
	kubectl(ctx, t, n, "-n", namespace, "patch", "daemonset", daemonSet, "--patch", patch)
}

// waitForms waits until enough of the kubelet's allocatable devices are whole GPUs and replicas.
func waitForms(
	ctx context.Context, t *testing.T, kubelet podresources.PodResourcesListerClient, enough func(whole,
		replicas int) bool,
) {
	t.Helper()
	wait(ctx, t, func(ctx context.Context) error {
		answer, err := kubelet.GetAllocatableResources(ctx, &podresources.AllocatableResourcesRequest{})
		if err != nil {
			return err
		}
		whole, replicas := 0, 0
		for _, device := range answer.GetDevices() {
			for _, id := range device.GetDeviceIds() {
				if strings.Contains(id, "::") {
					replicas++
				} else {
					whole++
				}
			}
		}
		if !enough(whole, replicas) {
			return fmt.Errorf("the kubelet has %d whole GPUs and %d replicas", whole, replicas)
		}
		return nil
	})
}

// brokenVersion rolls out a daemon that finds no driver over one that serves. It does not become
// Ready, so that the roll-out stops and the earlier one goes on serving. TestDaemon begins with the
// same on a node where nothing is served.
func brokenVersion(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	const holds = 20 * time.Second
	// A pod that has not been Ready for minReadySeconds does not count: a roll-out may end it at once.
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	earlier := theDaemonPod(ctx, t, n)
	end := watch(ctx, t, kubelet, gpu, "broken version")
	kubectl(ctx, t, n, "-n", namespace, "set", "env", "daemonset/"+daemonSet, "SIMULATE-",
		"CONTAINER_DRIVER_ROOT=/nowhere")
	var broken string
	wait(ctx, t, func(ctx context.Context) error {
		pods, err := n.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, pod := range pods.Items {
			if pod.Name != earlier.Name && len(pod.Status.ContainerStatuses) == 1 &&
				pod.Status.ContainerStatuses[0].State.Running != nil {
				broken = pod.Name
				return nil
			}
		}
		return errors.New("the broken daemon does not run")
	})
	during, cancel := context.WithTimeout(ctx, holds)
	err := node.Wait(during, waitInterval, func(ctx context.Context) error {
		for _, pod := range []string{earlier.Name, broken} {
			object, err := n.Client.CoreV1().Pods(namespace).Get(ctx, pod, metav1.GetOptions{})
			switch {
			case apierrors.IsNotFound(err), err == nil && (object.DeletionTimestamp != nil || pod == broken && isReady(object)):
				return nil // what must not be
			}
		}
		return errors.New("the earlier one serves and the other is not Ready")
	})
	cancel()
	if err == nil {
		t.Errorf("the broken daemon became Ready, or the earlier one was ended")
	}
	runPod(ctx, t, n, "during-broken", gpu, 1)
	if lowest, _ := end().below(gpus); lowest < gpus {
		t.Errorf("the kubelet counted %d, want never below %d", lowest, gpus)
	}
	t.Logf("the broken daemon says:\n%s", kubectl(ctx, t, n, "-n", namespace, "get", "events", "--field-selector",
		"involvedObject.name="+broken))

	kubectl(ctx, t, n, "-n", namespace, "set", "env", "daemonset/"+daemonSet, "SIMULATE=dgx-h100",
		"CONTAINER_DRIVER_ROOT=/driver-root")
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
}

func isReady(pod *corev1.Pod) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}
