package e2e

import (
	"context"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// heldThroughRestarts: on a node with the Topology Manager's policy single-numa-node, pods hold
// GPUs that are no longer offered in the form in which they were given. The kubelet admits every
// pod again when it starts: it panics if a device that a pod holds is in no list, and ends the pod
// if the device has no NUMA node any more.
func heldThroughRestarts(ctx context.Context, t *testing.T, n *node.Node,
	kubelet podresources.PodResourcesListerClient) {
	const (
		away    = 25 * time.Second // for which the API server is away after the kubelet's restart
		settles = 5 * time.Second  // a kubelet that knows its pods has admitted them again long before that
	)
	// A kubelet that has not heard from the API server does not know its pods, and takes GPUs for held
	// whose pods have ended.
	known := func(pod string) {
		t.Helper()
		wait(ctx, t, func(ctx context.Context) error {
			allRun(t, n)
			_, err := kubelet.Get(ctx, &podresources.GetPodResourcesRequest{PodNamespace: "default", PodName: pod})
			return err
		})
	}
	setTopologyPolicy(ctx, t, n, "single-numa-node")
	waitAllocatable(ctx, t, kubelet, gpu, gpus, promptly)
	known(holder)
	setConfig(ctx, t, n, configs["whole"])

	// One holds its GPU in its only container, the other in an init container that has not ended:
	// PodResources shows the first alone.
	held := []*corev1.Pod{runPod(ctx, t, n, "holds", gpu, 1), initHolder(ctx, t, n, "holds-early")}
	stay := func(when string) {
		t.Helper()
		t.Log(when)
		known(held[0].Name)
		pause(ctx, settles)
		allRun(t, n)
		for _, before := range held {
			waitPod(ctx, t, n, before.Name, isSameStill(before))
		}
	}
	stay("before anything happens")

	setConfig(ctx, t, n, configs["shared"])
	waitForms(ctx, t, kubelet, func(whole, replicas int) bool { return whole <= 4 && replicas >= 4*(gpus-4) })

	// The kubelet starts while the API server is away: it shows no pods until that is back.
	n.StopAPIServer()
	restartKubelet(ctx, t, n)
	waitForms(ctx, t, kubelet, func(whole, replicas int) bool { return whole <= 4 && replicas >= 4*(gpus-4) })
	pause(ctx, away)
	if err := n.StartAPIServer(ctx); err != nil {
		t.Fatal(err)
	}
	stay("the API server was away when the kubelet restarted")

	// A daemon that starts knows of the devices from the kubelet alone.
	setEnv(ctx, t, n, "E2E=adopts") // a roll-out
	waitForms(ctx, t, kubelet, func(whole, replicas int) bool { return whole <= 4 && replicas >= 4*(gpus-4) })
	restartKubelet(ctx, t, n)
	stay("the daemon and then the kubelet restarted")

	n.StopKubelet()
	pause(ctx, kubeletDown())
	if err := n.StartKubelet(ctx); err != nil {
		t.Fatal(err)
	}
	waitForms(ctx, t, kubelet, func(whole, replicas int) bool { return whole <= 4 && replicas >= 4*(gpus-4) })
	stay(fmt.Sprintf("the kubelet was down for %v", kubeletDown()))

	for _, pod := range held {
		deletePod(ctx, t, n, pod.Name)
	}
	setConfig(ctx, t, n, configs["whole"])
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	setTopologyPolicy(ctx, t, n, "none")
	waitAllocatable(ctx, t, kubelet, gpu, gpus, promptly)
}

// kubeletDown is how long the kubelet is away: in a long run for longer than any grace that the
// daemon may have.
func kubeletDown() time.Duration {
	if *long {
		return 10 * time.Minute
	}
	return 5 * time.Second
}

func setTopologyPolicy(ctx context.Context, t *testing.T, n *node.Node, policy string) {
	t.Helper()
	if err := n.SetKubelet("topologyManagerPolicy", policy); err != nil {
		t.Fatal(err)
	}
	restartKubelet(ctx, t, n)
}

func restartKubelet(ctx context.Context, t *testing.T, n *node.Node) {
	t.Helper()
	n.StopKubelet()
	if err := n.StartKubelet(ctx); err != nil {
		t.Fatal(err)
	}
}

// pause lets time go by, for what must not happen in it.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// initHolder makes a pod whose init container holds a GPU and does not end, and returns it when
// that runs.
func initHolder(ctx context.Context, t *testing.T, n *node.Node, name string) *corev1.Pod {
	t.Helper()
	// The next container asks for none: a kubelet that starts refuses a pod with a container that does
	// not run yet and asks for devices, even for zero, when it admits the pod before it has received
	// the first list of a resource that has registered.
	pod := podOf(name, gpu, 0)
	pod.Spec.Containers[0].Resources = corev1.ResourceRequirements{}
	pod.Spec.InitContainers = []corev1.Container{containerOf("early", gpu, 1)}
	startPod(ctx, t, n, pod)
	return waitPod(ctx, t, n, name, func(pod *corev1.Pod) error {
		statuses := pod.Status.InitContainerStatuses
		if len(statuses) != 1 || statuses[0].State.Running == nil {
			return fmt.Errorf("the init container does not run: %+v", pod.Status)
		}
		return nil
	})
}

// isSameStill asks whether the pod that was seen before runs in the same containers, and was not
// failed.
func isSameStill(before *corev1.Pod) func(*corev1.Pod) error {
	ids := func(pod *corev1.Pod) (ids []string) {
		for _, s := range append(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses...) {
			if s.State.Running != nil {
				ids = append(ids, s.ContainerID)
			}
		}
		return ids
	}
	return func(pod *corev1.Pod) error {
		if was, is := fmt.Sprint(ids(before)), fmt.Sprint(ids(pod)); was != is || pod.Status.Phase != before.Status.Phase {
			return fmt.Errorf("pod %s is %s with %s, was %s with %s: %s %s", pod.Name, pod.Status.Phase, is, before.Status.Phase,
				was,
				pod.Status.Reason, pod.Status.Message)
		}
		return nil
	}
}
