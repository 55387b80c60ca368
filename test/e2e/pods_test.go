package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

const (
	// stepLimit is how long anything that Kubernetes does by itself may take here; a small machine is
	// slow, and a busy one slower.
	stepLimit = 3 * time.Minute
	// promptly is how long the daemon may take for what takes it a fraction of a second. It is a
	// hundred times that, for a busy machine, and less than the half minute after which the daemon
	// mends what it has not been told of.
	promptly = 20 * time.Second
	// far is how many times over a figure may be what is wanted of it on a machine that has nothing
	// else to do. The figure is logged.
	far = 10
)

// createPod creates a pod that asks for devices of a resource and sleeps. It is removed when the
// test ends.
func createPod(ctx context.Context, t *testing.T, n *node.Node, name, resource string, devices int64) {
	t.Helper()
	startPod(ctx, t, n, podOf(name, resource, devices))
}

// startPod creates a pod. It is removed when the test ends.
func startPod(ctx context.Context, t *testing.T, n *node.Node, pod *corev1.Pod) {
	t.Helper()
	name := pod.Name
	persist(ctx, t, "create pod "+name, func(ctx context.Context) error {
		_, err := n.Client.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			return nil // by an attempt whose answer was lost: the stories' names differ
		}
		return err
	})
	// The test's context has ended by then.
	t.Cleanup(func() { deletePod(context.Background(), t, n, name) })
}

// deletePod deletes a pod, if it is still there.
func deletePod(ctx context.Context, t *testing.T, n *node.Node, name string) {
	t.Helper()
	options := metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))}
	persist(ctx, t, "delete pod "+name, func(ctx context.Context) error {
		err := n.Client.CoreV1().Pods("default").Delete(ctx, name, options)
		if apierrors.IsNotFound(err) {
			return nil
		}
		return err
	})
}

// runPod creates a pod and waits until it runs.
func runPod(ctx context.Context, t *testing.T, n *node.Node, name, resource string, devices int64) *corev1.Pod {
	t.Helper()
	return admitPod(ctx, t, n, name, resource, devices, isRunning)
}

// admitPod creates a pod and waits until ask is content with it. Before kubelet 1.37 it may be
// refused at first, where a stream has just ended: that kubelet may come late to the end and take away the
// registration that it finds by then, for a moment. A controller would make another pod, too.
func admitPod(
	ctx context.Context, t *testing.T, n *node.Node, name, resource string, devices int64, ask func(*corev1.Pod) error,
) *corev1.Pod {
	t.Helper()
	for range far {
		createPod(ctx, t, n, name, resource, devices)
		pod := waitPod(ctx, t, n, name, func(pod *corev1.Pod) error {
			if pod.Status.Phase == corev1.PodFailed {
				return nil
			}
			return ask(pod)
		})
		if pod.Status.Phase != corev1.PodFailed {
			return pod
		}
		t.Logf("pod %s was refused: %s: %s", name, pod.Status.Reason, pod.Status.Message)
		if isKubelet("1.37") || pod.Status.Reason != "UnexpectedAdmissionError" {
			break
		}
		deletePod(ctx, t, n, name)
	}
	t.Fatalf("pod %s was refused", name)
	return nil
}

// isKubelet says whether the kubelet is of that minor version.
func isKubelet(minor string) bool { return strings.HasPrefix(*kubeletVersion, minor+".") }

// isOld says whether kubelet and control plane are of Kubernetes 1.34 or 1.35, where many features
// of Dynamic Resource Allocation are off.
func isOld() bool { return isKubelet("1.34") || isKubelet("1.35") }

