package e2e

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// changedDriverRoot has the daemon look for the driver in another place, and gives it a
// configuration file.
func changedDriverRoot(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	installDriver(ctx, t)
	// A daemon that has just ended is started again first: see rollOutConfig.
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	apply(ctx, t, n, "driver-container")
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	// The daemon that ended may have been started again just now, after the new one, only to be
	// killed: 1.36 has stopped its endpoint then, which the new one notices within half a minute.
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	makeNodes(t, driverRoot, simulatedGPUs(ctx, t, n))
}

// setEnv replaces the daemon by one that has these environment variables in addition: NAME=VALUE,
// or NAME- for none.
func setEnv(ctx context.Context, t *testing.T, n *node.Node, variables ...string) {
	t.Helper()
	kubectl(ctx, t, n, append([]string{"-n", namespace, "set", "env", "daemonset/" + daemonSet}, variables...)...)
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
}

// setConfig gives the running daemon another configuration file.
func setConfig(ctx context.Context, t *testing.T, n *node.Node, config string) {
	t.Helper()
	patch := fmt.Appendf(nil, `{"data":{"config.yaml":%q}}`, config)
	persist(ctx, t, "change the daemon's configuration", func(ctx context.Context) error {
		_, err := n.Client.CoreV1().ConfigMaps(namespace).
			Patch(ctx, daemonSet, types.MergePatchType, patch, metav1.PatchOptions{})
		return err
	})
}

// givesCDI: the container has its device nodes, the driver's libraries where loaders look and its
// programs, and nothing else; what the image says of NVIDIA_VISIBLE_DEVICES has no effect.
func givesCDI(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	setEnv(ctx, t, n, "DEVICE_LIST_STRATEGY=cdi-cri")
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	runPod(ctx, t, n, "cdi", gpu, 2)

	hasNodes(ctx, t, n, kubelet, "cdi")
	if got := visibleDevices(ctx, t, n, "cdi"); !slices.Equal(got, []string{"void"}) {
		t.Errorf("NVIDIA_VISIBLE_DEVICES is %v, want void", got)
	}
	got := map[string]string{} // sums by path
	for line := range strings.Lines(shell(ctx, t, n, "cdi", "find /usr -type f -exec sha256sum {} +")) {
		sum, path, _ := strings.Cut(strings.TrimSpace(line), "  ")
		got[path] = sum
	}
	want := map[string]string{"/usr/bin/nvidia-smi": sumOf(t, "/usr/bin/nvidia-smi")}
	debian := map[string]string{"amd64": "/usr/lib/x86_64-linux-gnu", "arm64": "/usr/lib/aarch64-linux-gnu"}
	for _, folder := range []string{libraryFolder, debian[runtime.GOARCH]} {
		cuda := sumOf(t, filepath.Join(libraryFolder, "libcuda.so."+driverVersion))
		ml := sumOf(t, filepath.Join(libraryFolder, "libnvidia-ml.so."+driverVersion))
		for _, ending := range []string{"", ".1", "." + driverVersion} {
			want[filepath.Join(folder, "libcuda.so"+ending)] = cuda
		}
		for _, ending := range []string{".1", "." + driverVersion} {
			want[filepath.Join(folder, "libnvidia-ml.so"+ending)] = ml
		}
	}
	if !maps.Equal(got, want) {
		t.Errorf("files below /usr are\n%v\nwant\n%v", got, want)
	}
}

// sumOf returns the sum of a driver's file.
func sumOf(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(driverRoot, path))
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}

// givesVolumeMounts: the container has a file named after each of its GPUs where NVIDIA's runtime
// looks for them.
func givesVolumeMounts(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	const folder = "/var/run/nvidia-container-devices"
	setEnv(ctx, t, n, "DEVICE_LIST_STRATEGY=volume-mounts")
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	runPod(ctx, t, n, "mounts", gpu, 2)

	if got := visibleDevices(ctx, t, n, "mounts"); !slices.Equal(got, []string{folder}) {
		t.Errorf("NVIDIA_VISIBLE_DEVICES is %v, want %s", got, folder)
	}
	got := slices.Sorted(slices.Values(strings.Fields(shell(ctx, t, n, "mounts", "ls "+folder))))
	if want := heldDevices(ctx, t, kubelet, "mounts"); !slices.Equal(got, want) {
		t.Errorf("%s has %v, want a file for each of %v", folder, got, want)
	}
	if got := shell(ctx, t, n, "mounts", "find /dev -name 'nvidia*'"); got != "" {
		t.Errorf("the container has the nodes %v, want none", strings.Fields(got))
	}
}

// givesDeviceNodes: the container has its device nodes by the kubelet's own doing.
func givesDeviceNodes(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	setEnv(ctx, t, n, "DEVICE_LIST_STRATEGY-", "PASS_DEVICE_SPECS=true")
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	runPod(ctx, t, n, "nodes", gpu, 2)

	hasNodes(ctx, t, n, kubelet, "nodes")
	got := slices.Sorted(slices.Values(visibleDevices(ctx, t, n, "nodes")))
	if want := heldDevices(ctx, t, kubelet, "nodes"); !slices.Equal(got, want) {
		t.Errorf("NVIDIA_VISIBLE_DEVICES is %v, want %v", got, want)
	}
}

