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
	recoveryTime  = 10 * time.Second // two of the daemon's fast looks, five seconds apart
	holder        = "two"            // the pod that holds two GPUs through all stories
)

// story is one thing that the daemon does on a node where it is running and one pod holds two GPUs.
type story func(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient)

// named is a story with its name.
type named struct {
	name  string
	story story
	long  bool // told in a long run alone
	// newest: it is about the API server and the chart. Kubelet 1.36 has the API server of 1.37 here,
	// so that it is told there in a long run alone.
	newest bool
	lacks  string // why the story cannot be told on Kubernetes 1.34 and 1.35
	old    bool   // told on Kubernetes 1.34 and 1.35 alone
}

// TestDaemon has the stories of the daemon, its kubelet and its configuration.
func TestDaemon(t *testing.T) {
	ctx, n := startNode(t)
	// A node without a driver, on which nobody serves GPUs, stops no roll-out.
	start := time.Now()
	apply(ctx, t, n, "no-driver")
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	phase("no driver: daemon Ready", start)

	tell(ctx, t, n, []named{
		{name: "a container sees its GPUs", story: seesItsGPUs},
		{name: "doctor sees the node", story: doctorSeesTheNode},
		{name: "commands of the documents", story: commandsOfDocuments},
		{name: "a pod that asks for nine stays Pending", story: nineStaysPending},
		{name: "kubelet restarts", story: kubeletRestarts},
		{name: "rolling upgrade", story: rollingUpgrade},
		{name: "the node restarts", story: nodeRestarts, long: true},
		{name: "daemon killed", story: daemonKilled},
		{name: "another server comes and goes", story: anotherServer},
		{name: "upgrades that switch time-slicing", story: upgradesThatShare},
		{name: "an XID makes a GPU Unhealthy until it is repaired", story: xidMakesUnhealthy},
		{name: "daemon ended", story: daemonEnded},
		{name: "changed to another driver root", story: changedDriverRoot},
		{name: "CDI", story: givesCDI},
		{name: "volume mounts", story: givesVolumeMounts},
		{name: "device nodes", story: givesDeviceNodes},
		{name: "checks before a container starts", story: checksBeforeStart},
		{name: "reloads that switch time-slicing", story: reloadsThatShare, long: true},
		{name: "held GPUs while kubelet restarts", story: heldThroughRestarts},
		{name: "time-slicing", story: timeSlices},
		{name: "one form at a time", story: oneFormAtATime},
		{name: "a reload adds and removes a resource", story: reloads},
		{name: "MIG devices of several profiles", story: offersMIG},
	})
}

// TestCluster has the stories of what installs the daemon, and of what the cluster knows of it and
// has it do.
func TestCluster(t *testing.T) {
	ctx, n := startNode(t)
	tell(ctx, t, n, []named{
		{name: "upgrade to a broken version", story: brokenVersion},
		{name: "under the GPU operator", story: underTheOperator},
		{name: "under an earlier GPU operator", story: underAnEarlierOperator, long: true},
		{name: "an example of NVIDIA's chart", story: oneExampleOfNVIDIAsChart, newest: true},
		{name: "another plugin comes and goes", story: otherPlugin},
		{name: "in the cluster", story: inTheCluster, newest: true},
		{name: "upgrades that take devices away without the taint", story: takenAwayUntainted, long: true},
		{name: "MIG layouts by label", story: dividedByLabel, newest: true},
		{name: "policies for pods", story: policiesOfUnits, lacks: noMutatingPolicies},
		{name: "parts of GPUs", story: partsOfGPUs, long: true},
		{name: "parts of GPUs come and go", story: partsComeAndGo, long: true},
		{name: "parts of GPUs by MPS", story: partsByMPS, long: true},
		{name: "NVIDIA's chart and back while pods come and go", story: takesOverUnderLoad, long: true},
		{name: "beside the GPU operator", story: besideTheOperator, long: true},
		{name: "all examples of NVIDIA's chart", story: allExamplesOfNVIDIAsChart, long: true},
	})
}

