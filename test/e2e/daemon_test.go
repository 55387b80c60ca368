package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

const (
	namespace     = "kube-system"
	daemonSet     = "gpu-device-plugin"
	gpus          = 8 // of the simulated DGX H100
	pluginSockets = "/var/lib/kubelet/device-plugins"
	cureLimit     = 20 * time.Second // two of the daemon's fast looks, five seconds apart, and as much again
	holder        = "two"            // the pod that holds two GPUs through all stories
)

// story is one thing that the daemon does on a node where it is running and one pod holds two GPUs.
type story func(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient)

func TestDaemon(t *testing.T) {
	ctx, n := startNode(t)
	kubelet := podResources(t)

	t.Cleanup(func() {
		if t.Failed() {
			explain(t, n)
		}
	})

	start := time.Now()
	overlay := filepath.Join(*source, "test/e2e/testdata/overlay")
	if _, err := n.Kubectl(ctx, "apply", "--validate=strict", "--kustomize", overlay); err != nil {
		t.Fatal(err)
	}
	waitNode(ctx, t, n, gpu, gpus, gpus, start)
	phase("manifests applied to capacity 8", start)

	start = time.Now()
	createPod(ctx, t, n, holder, gpu, 2)
	waitPod(ctx, t, n, holder, isRunning)
	phase("pod with two GPUs runs", start)

	for _, s := range []struct {
		name  string
		story story
	}{
		{"a container sees its GPUs", seesItsGPUs},
		{"a pod that asks for nine stays Pending", nineStaysPending},
		{"kubelet restarts", kubeletRestarts},
		{"rolling upgrade", rollingUpgrade},
		{"daemon killed", daemonKilled},
		{"another server comes and goes", anotherServer},
		{"an XID makes a GPU Unhealthy until it is cured", xidMakesUnhealthy},
		{"daemon ended", daemonEnded},
		{"changed to another driver root", changedDriverRoot},
		{"CDI", givesCDI},
		{"volume mounts", givesVolumeMounts},
		{"device nodes", givesDeviceNodes},
		{"checks before a container starts", checksBeforeStart},
		{"time-slicing", timeSlices},
		{"a reload adds and removes a resource", reloads},
		{"MIG devices of several profiles", offersMIG},
	} {
		start := time.Now()
		if !t.Run(s.name, func(t *testing.T) { s.story(ctx, t, n, kubelet) }) {
			break // The next story would begin on a node in an unknown state.
		}
		phase(s.name, start)
	}
}

// explain logs what the node can say about a failure.
func explain(t *testing.T, n *node.Node) {
	// The test's context has ended by now.
	ctx, cancel := context.WithTimeout(context.Background(), stepLimit)
	defer cancel()
	for _, args := range [][]string{
		{"get", "pods,daemonsets", "--all-namespaces", "--output", "wide"},
		{"events", "--namespace", namespace},
		{"events"},
		{"logs", "--namespace", namespace, "--selector", "app.kubernetes.io/name=" + daemonSet, "--tail", "100"},
	} {
		out, err := n.Kubectl(ctx, args...)
		if err != nil {
			out = err.Error()
		}
		t.Logf("kubectl %s:\n%s", strings.Join(args, " "), out)
	}
}

func seesItsGPUs(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	seen, held := visibleDevices(ctx, t, n, holder), heldDevices(ctx, t, kubelet, holder)
	slices.Sort(seen)
	if len(held) != 2 || !slices.Equal(seen, held) {
		t.Errorf("NVIDIA_VISIBLE_DEVICES has %v, the kubelet gave %v, want the same two UUIDs", seen, held)
	}
	for _, uuid := range seen {
		if !strings.HasPrefix(uuid, "GPU-") {
			t.Errorf("%q is not a GPU's UUID", uuid)
		}
	}
}