// checksBeforeStart: a container waits for as long as processes of others compute on the GPU that
// its pod was given. The kubelet learns that it is to ask from another registration.
func checksBeforeStart(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	registersAnew := func(config string) {
		before := registrations(ctx, t, n)
		end := watch(ctx, t, kubelet, gpu, "registered again")
		setConfig(ctx, t, n, config)
		wait(ctx, t, func(ctx context.Context) error {
			if now := registrations(ctx, t, n); now[gpu] == before[gpu] {
				return fmt.Errorf("registrations are %v still", now)
			}
			return nil
		})
		waitAllocatable(ctx, t, kubelet, gpu, gpus, promptly)
		// The daemon leaves the kubelet 50 ms, which 1.36 needs, between one stream and the next.
		if _, longest := end().below(gpus); longest > far*time.Second {
			t.Errorf("below %d for %v, want a second", gpus, longest)
		}
	}
	registersAnew("version: v1\nflags: {plugin: {preStartChecks: clean}}\n")

	for _, g := range simulatedGPUs(ctx, t, n) {
		daemonExec(ctx, t, n, "simulate", "processes", "--gpu", g.UUID, "--count", "1")
	}
	pod := admitPod(ctx, t, n, "waits", gpu, 1, func(pod *corev1.Pod) error {
		for _, status := range pod.Status.ContainerStatuses {
			if w := status.State.Waiting; w != nil && strings.Contains(w.Message, "still in use") {
				return nil
			}
		}
		return fmt.Errorf("the container was not refused: %+v", pod.Status)
	})
	waiting := pod.Status.ContainerStatuses[0].State.Waiting
	held := heldDevices(ctx, t, kubelet, "waits")[0]
	if !strings.Contains(waiting.Message, held) {
		t.Errorf("the pod's status does not name %s: %s", held, waiting.Message)
	}
	explains(ctx, t, n, "waits", "Container main waits for its GPU: ", held, "to get another GPU, delete the pod.")
	daemonExec(ctx, t, n, "simulate", "processes", "--gpu", held, "--count", "0")
	waitPod(ctx, t, n, "waits", isRunning)
	if got := visibleDevices(ctx, t, n, "waits"); !slices.Equal(got, []string{held}) {
		t.Errorf("NVIDIA_VISIBLE_DEVICES is %v, want %s", got, held)
	}
	daemonExec(ctx, t, n, "simulate", "restore")
	registersAnew("version: v1\n") // a pod of the next story that came in that moment would be refused
}

// timeSlices changes the file of the running daemon, so that sixteen containers share each GPU.
func timeSlices(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	const replicas = 16
	setConfig(ctx, t, n, fmt.Sprintf(`version: v1
sharing:
  timeSlicing:
    failRequestsGreaterThanOne: true
    resources:
    - {name: nvidia.com/gpu, replicas: %d}
`, replicas))
	// The two GPUs that a pod holds whole are shared when it has ended, and count as they are for as
	// long.
	const want = (gpus-2)*replicas + 2
	took := waitAllocatable(ctx, t, kubelet, gpu, want, stepLimit)
	waitAllocatables(ctx, t, n, map[string]int{gpu: want})
	t.Logf("%d devices allocatable %v after the ConfigMap changed", want, took.Round(time.Millisecond))

	runPod(ctx, t, n, "shares", gpu, 1)
	held := heldDevices(ctx, t, kubelet, "shares")
	uuid, _, replicated := strings.Cut(held[0], "::")
	if got := visibleDevices(ctx, t, n, "shares"); !replicated || !slices.Equal(got, []string{uuid}) {
		t.Errorf("NVIDIA_VISIBLE_DEVICES is %v, the kubelet gave %v, want the UUID of that replica", got, held)
	}
	createPod(ctx, t, n, "greedy", gpu, 2)
	waitPod(ctx, t, n, "greedy", func(pod *corev1.Pod) error {
		if pod.Status.Phase != corev1.PodFailed || pod.Status.Reason != "UnexpectedAdmissionError" {
			return fmt.Errorf("a pod that asks for two replicas is %s %s, want it refused", pod.Status.Phase, pod.Status.Reason)
		}
		return nil
	})
	explains(ctx, t, n, "greedy", "did not admit it (UnexpectedAdmissionError)", "Request one")
}

