package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

const (
	// churnEvery is how often churnPods pods are made, each of which asks for one GPU and runs for a
	// second.
	churnEvery = 800 * time.Millisecond
	churnPods  = 4
	// churnMost is how many of them there may be that have not ended. A machine that is slow makes
	// fewer, then.
	churnMost = 24
	churnName = "churn"
)

// A refusal is a pod that failed, in the words of its status, or of its container's where the pod
// was admitted.
type refusal struct {
	pod, reason, message string
}

func refusalOf(pod *corev1.Pod) refusal {
	r := refusal{pod.Name, pod.Status.Reason, pod.Status.Message}
	for _, s := range pod.Status.ContainerStatuses {
		if ended := s.State.Terminated; r.reason == "" && ended != nil {
			r.reason, r.message = ended.Reason, fmt.Sprintf("exit code %d: %s", ended.ExitCode, ended.Message)
		}
	}
	return r
}

// A churn makes short pods until it is ended.
type churn struct {
	n   *node.Node
	pod func(name string) *corev1.Pod

	mu      sync.Mutex // guards all following fields
	made    int
	ran     int // to their end
	refused []refusal
	err     error // of the API
}

// startChurn makes pods until the returned function is called, which waits for the last of them to
// end and returns what became of all.
func startChurn(ctx context.Context, t *testing.T, n *node.Node) func() *churn {
	t.Helper()
	return startChurnOf(ctx, t, n, func(name string) *corev1.Pod {
		pod := podOf(name, gpu, 1)
		pod.Spec.Containers[0].Command = []string{"busybox", "sleep", "1"}
		return pod
	})
}

// startChurnOf does so with other pods than those that ask for one GPU and run for a second.
func startChurnOf(ctx context.Context, t *testing.T, n *node.Node, pod func(name string) *corev1.Pod) func() *churn {
	t.Helper()
	c := &churn{n: n, pod: pod}
	making, stop := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() {
		ticker := time.NewTicker(churnEvery)
		defer ticker.Stop()
		for making.Err() == nil {
			if c.collect(ctx) <= churnMost-churnPods {
				c.makeSome(ctx)
			}
			select {
			case <-making.Done():
			case <-ticker.C:
			}
		}
	})
	end := sync.OnceFunc(func() {
		stop()
		running.Wait()
	})
	t.Cleanup(func() {
		end()
		t.Logf("kubelet %s: %v", *kubeletVersion, c)
		background := metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))}
		_ = n.Client.CoreV1().Pods("default").DeleteCollection(context.Background(), background,
			metav1.ListOptions{LabelSelector: "app=" + churnName})
	})
	return func() *churn {
		t.Helper()
		end()
		wait(ctx, t, func(ctx context.Context) error {
			if left := c.collect(ctx); left > 0 {
				return fmt.Errorf("%d of the short pods have not ended", left)
			}
			return nil
		})
		if c.err != nil {
			t.Logf("a request about the short pods failed: %v", c.err)
		}
		return c
	}
}

// makeSome makes the pods of one turn.
func (c *churn) makeSome(ctx context.Context) {
	for range churnPods {
		c.mu.Lock()
		c.made++
		name := fmt.Sprintf("%s-%d", churnName, c.made)
		c.mu.Unlock()
		pod := c.pod(name)
		pod.Labels = map[string]string{"app": churnName}
		if _, err := c.n.Client.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{}); err != nil &&
			ctx.Err() == nil {
			c.mu.Lock()
			c.made, c.err = c.made-1, err
			c.mu.Unlock()
		}
	}
}

// collect notes what became of the pods that have ended, deletes them, and returns how many have
// not.
func (c *churn) collect(ctx context.Context) (left int) {
	pods, err := c.n.Client.CoreV1().Pods("default").List(ctx, metav1.ListOptions{LabelSelector: "app=" + churnName})
	if err != nil {
		c.note(err)
		return churnMost
	}
	for _, pod := range pods.Items {
		switch {
		case pod.DeletionTimestamp != nil:
			continue
		case pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed:
			left++
			continue
		}
		options := metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))}
		if err := c.n.Client.CoreV1().Pods("default").Delete(ctx, pod.Name, options); err != nil {
			c.note(err)
			continue // it is counted when it can be deleted
		}
		c.mu.Lock()
		if pod.Status.Phase == corev1.PodSucceeded {
			c.ran++
		} else {
			c.refused = append(c.refused, refusalOf(&pod))
		}
		c.mu.Unlock()
	}
	return left
}

func (c *churn) note(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = err
}

// String reads "308 pods, 306 ran to their end, 2 failed", and for each reason "2 ×
// UnexpectedAdmissionError: ... (churn-3 churn-8)".
func (c *churn) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	pods := map[string][]string{}
	for _, r := range c.refused {
		words := r.reason + ": " + r.message
		pods[words] = append(pods[words], r.pod)
	}
	text := fmt.Sprintf("%d pods, %d ran to their end, %d failed", c.made, c.ran, len(c.refused))
	for _, words := range slices.Sorted(maps.Keys(pods)) {
		text += fmt.Sprintf("\n\t%d × %s (%s)", len(pods[words]), words, strings.Join(pods[words], " "))
	}
	return text
}

// ofOurs returns the pods that failed for a reason that a device plugin can help. Where the old
// server could not have a kubelet before 1.37 forget the new one before it ended, that kubelet stops the
// endpoint of the new one with it, until that registers again: a pod that comes in that moment is
// refused. When the devices get fewer, the scheduler may send a pod by a count that is a second
// old: all are given out then.
func (c *churn) ofOurs() []refusal {
	return slices.DeleteFunc(c.avoidable(), func(r refusal) bool {
		return r.reason == "OutOf"+gpu || strings.Contains(r.message, "requested number of devices unavailable")
	})
}

// avoidable returns the pods that failed, but for those that a kubelet before 1.37 refuses in the
// moment without an endpoint.
func (c *churn) avoidable() []refusal {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(c.refused), func(r refusal) bool {
		has := func(words ...string) bool {
			return slices.ContainsFunc(words, func(w string) bool { return strings.Contains(r.message, w) })
		}
		return !isKubelet("1.37") && has("no healthy devices present", "has been stopped", "client connection is closing")
	})
}

// podOf returns a pod that asks for devices of a resource and sleeps.
func podOf(name, resource string, devices int64) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			AutomountServiceAccountToken: ptr.To(false),
			EnableServiceLinks:           ptr.To(false),
			RestartPolicy:                corev1.RestartPolicyNever,
			// Its only process ignores SIGTERM, as the first process of a container does.
			TerminationGracePeriodSeconds: ptr.To(int64(0)),
			Tolerations: []corev1.Toleration{
				{Key: gpu, Operator: corev1.TolerationOpExists},
				// Pods stay while kubelet is down for longer than the five minutes after which they would be
				// evicted.
				{Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute},
			},
			Containers: []corev1.Container{containerOf("main", resource, devices)},
		},
	}
}

func containerOf(name, resource string, devices int64) corev1.Container {
	return corev1.Container{
		Name:            name,
		Image:           node.SandboxImage,
		ImagePullPolicy: corev1.PullNever,
		Resources: corev1.ResourceRequirements{
			Limits: corev1.ResourceList{corev1.ResourceName(resource): *apiresource.NewQuantity(devices, apiresource.DecimalSI)},
		},
	}
}
