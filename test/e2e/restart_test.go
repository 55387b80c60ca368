package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// nodeRestarts: after a restart of the machine, the kubelet asks for the devices of its pods before
// the daemon's own pod runs. A bare pod that held GPUs fails, a controller creates another one, and
// all GPUs are allocatable again. What takes how long is logged.
func nodeRestarts(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	runPod(ctx, t, n, "bare", gpu, 1)
	earlier := theDaemonPod(ctx, t, n)
	start, err := n.Restart(ctx)
	if err != nil {
		t.Fatal(err)
	}
	up := time.Since(start)
	whole := up + waitAllocatable(ctx, t, kubelet, gpu, gpus, far*stepLimit)
	waitNode(ctx, t, n, gpu, gpus, gpus, start)
	told := time.Since(start)
	t.Logf("from the start of the kubelet: it answers after %v, counts all GPUs after %v, and the Node object has them after %v",
		up.Round(time.Millisecond), whole.Round(time.Millisecond), told.Round(time.Millisecond))
	log := kubectl(ctx, t, n, "-n", namespace, "logs", "--timestamps", theDaemonPod(ctx, t, n).Name)
	for line := range strings.Lines(log) {
		for _, message := range []string{`"Starting"`, `"Started"`, `"Registered"`, `"Ready"`} {
			stamp, _, _ := strings.Cut(line, " ")
			if at, err := time.Parse(time.RFC3339Nano, stamp); err == nil && strings.Contains(line, message) {
				t.Logf("the daemon: %s after %v", message, at.Sub(start).Round(time.Millisecond))
			}
		}
	}
	if now := theDaemonPod(ctx, t, n); now.UID != earlier.UID {
		t.Errorf("the daemon has another pod, %s, want the same one in another container", now.Name)
	}
	waitPod(ctx, t, n, "bare", func(pod *corev1.Pod) error {
		if pod.Status.Phase != corev1.PodFailed || pod.Status.Reason != "UnexpectedAdmissionError" {
			return fmt.Errorf("the bare pod is %s %s: %s", pod.Status.Phase, pod.Status.Reason, pod.Status.Message)
		}
		return nil
	})
	explains(ctx, t, n, "bare", "did not admit it (UnexpectedAdmissionError)")
	// Later stories have the pod that holds two GPUs.
	deletePod(ctx, t, n, "bare")
	if err := n.Client.CoreV1().Pods("default").Delete(ctx, holder, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	waitGone(ctx, t, n, holder)
	runPod(ctx, t, n, holder, gpu, 2)
}