// reloads changes the file of the running daemon while pods hold GPUs of a resource that stays and
// of one that goes.
func reloads(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	const (
		batch, dev = "nvidia.com/gpu.batch", "nvidia.com/gpu.dev"
		config     = "version: v1\nselectors:\n- {indices: [6, 7], rename: %s}\n"
	)
	setConfig(ctx, t, n, fmt.Sprintf(config, batch))
	waitAllocatable(ctx, t, kubelet, batch, 2, stepLimit)
	waitAllocatable(ctx, t, kubelet, gpu, gpus-2, stepLimit)
	stays, goes := runPod(ctx, t, n, "stays", gpu, 1), runPod(ctx, t, n, "goes", batch, 1)
	registered := registrations(ctx, t, n)

	start := time.Now()
	end := watch(ctx, t, kubelet, gpu, "reload")
	setConfig(ctx, t, n, fmt.Sprintf(config, dev))
	took := waitAllocatable(ctx, t, kubelet, dev, 1, stepLimit) // the other one is held under its old name
	waitAllocatable(ctx, t, kubelet, batch, 1, stepLimit)
	t.Logf("resource added %v after the ConfigMap changed", took.Round(time.Millisecond))
	waitNode(ctx, t, n, dev, 2, 1, start)
	// The GPU that a pod holds counts for as long, and the other one is listed for a while.
	waitNode(ctx, t, n, batch, 1, 1, start)
	waitPod(ctx, t, n, "goes", isSame(goes))
	deletePod(ctx, t, n, "goes")
	waitNode(ctx, t, n, dev, 2, 2, start)
	waitNode(ctx, t, n, batch, 0, 0, start)
	if lowest, _ := end().below(gpus - 2); lowest < gpus-2 {
		t.Errorf("the kubelet counted %d of the resource that did not change, want never below %d", lowest, gpus-2)
	}
	waitPod(ctx, t, n, "stays", isSame(stays))

	registered[dev] = 1
	if got := registrations(ctx, t, n); !maps.Equal(got, registered) {
		t.Errorf("registrations are %v, want %v: only that of the resource that is new", got, registered)
	}
}

// registrations counts, by resource, how often the daemon has registered with the kubelet since it
// started.
func registrations(ctx context.Context, t *testing.T, n *node.Node) map[string]int {
	t.Helper()
	count := map[string]int{}
	for name, times := range registrationTimes(ctx, t, n) {
		count[name] = len(times)
	}
	return count
}

// registrationTimes returns, by resource, when the daemon has registered with the kubelet since it
// started.
func registrationTimes(ctx context.Context, t *testing.T, n *node.Node) map[string][]time.Time {
	t.Helper()
	times := map[string][]time.Time{}
	for line := range strings.Lines(kubectl(ctx, t, n, "-n", namespace, "logs", "--timestamps",
		theDaemonPod(ctx, t, n).Name)) {
		if !strings.Contains(line, `"Registered"`) {
			continue
		}
		stamp, text, _ := strings.Cut(line, " ")
		_, rest, _ := strings.Cut(text, `resource="`)
		name, _, found := strings.Cut(rest, `"`)
		at, err := time.Parse(time.RFC3339Nano, stamp)
		if !found || err != nil {
			t.Fatalf("the daemon's log does not say what was registered: %s", line)
		}
		times[name] = append(times[name], at)
	}
	return times
}

// mixedA100 is what the simulated node a100-mig-mixed has.
var mixedA100 = map[string]int{
	gpu: 2, "nvidia.com/mig-1g.10gb": 9, "nvidia.com/mig-1g.10gb.me": 1, "nvidia.com/mig-2g.20gb": 2, "nvidia.com/mig-3g.40gb": 4,
	"nvidia.com/mig-4g.40gb": 1, "nvidia.com/mig-7g.80gb": 1, "nvidia.com/mig-1c.3g.40gb": 3,
}

// offersMIG has the daemon run on another machine, and offer its GPUs and its MIG devices by their
// profiles.
func offersMIG(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	const profile = "nvidia.com/mig-3g.40gb"
	setConfig(ctx, t, n, "version: v1\n")
	// Both ways of CDI, as gpu-operator asks for them.
	setEnv(ctx, t, n, "SIMULATE=a100-mig-mixed", "MIG_STRATEGY=mixed", "DEVICE_LIST_STRATEGY=cdi-annotations,cdi-cri")
	for name, count := range mixedA100 {
		waitAllocatable(ctx, t, kubelet, name, count, stepLimit)
	}
	waitAllocatables(ctx, t, n, mixedA100)
	makeNodes(t, driverRoot, simulatedGPUs(ctx, t, n))
	runPod(ctx, t, n, "mig", profile, 1)
	hasNodes(ctx, t, n, kubelet, "mig")
	if held := heldDevices(ctx, t, kubelet, "mig"); len(held) != 1 || !strings.HasPrefix(held[0], "MIG-") {
		t.Errorf("the kubelet gave %v, want one MIG device", held)
	}
}

// waitAllocatables waits until the Node object has these resources of the daemon allocatable, and
// no other.
func waitAllocatables(ctx context.Context, t *testing.T, n *node.Node, want map[string]int) {
	t.Helper()
	wait(ctx, t, func(ctx context.Context) error {
		object, err := n.Client.CoreV1().Nodes().Get(ctx, node.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		got := map[string]int{}
		for name, quantity := range object.Status.Allocatable {
			if strings.HasPrefix(string(name), "nvidia.com/") && !quantity.IsZero() {
				got[string(name)] = int(quantity.Value())
			}
		}
		if !maps.Equal(got, want) {
			return fmt.Errorf("the Node has allocatable %v, want %v", got, want)
		}
		return nil
	})
}
