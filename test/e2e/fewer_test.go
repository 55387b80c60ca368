package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// takenAway: upgrades of the release switch time-slicing off, by which 26 devices become 8, while
// short pods come and go. The node is tainted before, and no pod fails. With -long there are 300
// pods.
func takenAway(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	changes := 1
	if *long {
		changes = 6
	}
	churn := takeDevicesAway(ctx, t, n, kubelet, true, changes)
	if failed := churn.avoidable(); len(failed) > 0 {
		t.Errorf("%d of %d pods failed, want none", len(failed), churn.made)
	}
}

// takenAwayUntainted is the control run: the same without the taint. How many pods fail depends on
// the moment, and is logged alone.
func takenAwayUntainted(ctx context.Context, t *testing.T, n *node.Node,
	kubelet podresources.PodResourcesListerClient) {
	churn := takeDevicesAway(ctx, t, n, kubelet, false, 6)
	t.Logf("without the taint %d of %d pods failed", len(churn.refused), churn.made)
}

// takeDevicesAway makes so many changes, with features.changeTaint or without, and returns what
// became of the pods.
func takeDevicesAway(
	ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient, taint bool, changes int,
) *churn {
	t.Helper()
	values := fmt.Sprintf("features: {events: true, changeTaint: %t}\n", taint) + `
devicePlugin:
  containers:
    main:
      env: [{name: KUBERNETES_SERVICE_HOST, value: 192.0.2.1}, {name: KUBERNETES_SERVICE_PORT, value: "6444"}]
`
	const replicas = "config: {map: {default: 'sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}'}}\n"
	const whole = "config: {map: {default: 'version: v1'}}\n"
	withoutDaemon(ctx, t, n)
	startProxy(t)
	publishCA(ctx, t, n, namespace)
	before := waitPod(ctx, t, n, holder, isRunning)
	helm(ctx, t, n, append([]string{"install"}, chartWith(t, values+replicas)...)...)
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	const held = 2 // GPUs that a pod holds whole
	waitAllocatable(ctx, t, kubelet, gpu, 4*(gpus-held)+held, stepLimit)
	end := startChurn(ctx, t, n)
	for i := range changes {
		if i > 0 {
			upgrade(ctx, t, n, values+replicas)
			waitForms(ctx, t, kubelet, func(_, replicas int) bool { return replicas == 4*(gpus-held) })
		}
		start := time.Now()
		upgrade(ctx, t, n, values+whole)
		waitNodeSays(ctx, t, n, "the count of whole GPUs, without the taint", start, stepLimit,
			func(object *corev1.Node) bool {
				count := object.Status.Allocatable[gpu]
				return count.Value() == gpus && !slices.ContainsFunc(object.Spec.Taints, func(t corev1.Taint) bool {
					return t.Key == "gpu-device-plugin.github.io/fewer-devices"
				})
			})
		shown := time.Since(start)
		waitForms(ctx, t, kubelet, func(whole, replicas int) bool { return whole == gpus && replicas == 0 })
		t.Logf("change %d: %d on the Node, which is not tainted, after %v; whole GPUs alone after %v", i+1, gpus,
			shown.Round(time.Millisecond), time.Since(start).Round(time.Millisecond))
	}
	churn := end()
	log := kubectl(ctx, t, n, "--namespace", namespace, "logs", "--selector", "app.kubernetes.io/name="+daemonSet,
		"--tail", "-1")
	if tainted := strings.Contains(log, "Changed the taint for fewer devices"); tainted != taint {
		t.Errorf("the node was tainted: %t, want %t", tainted, taint)
	}
	waitPod(ctx, t, n, holder, isSame(before))
	return churn
}
