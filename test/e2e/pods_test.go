package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// stepLimit is how long anything that Kubernetes does by itself may take here; a small machine is slow.
const stepLimit = time.Minute

// createPod creates a pod that asks for devices of a resource and sleeps. It is removed when the test ends.
func createPod(ctx context.Context, t *testing.T, n *node.Node, name, resource string, devices int64) {
	t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			AutomountServiceAccountToken: ptr.To(false),
			EnableServiceLinks:           ptr.To(false),
			RestartPolicy:                corev1.RestartPolicyNever,
			// Its only process ignores SIGTERM, as the first process of a container does.
			TerminationGracePeriodSeconds: ptr.To(int64(0)),
			Tolerations:                   []corev1.Toleration{{Key: gpu, Operator: corev1.TolerationOpExists}},
			Containers: []corev1.Container{{
				Name:            "main",
				Image:           node.SandboxImage,
				ImagePullPolicy: corev1.PullNever,
				Resources: corev1.ResourceRequirements{
					Limits: corev1.ResourceList{
						corev1.ResourceName(resource): *apiresource.NewQuantity(devices, apiresource.DecimalSI),
					},
				},
			}},
		},
	}
	if _, err := n.Client.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		t.Fatalf("create pod %s: %v", name, err)
	}
	// The test's context has ended by then.
	t.Cleanup(func() { deletePod(context.Background(), t, n, name) })
}

// deletePod deletes a pod, if it is still there.
func deletePod(ctx context.Context, t *testing.T, n *node.Node, name string) {
	t.Helper()
	options := metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))}
	err := n.Client.CoreV1().Pods("default").Delete(ctx, name, options)
	if err != nil && !apierrors.IsNotFound(err) {
		t.Errorf("delete pod %s: %v", name, err)
	}
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

// shell runs a script in the pod's container, and returns what it wrote to its output.
func shell(ctx context.Context, t *testing.T, n *node.Node, pod, script string) string {
	t.Helper()
	out, err := n.Kubectl(ctx, "exec", pod, "--", "busybox", "sh", "-c", script)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// waitNode waits until the Node object's status has these numbers of a resource, and was written after since.
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