// persist tries a request again that fails: the API server and the kubelet may be too busy to
// answer.
func persist(ctx context.Context, t *testing.T, what string, request func(context.Context) error) {
	t.Helper()
	for pause := time.Second; ; pause *= 2 {
		limited, cancel := context.WithTimeout(ctx, time.Minute)
		err := request(limited)
		cancel()
		if err == nil {
			return
		}
		if pause > 8*time.Second || ctx.Err() != nil {
			t.Fatalf("%s: %v", what, err)
		}
		t.Logf("%s: %v; trying again in %v", what, err, pause)
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// kubectl runs kubectl, which must succeed, and returns what it wrote to its output.
func kubectl(ctx context.Context, t *testing.T, n *node.Node, args ...string) string {
	t.Helper()
	var out string
	persist(ctx, t, "kubectl", func(ctx context.Context) (err error) {
		out, err = n.Kubectl(ctx, args...)
		return err
	})
	return out
}

// waitPod waits until ask is content with the pod, and returns it.
func waitPod(
	ctx context.Context, t *testing.T, n *node.Node, name string, ask func(*corev1.Pod) error,
) *corev1.Pod {
	t.Helper()
	var pod *corev1.Pod
	wait(ctx, t, func(ctx context.Context) (err error) {
		if pod, err = n.Client.CoreV1().Pods("default").Get(ctx, name, metav1.GetOptions{}); err != nil {
			return err
		}
		return ask(pod)
	})
	return pod
}

// wait asks every 100 ms until ask returns nil, for as long as a step may take.
func wait(ctx context.Context, t *testing.T, ask func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	if err := node.Wait(ctx, 100*time.Millisecond, ask); err != nil {
		t.Fatal(err)
	}
}

func isRunning(pod *corev1.Pod) error {
	if pod.Status.Phase != corev1.PodRunning {
		return fmt.Errorf("pod %s is %s: %s %s", pod.Name, pod.Status.Phase, pod.Status.Reason, pod.Status.Message)
	}
	return nil
}

// isSame asks whether the pod runs in the container that was seen before.
func isSame(before *corev1.Pod) func(*corev1.Pod) error {
	return func(pod *corev1.Pod) error {
		was, is := before.Status.ContainerStatuses[0].ContainerID, pod.Status.ContainerStatuses[0].ContainerID
		if was != is {
			return fmt.Errorf("pod %s has container %s, was %s", pod.Name, is, was)
		}
		return isRunning(pod)
	}
}

// hasHealth asks whether the pod's status says so of a device that the running pod holds.
func hasHealth(device string, health corev1.ResourceHealthStatus) func(*corev1.Pod) error {
	return func(pod *corev1.Pod) error {
		for _, status := range pod.Status.ContainerStatuses[0].AllocatedResourcesStatus {
			for _, d := range status.Resources {
				if string(d.ResourceID) == device && d.Health == health {
					return isRunning(pod) // Nothing ends a container for its GPU's health.
				}
			}
		}
		return fmt.Errorf("%s is not %s in the pod's status: %+v", device, health, pod.Status.ContainerStatuses[0])
	}
}

// visibleDevices returns what the pod's container finds in NVIDIA_VISIBLE_DEVICES.
func visibleDevices(ctx context.Context, t *testing.T, n *node.Node, pod string) []string {
	t.Helper()
	return strings.Split(strings.TrimSpace(shell(ctx, t, n, pod, "echo $NVIDIA_VISIBLE_DEVICES")), ",")
}

// shell runs a script in the pod's container, and returns what it wrote to its output. The script
// may be run twice.
func shell(ctx context.Context, t *testing.T, n *node.Node, pod, script string) string {
	t.Helper()
	return kubectl(ctx, t, n, "exec", pod, "--", "busybox", "sh", "-c", script)
}

// waitNode waits until the Node object's status has these numbers of a resource, and was written
// after since.
func waitNode(
	ctx context.Context, t *testing.T, n *node.Node, resource string, capacity, allocatable int64, since time.Time,
) {
	t.Helper()
	wait(ctx, t, func(ctx context.Context) error {
		object, err := n.Client.CoreV1().Nodes().Get(ctx, node.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, condition := range object.Status.Conditions {
			// The API keeps whole seconds.
			if condition.Type == corev1.NodeReady && condition.LastHeartbeatTime.Time.Before(since.Truncate(time.Second)) {
				return fmt.Errorf("the Node's status is from before %v", since)
			}
		}
		name := corev1.ResourceName(resource)
		c, a := object.Status.Capacity[name], object.Status.Allocatable[name]
		if c.Value() != capacity || a.Value() != allocatable {
			return fmt.Errorf("the Node has capacity %v and allocatable %v of %s, want %d and %d",
				&c, &a, resource, capacity, allocatable)
		}
		return nil
	})
}