func nineStaysPending(ctx context.Context, t *testing.T, n *node.Node, _ podresources.PodResourcesListerClient) {
	createPod(ctx, t, n, "nine", gpu, gpus+1)
	waitPod(ctx, t, n, "nine", func(pod *corev1.Pod) error {
		for _, condition := range pod.Status.Conditions {
			if condition.Type == corev1.PodScheduled && condition.Reason == corev1.PodReasonUnschedulable &&
				strings.Contains(condition.Message, gpu) && pod.Status.Phase == corev1.PodPending {
				return nil
			}
		}
		return fmt.Errorf("the scheduler has not refused the pod: %v", pod.Status.Conditions)
	})
}

func kubeletRestarts(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	before := waitPod(ctx, t, n, holder, isRunning)
	for i := range 10 {
		n.StopKubelet()
		start := time.Now()
		if err := n.StartKubelet(ctx); err != nil {
			t.Fatal(err)
		}
		up := time.Since(start)
		whole := waitAllocatable(ctx, t, kubelet, gpu, gpus, 5*time.Second)
		waitNode(ctx, t, n, gpu, gpus, gpus, start)
		t.Logf("restart %2d: kubelet up after %v, all GPUs %v later, in the Node object after %v", i+1,
			up.Round(time.Millisecond), whole.Round(time.Millisecond), time.Since(start).Round(time.Millisecond))
	}
	waitPod(ctx, t, n, holder, isSame(before))
}

// rollingUpgrade replaces the daemon's pod three times, the new one starting before the old one ends. Kubelet 1.36 keeps
// one client for a resource, so the end of the old daemon's stream can cut off the new one; 1.37 keeps both.
func rollingUpgrade(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	for i := range 3 {
		end := watch(ctx, t, kubelet, gpu, fmt.Sprintf("upgrade %d", i+1))
		patch := fmt.Sprintf(`{"spec":{"template":{"metadata":{"annotations":{"e2e/upgrade":"%d"}}}}}`, i+1)
		if _, err := n.Kubectl(ctx, "-n", namespace, "patch", "daemonset", daemonSet, "--patch", patch); err != nil {
			t.Fatal(err)
		}
		wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
		waitAllocatable(ctx, t, kubelet, gpu, gpus, time.Second)
		lowest, longest := end().below(gpus)
		switch {
		case strings.HasPrefix(*kubeletVersion, "1.36."):
			if longest > time.Second {
				t.Errorf("upgrade %d: below %d for %v, want a second at most", i+1, gpus, longest)
			}
		case lowest < gpus:
			t.Errorf("upgrade %d: the kubelet counted %d, want never below %d", i+1, lowest, gpus)
		}
		name := fmt.Sprintf("after-upgrade-%d", i+1)
		createPod(ctx, t, n, name, gpu, 1)
		waitPod(ctx, t, n, name, isRunning)
	}
}

// rolledOut asks whether the only pod of the DaemonSet is one of its newest revision.
func rolledOut(ctx context.Context, n *node.Node) error {
	set, err := n.Client.AppsV1().DaemonSets(namespace).Get(ctx, daemonSet, metav1.GetOptions{})
	if err != nil {
		return err
	}
	s := set.Status
	if s.ObservedGeneration != set.Generation || s.UpdatedNumberScheduled != 1 || s.NumberAvailable != 1 {
		return fmt.Errorf("the DaemonSet is not rolled out: %+v", s)
	}
	_, err = daemonPod(ctx, n)
	return err
}

// daemonPod returns the daemon's pod, which must be the only one.
func daemonPod(ctx context.Context, n *node.Node) (*corev1.Pod, error) {
	pods, err := n.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	if len(pods.Items) != 1 {
		return nil, fmt.Errorf("%d pods of the daemon, want 1", len(pods.Items))
	}
	return &pods.Items[0], nil
}

