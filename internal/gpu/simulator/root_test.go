package simulator_test

import (
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// bound lists the GPUs that the driver has, by PCI address.
func bound(t *testing.T, n *simulator.Node) []string {
	t.Helper()
	entries, err := fs.ReadDir(n.Root(), "proc/driver/nvidia/gpus")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// checkBoundGPUs checks that the files tell of the same GPUs as the profile.
func checkBoundGPUs(t *testing.T, n *simulator.Node) {
	t.Helper()
	var want []string
	for _, g := range n.List() {
		want = append(want, g.BDF)
	}
	if diff := cmp.Diff(want, bound(t, n)); diff != "" {
		t.Errorf("proc/driver/nvidia/gpus (-want +got):\n%s", diff)
	}
}

// read returns a file's text without the line's end; "" if there is none.
func read(t *testing.T, n *simulator.Node, name string) string {
	t.Helper()
	b, err := fs.ReadFile(n.Root(), name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func TestRoot(t *testing.T) {
	n, _ := start(t, "h100-mig-1g")
	err := fstest.TestFS(n.Root(),
		"proc/driver/nvidia/version", "proc/sys/kernel/random/boot_id", "sys/module/nvidia/version", "dev/nvidiactl",
		"dev/nvidia7",
		"proc/driver/nvidia/capabilities/gpu0/mig/gi7/ci0/access", "dev/nvidia-caps/nvidia-cap1")
	if err != nil {
		t.Error(err)
	}
	for name, want := range map[string]string{
		"sys/bus/pci/devices/0000:9d:00.0/numa_node":    "1",
		"sys/bus/pci/drivers/nvidia/0000:9d:00.0/class": "0x030200",
		"sys/bus/pci/devices/0000:07:00.0/class":        "0x068000",
		"sys/bus/pci/devices/0000:9d:00.0/device":       "0x2330",
		"sys/bus/pci/devices/0000:9d:00.0/vendor":       "0x10de",
		"sys/module/nvidia/version":                     "580.95.05",
		"proc/driver/nvidia/capabilities/mig/monitor":   "DeviceFileMinor: 2\nDeviceFileMode: 292\nDeviceFileModify: 1",
	} {
		if got := read(t, n, name); got != want {
			t.Errorf("%s: got %q, want %q", name, got, want)
		}
	}
	minors := read(t, n, "proc/driver/nvidia-caps/mig-minors")
	for _, line := range []string{"config 1", "monitor 2", "gpu0/gi0/access 3", "gpu0/gi7/ci0/access 67",
		"gpu1/gi0/access 138"} {
		if !strings.Contains(minors, line+"\n") {
			t.Errorf("mig-minors has no line %q", line)
		}
	}
	if info, err := fs.Stat(n.Root(), "dev/nvidia-caps/nvidia-cap67"); err != nil ||
		info.Mode()&fs.ModeCharDevice == 0 {
		t.Errorf("the node of GI 7, CI 0 of GPU 0: %v, %v", info, err)
	}
}

func TestRootFollowsTheNode(t *testing.T) {
	n, _ := start(t, "l40s-x8")
	inject := func(f simulator.Fault) {
		t.Helper()
		if err := n.Inject(f); err != nil {
			t.Fatal(err)
		}
	}
	before, boot := bound(t, n), read(t, n, "proc/sys/kernel/random/boot_id")
	inject(simulator.Fault{Kind: simulator.KindRemove, GPU: "0"})
	if diff := cmp.Diff(before[1:], bound(t, n)); diff != "" {
		t.Errorf("after GPU 0 was removed (-want +got):\n%s", diff)
	}
	inject(simulator.Fault{Kind: simulator.KindAdd, GPU: "0"})
	if diff := cmp.Diff(before, bound(t, n)); diff != "" {
		t.Errorf("after it was added (-want +got):\n%s", diff)
	}
	inject(simulator.Fault{Kind: simulator.KindReboot})
	if again := read(t, n, "proc/sys/kernel/random/boot_id"); again == boot || again == "" {
		t.Errorf("the boot ID was %q and is %q after a reboot", boot, again)
	}
	inject(simulator.Fault{Kind: simulator.KindDriver, Driver: "missing"})
	if got := read(t, n, "sys/module/nvidia/version"); got != "" {
		t.Errorf("a module that is not loaded has the version %s", got)
	}
	if got := read(t, n, "sys/bus/pci/devices/0000:27:00.0/numa_node"); got != "0" {
		t.Errorf("without driver the PCI device has the NUMA node %q", got)
	}
}
