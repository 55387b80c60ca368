package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

const (
	// driverRoot is where a driver container leaves the driver. The whole of /run is the test node's
	// own.
	driverRoot    = "/run/nvidia/driver"
	driverVersion = "580.95.05" // of the simulated DGX H100
	libraryFolder = "/usr/lib64"
)

// controlNodes are what every container with a GPU is given, beside the nodes of its devices.
var controlNodes = map[string]uint64{
	"/dev/nvidiactl":        unix.Mkdev(195, 255),
	"/dev/nvidia-modeset":   unix.Mkdev(195, 254),
	"/dev/nvidia-uvm":       unix.Mkdev(510, 0),
	"/dev/nvidia-uvm-tools": unix.Mkdev(510, 1),
}

// installDriver puts stand-ins for the driver's files below driverRoot: libraries that are that,
// with sonames, and a program; beside them, a library of another driver version and one that is no
// driver's.
func installDriver(ctx context.Context, t *testing.T) {
	t.Helper()
	for _, l := range []struct{ name, soname string }{
		{"libcuda.so." + driverVersion, "libcuda.so.1"},
		{"libnvidia-ml.so." + driverVersion, "libnvidia-ml.so.1"},
		{"libcuda.so.535.274.02", "libcuda.so.1"},
		{"libstdc++.so.6.0.33", "libstdc++.so.6"},
	} {
		makeLibrary(ctx, t, filepath.Join(driverRoot, libraryFolder, l.name), l.soname)
	}
	program := filepath.Join(driverRoot, "/usr/bin/nvidia-smi")
	makeFolder(t, filepath.Dir(program))
	if err := os.WriteFile(program, []byte("nvidia-smi "+driverVersion), 0o755); err != nil {
		t.Fatal(err)
	}
}

// makeLibrary makes a shared library that says its file's name.
func makeLibrary(ctx context.Context, t *testing.T, path, soname string) {
	t.Helper()
	makeFolder(t, filepath.Dir(path))
	cmd := exec.CommandContext(ctx, "gcc", "-shared", "-nostdlib", "-Wl,-soname,"+soname, "-x", "c", "-o", path, "-")
	cmd.Stdin = strings.NewReader(fmt.Sprintf("const char name[] = %q;", filepath.Base(path)))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("make %s: %v: %s", path, err, out)
	}
}

// makeNodes makes stand-ins for the device nodes of the simulated GPUs below a root, with the
// numbers that the driver gives its own. The whole of /dev is the test node's own, too. Opened,
// they say that there is no such device, or, to those who may not, that this is not permitted.
func makeNodes(t *testing.T, root string, gpus []simulated) {
	t.Helper()
	nodes := map[string]uint64{}
	for path, device := range controlNodes {
		nodes[path] = device
	}
	for _, g := range gpus {
		nodes[g.node()] = unix.Mkdev(195, uint32(g.Minor))
		for _, m := range g.MIG {
			for _, minor := range m.capabilities(g) {
				nodes[capabilityNode(minor)] = unix.Mkdev(234, uint32(minor))
			}
		}
	}
	for path, device := range nodes {
		path = filepath.Join(root, path)
		makeFolder(t, filepath.Dir(path))
		if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(device)); err != nil && !errors.Is(err, unix.EEXIST) {
			t.Fatalf("make device node %s: %v", path, err)
		}
	}
}

// mpsProgram is where the containers that need it find the stand-in for the driver's
// nvidia-cuda-mps-control. In a cluster NVIDIA's runtime brings it to them.
const mpsProgram = "/run/nvidia/toolkit/nvidia-cuda-mps-control"