// TestClaims has the stories of claims for GPUs, and those of Helm for which TestCluster, which
// runs beside it, has no time. The kubelet syncs a pod as rarely as it does by default.
func TestClaims(t *testing.T) {
	ctx, n := startNode(t)
	if err := n.SetKubelet("syncFrequency", "1m"); err != nil {
		t.Fatal(err)
	}
	restartKubelet(ctx, t, n)
	tell(ctx, t, n, []named{
		{name: "claims", story: givesClaims},
		{name: "claims where gates are off", story: claimsWithGatesOff, old: true},
		{name: "no MIG devices for claims where gates are off", story: noPartitionsWithGatesOff, old: true},
		{name: "claims by Helm", story: claimsByHelm},
		{name: "installed by Helm", story: installedByHelm, newest: true},
		{name: "from another plugin and back by Helm", story: takesOverByHelm},
		{name: "upgrades that take devices away", story: takenAway},
		{name: "without NVIDIA's runtime", story: withoutTheRuntime, long: true},
		{name: "claims by an older API", story: claimsByOlderAPI, long: true},
		{name: "claims in shares", story: claimsInShares, long: true, lacks: gateOff("DRAConsumableCapacity")},
		{name: "claims of pods deleted by force", story: deletedByForce, long: true},
		{name: "claims without API server", story: claimsWithoutAPIServer, long: true},
		{name: "MIG devices made for claims", story: madeForClaims, long: true, lacks: gateOff("DRAPartitionableDevices")},
		{name: "a GPU as a whole or in parts", story: wholeOrInParts, long: true, lacks: gateOff("DRAPartitionableDevices")},
		{name: "pace of claims", story: paceOfClaims, long: true},
	})
}

// tell runs stories, one after the other.
func tell(ctx context.Context, t *testing.T, n *node.Node, stories []named) {
	t.Helper()
	kubelet := podResources(t)
	start := time.Now()
	apply(ctx, t, n, "overlay")
	waitNode(ctx, t, n, gpu, gpus, gpus, start)
	phase("manifests applied to capacity 8", start)

	start = time.Now()
	runPod(ctx, t, n, holder, gpu, 2)
	phase("pod with two GPUs runs", start)

	for _, s := range stories {
		if (s.long || s.newest && isKubelet("1.36")) && !*long || s.old && !isOld() {
			continue
		}
		start := time.Now()
		ok := t.Run(s.name, func(t *testing.T) {
			if s.lacks != "" && isOld() {
				t.Skip(s.lacks)
			}
			s.story(ctx, t, n, kubelet)
		})
		if !ok {
			break // The next story would begin on a node in an unknown state.
		}
		phase(s.name, start)
	}
}

// apply applies the manifests as one of the overlays in testdata has them.
func apply(ctx context.Context, t *testing.T, n *node.Node, overlay string) {
	t.Helper()
	kubectl(ctx, t, n, "apply", "--validate=strict", "--kustomize", filepath.Join(*source, "test/e2e/testdata", overlay))
}

// explain logs what the node can say about a failure.
func explain(t *testing.T, n *node.Node) {
	// The test's context has ended by now.
	ctx, cancel := context.WithTimeout(context.Background(), stepLimit)
	defer cancel()
	t.Logf("processes that have ended: %v", n.Ended())
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
	waitUnschedulable(ctx, t, n, "nine")
	explains(ctx, t, n, "nine", "No node has 9 "+gpu+" free; nearest is node "+node.Name)
	deletePod(ctx, t, n, "nine")
	explainsTaint(ctx, t, n)
	explainsQuota(ctx, t, n)
	explainsImage(ctx, t, n)
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
		whole := waitAllocatable(ctx, t, kubelet, gpu, gpus, promptly)
		waitNode(ctx, t, n, gpu, gpus, gpus, start)
		t.Logf("restart %2d: kubelet up after %v, all GPUs %v later, in the Node object after %v", i+1,
			up.Round(time.Millisecond), whole.Round(time.Millisecond), time.Since(start).Round(time.Millisecond))
	}
	waitPod(ctx, t, n, holder, isSame(before))
}