func xidMakesUnhealthy(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	uuid := visibleDevices(ctx, t, n, holder)[0]
	before := waitPod(ctx, t, n, holder, isRunning)
	start := time.Now()
	// A double-bit ECC error, which a reset cures.
	daemonExec(ctx, t, n, "simulate", "xid", "--gpu", uuid, "--xid", "48")
	waitAllocatable(ctx, t, kubelet, gpu, gpus-1, 5*time.Second)
	waitNode(ctx, t, n, gpu, gpus, gpus-1, start)
	waitPod(ctx, t, n, holder, hasHealth(uuid, corev1.ResourceHealthStatusUnhealthy))

	start = time.Now()
	daemonExec(ctx, t, n, "simulate", "restore", "--gpu", uuid)
	cured := waitAllocatable(ctx, t, kubelet, gpu, gpus, cureLimit)
	waitNode(ctx, t, n, gpu, gpus, gpus, start)
	waitPod(ctx, t, n, holder, hasHealth(uuid, corev1.ResourceHealthStatusHealthy))
	waitPod(ctx, t, n, holder, isSame(before))
	t.Logf("all GPUs allocatable %v after the cure", cured.Round(time.Millisecond))
}

// daemonExec runs the daemon's program in the daemon's container, and returns what it wrote to its output.
func daemonExec(ctx context.Context, t *testing.T, n *node.Node, args ...string) string {
	t.Helper()
	pod, err := daemonPod(ctx, n)
	if err != nil {
		t.Fatal(err)
	}
	out, err := n.Kubectl(ctx, append([]string{"-n", namespace, "exec", pod.Name, "--", "gpu-device-plugin"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func daemonKilled(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	pod, err := daemonPod(ctx, n)
	if err != nil {
		t.Fatal(err)
	}
	restarts := pod.Status.ContainerStatuses[0].RestartCount
	end := watch(ctx, t, kubelet, gpu, "daemon killed")
	if err := syscall.Kill(daemonProcess(t), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	wait(ctx, t, func(ctx context.Context) error {
		pod, err := daemonPod(ctx, n)
		if err == nil && pod.Status.ContainerStatuses[0].RestartCount == restarts {
			err = errors.New("the daemon's container has not been restarted")
		}
		return err
	})
	waitAllocatable(ctx, t, kubelet, gpu, gpus, 5*time.Second)
	end()
	waitNode(ctx, t, n, gpu, gpus, gpus, time.Now())
}

func daemonEnded(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	// A starting kubelet removes every socket, that of the daemon that was killed among them.
	n.StopKubelet()
	if err := n.StartKubelet(ctx); err != nil {
		t.Fatal(err)
	}
	waitAllocatable(ctx, t, kubelet, gpu, gpus, 5*time.Second)

	const other = "other-vendor.sock"
	listener, err := net.Listen("unix", filepath.Join(pluginSockets, other))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	if got := sockets(t); len(got) != 3 {
		t.Fatalf("sockets are %v, want the daemon's, kubelet.sock and %s", got, other)
	}

	pid := daemonProcess(t)
	start := time.Now()
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	// Its container was started again once before, so the next time is ten seconds away.
	ended, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	err = node.Wait(ended, 10*time.Millisecond, func(context.Context) error {
		if slices.Contains(daemonProcesses(t), pid) {
			return errors.New("the daemon has not ended")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("daemon ended %v after SIGTERM", time.Since(start).Round(time.Millisecond))
	if got, want := sockets(t), []string{"kubelet.sock", other}; !slices.Equal(got, want) {
		t.Errorf("sockets left are %v, want %v", got, want)
	}
}

// sockets lists those in the kubelet's folder for device plugins.
func sockets(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir(pluginSockets)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, entry := range entries {
		if entry.Type() == os.ModeSocket {
			names = append(names, entry.Name())
		}
	}
	return names
}

// daemonProcess returns the daemon's process ID as seen here, where all of the node's processes are seen.
func daemonProcess(t *testing.T) int {
	t.Helper()
	pids := daemonProcesses(t)
	if len(pids) != 1 {
		t.Fatalf("the daemon's processes are %v, want one", pids)
	}
	return pids[0]
}

func daemonProcesses(t *testing.T) []int {
	t.Helper()
	links, err := filepath.Glob("/proc/[0-9]*/exe")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, link := range links {
		var pid int
		if _, err := fmt.Sscanf(link, "/proc/%d/exe", &pid); err != nil {
			t.Fatal(err)
		}
		// A process that has ended meanwhile has no link to read.
		if target, err := os.Readlink(link); err == nil && filepath.Base(target) == "gpu-device-plugin" {
			pids = append(pids, pid)
		}
	}
	return pids
}