// installMPS puts it there.
func installMPS(t *testing.T) {
	t.Helper()
	makeFolder(t, filepath.Dir(mpsProgram))
	program, err := os.ReadFile(filepath.Join(filepath.Dir(*imageRoot), "nvidia-cuda-mps-control"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(mpsProgram); err == nil {
		return // it may be running
	}
	if err := os.WriteFile(mpsProgram, program, 0o755); err != nil {
		t.Fatal(err)
	}
}

func makeFolder(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(path, 0o755); err != nil {
		t.Fatal(err)
	}
}

// simulated is a GPU of the daemon's simulated node.
type simulated struct {
	UUID  string         `json:"uuid"`
	Minor int            `json:"minor"`
	MIG   []simulatedMIG `json:"mig"`
}

type simulatedMIG struct {
	UUID string `json:"uuid"`
	GI   int    `json:"gi"`
	CI   int    `json:"ci"`
}

func (g simulated) node() string { return fmt.Sprintf("/dev/nvidia%d", g.Minor) }

// capabilities returns the minors by which the driver gives access to a MIG device's GPU instance
// and compute instance. It keeps 15 instances a GPU, each with one minor of its own and eight for
// compute instances, from 3 on.
func (m simulatedMIG) capabilities(g simulated) []int {
	gi := 3 + (g.Minor*15+m.GI)*9
	return []int{gi, gi + 1 + m.CI}
}

func capabilityNode(minor int) string { return fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor) }

// simulatedGPUs asks the daemon for them.
func simulatedGPUs(ctx context.Context, t *testing.T, n *node.Node) []simulated {
	t.Helper()
	var gpus []simulated
	if err := json.Unmarshal([]byte(daemonExec(ctx, t, n, "simulate", "list", "--output", "json")), &gpus); err != nil {
		t.Fatalf("read the list of simulated GPUs: %v", err)
	}
	return gpus
}

// nodesOf returns, sorted, the device nodes that a container with these GPUs or MIG devices must
// have.
func nodesOf(t *testing.T, gpus []simulated, uuids []string) []string {
	t.Helper()
	var nodes []string
	for path := range controlNodes {
		nodes = append(nodes, path)
	}
	found := 0
	for _, g := range gpus {
		if slices.Contains(uuids, g.UUID) {
			nodes = append(nodes, g.node())
			found++
		}
		for _, m := range g.MIG {
			if !slices.Contains(uuids, m.UUID) {
				continue
			}
			nodes = append(nodes, g.node())
			for _, minor := range m.capabilities(g) {
				nodes = append(nodes, capabilityNode(minor))
			}
			found++
		}
	}
	if found != len(uuids) {
		t.Fatalf("the simulated node lacks some of %v: %+v", uuids, gpus)
	}
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// heldDevices returns, sorted, the IDs of the devices that the kubelet gave the pod.
func heldDevices(
	ctx context.Context, t *testing.T, kubelet podresources.PodResourcesListerClient, pod string,
) []string {
	t.Helper()
	var held []string
	wait(ctx, t, func(ctx context.Context) error {
		answer, err := kubelet.Get(ctx, &podresources.GetPodResourcesRequest{PodNamespace: "default", PodName: pod})
		if err != nil {
			return err // the kubelet answers so many questions a second, and no more
		}
		for _, device := range answer.GetPodResources().GetContainers()[0].GetDevices() {
			held = append(held, device.GetDeviceIds()...)
		}
		return nil
	})
	slices.Sort(held)
	return held
}

// hasNodes checks that the pod's container has exactly the device nodes of what the kubelet gave
// it, that it may open them, and that it may not open the node of a GPU that it was not given, even
// if it makes that itself.
func hasNodes(
	ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient, pod string,
) {
	t.Helper()
	hasNodesOf(ctx, t, n, kubelet, pod, simulatedGPUs(ctx, t, n))
}

// hasNodesOf does the same with GPUs that are known.
func hasNodesOf(
	ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient, pod string, all []simulated,
) {
	t.Helper()
	held := heldDevices(ctx, t, kubelet, pod)
	got := slices.Sorted(slices.Values(strings.Fields(shell(ctx, t, n, pod, "find /dev -name 'nvidia*' ! -type d"))))
	want := nodesOf(t, all, held)
	if !slices.Equal(got, want) {
		t.Errorf("pod %s holds %v and has the nodes %v, want %v", pod, held, got, want)
	}
	const open = "for node in $(find /dev -name 'nvidia*' ! -type d); do (exec 3<>$node) 2>&1; done; true"
	opened := shell(ctx, t, n, pod, open)
	if strings.Contains(opened, "not permitted") {
		t.Errorf("pod %s may not open all of its nodes: %s", pod, opened)
	}
	other := slices.IndexFunc(all, func(g simulated) bool { return !slices.Contains(want, g.node()) })
	opened = shell(ctx, t, n, pod, fmt.Sprintf("rm -f /other; mknod /other c 195 %d && (exec 3<>/other) 2>&1; true",
		all[other].Minor))
	if !strings.Contains(opened, "not permitted") {
		t.Errorf("pod %s may open the node of %s, which it was not given: %s", pod, all[other].UUID, opened)
	}
}