// rollingUpgrade replaces the daemon's pod three times, the new one starting before the old one
// ends. On 1.37 the kubelet counts all GPUs throughout. An older kubelet takes the end of the old
// daemon's stream for that of the new one, unless the old one has it forget the new one before: on
// a machine that is too busy for that, once.
func rollingUpgrade(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	const wanted = time.Second // before 1.37
	const upgrades, mayFall = 3, 1
	fallen := 0
	// A pod that has not been Ready for minReadySeconds does not count: a roll-out ends it at once.
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	for i := range upgrades {
		end := watch(ctx, t, kubelet, gpu, fmt.Sprintf("upgrade %d", i+1))
		patch := fmt.Sprintf(`{"spec":{"template":{"metadata":{"annotations":{"e2e/upgrade":"%d"}}}}}`, i+1)
		kubectl(ctx, t, n, "-n", namespace, "patch", "daemonset", daemonSet, "--patch", patch)
		wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
		waitAllocatable(ctx, t, kubelet, gpu, gpus, promptly)
		seen := end()
		lowest, longest := seen.below(gpus)
		if lowest < gpus {
			fallen++
		}
		switch {
		case longest > far*wanted:
			t.Errorf("upgrade %d: below %d for %v, want %v", i+1, gpus, longest, wanted)
		case lowest < gpus && isKubelet("1.37"):
			// The old one is ended five seconds after the new one's container has started, come what may.
			fell, registered := seen.fell(gpus), registrationTimes(ctx, t, n)[gpu]
			if len(registered) == 0 || fell.After(registered[0]) {
				t.Errorf("upgrade %d: the kubelet counted %d with the new daemon registered, want never below %d", i+1, lowest,
					gpus)
			} else {
				t.Logf("upgrade %d: this machine took %v too long to start the daemon", i+1, registered[0].Sub(fell))
			}
		}
		runPod(ctx, t, n, fmt.Sprintf("after-upgrade-%d", i+1), gpu, 1)
	}
	if !isKubelet("1.37") && fallen > mayFall {
		t.Errorf("the kubelet counted less than %d in %d of %d upgrades, want %d at most", gpus, fallen, upgrades, mayFall)
	}
}

// rolledOut asks whether the only pod of the DaemonSet is one of its newest revision.
func rolledOut(ctx context.Context, n *node.Node) error {
	if err := setRolledOut(ctx, n); err != nil {
		return err
	}
	_, err := daemonPod(ctx, n)
	return err
}

// setRolledOut asks whether the DaemonSet is rolled out. Others may have pods in its namespace.
func setRolledOut(ctx context.Context, n *node.Node) error {
	set, err := n.Client.AppsV1().DaemonSets(namespace).Get(ctx, daemonSet, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if s := set.Status; s.ObservedGeneration != set.Generation || s.UpdatedNumberScheduled != 1 || s.NumberAvailable != 1 {
		return fmt.Errorf("the DaemonSet is not rolled out: %+v", s)
	}
	return nil
}

// daemonPod returns the pod of the daemon's DaemonSet, which must be the only one.
func daemonPod(ctx context.Context, n *node.Node) (*corev1.Pod, error) {
	return setPod(ctx, n, namespace, daemonSet)
}

// theDaemonPod is daemonPod for when there is no upgrade going on.
func theDaemonPod(ctx context.Context, t *testing.T, n *node.Node) *corev1.Pod {
	t.Helper()
	var pod *corev1.Pod
	wait(ctx, t, func(ctx context.Context) (err error) {
		pod, err = daemonPod(ctx, n)
		return err
	})
	return pod
}

func xidMakesUnhealthy(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	uuid := visibleDevices(ctx, t, n, holder)[0]
	before := waitPod(ctx, t, n, holder, isRunning)
	start := time.Now()
	// A double-bit ECC error, which a reset repairs.
	daemonExec(ctx, t, n, "simulate", "xid", "--gpu", uuid, "--xid", "48")
	waitAllocatable(ctx, t, kubelet, gpu, gpus-1, promptly)
	waitNode(ctx, t, n, gpu, gpus, gpus-1, start)
	waitHealth(ctx, t, n, uuid, corev1.ResourceHealthStatusUnhealthy)
	says := "has lost " + uuid
	if isOld() { // the daemon knows it, and the pod's status does not
		says = "has " + uuid + ", which is not healthy"
	}
	explains(ctx, t, n, holder, says, "delete it to get another GPU")

	start = time.Now()
	daemonExec(ctx, t, n, "simulate", "restore", "--gpu", uuid)
	took := waitAllocatable(ctx, t, kubelet, gpu, gpus, far*recoveryTime)
	waitNode(ctx, t, n, gpu, gpus, gpus, start)
	waitHealth(ctx, t, n, uuid, corev1.ResourceHealthStatusHealthy)
	waitPod(ctx, t, n, holder, isSame(before))
	t.Logf("all GPUs allocatable %v after the repair, %v wanted", took.Round(time.Millisecond), recoveryTime)
}

// waitHealth waits until the status of the pod that holds two GPUs says so of one of them. On
// Kubernetes 1.34 and 1.35 the gate ResourceHealthStatus is off.
func waitHealth(ctx context.Context, t *testing.T, n *node.Node, uuid string, health corev1.ResourceHealthStatus) {
	t.Helper()
	if isOld() {
		t.Log(gateOff("ResourceHealthStatus"))
		return
	}
	waitPod(ctx, t, n, holder, hasHealth(uuid, health))
}

// daemonExec runs the daemon's program in the daemon's container, and returns what it wrote to its
// output.
func daemonExec(ctx context.Context, t *testing.T, n *node.Node, args ...string) string {
	t.Helper()
	args = append([]string{"-n", namespace, "exec", theDaemonPod(ctx, t, n).Name, "--", "gpu-device-plugin"}, args...)
	return kubectl(ctx, t, n, args...)
}

func daemonKilled(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	end := watch(ctx, t, kubelet, gpu, "daemon killed")
	killDaemon(ctx, t, n)
	waitAllocatable(ctx, t, kubelet, gpu, gpus, promptly)
	end()
	waitNode(ctx, t, n, gpu, gpus, gpus, time.Now())
}

func daemonEnded(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	// A starting kubelet removes every socket, that of the daemon that was killed among them.
	n.StopKubelet()
	if err := n.StartKubelet(ctx); err != nil {
		t.Fatal(err)
	}
	waitAllocatable(ctx, t, kubelet, gpu, gpus, promptly)

	const other = "other-vendor.sock"
	listener, err := net.Listen("unix", filepath.Join(pluginSockets, other))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	var own string
	wait(ctx, t, func(context.Context) error {
		got := slices.DeleteFunc(sockets(t), func(name string) bool { return name == other || name == "kubelet.sock" })
		if len(got) != 1 {
			return fmt.Errorf("sockets beside kubelet.sock and %s are %v, want the daemon's", other, got)
		}
		own = got[0]
		return nil
	})

	const wanted = 2 * time.Second
	pid := daemonProcess(t)
	start := time.Now()
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithTimeout(ctx, far*wanted)
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
	t.Logf("daemon ended %v after SIGTERM, %v wanted", time.Since(start).Round(time.Millisecond), wanted)
	// Its container is started again ten seconds later, as it was once before, and has another socket
	// then.
	got := sockets(t)
	if slices.Contains(got, own) || !slices.Contains(got, other) || !slices.Contains(got, "kubelet.sock") {
		t.Errorf("sockets left are %v, want kubelet.sock and %s, and no %s", got, other, own)
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

// daemonProcess returns the daemon's process ID as seen here, where all of the node's processes are
// seen.
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
		if target, err := os.Readlink(link); err == nil && isDaemon(filepath.Base(target)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// isDaemon says whether a program is one of the daemon's two.
func isDaemon(name string) bool { return name == "gpu-device-plugin" || name == "gpu-node-agent" }
