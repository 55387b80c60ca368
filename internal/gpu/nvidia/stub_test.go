package nvidia_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/driverroot"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
)

// A library can be loaded once in a process, so every test with a compiled one runs in a process of
// its own: this test binary again, told by these variables what to do.
const (
	stubRoot = "NVIDIA_TEST_STUB_ROOT" // the driver root
	stubPart = "NVIDIA_TEST_STUB_PART" // a key of stubParts
)

// stubParts are what runs in such a process.
var stubParts = map[string]func(t *testing.T, d *nvidia.Driver, root string){
	"old driver":         oldDriver,
	"lacks one function": lacksOne,
	"R418":               r418,
	"lost GPU":           lostGPU,
	"fabric 2": func(t *testing.T, d *nvidia.Driver,
		_ string) {
		newerDriver(t, d, inventory.FabricSummaryUnknown)
	},
	"fabric 3": func(t *testing.T, d *nvidia.Driver,
		_ string) {
		newerDriver(t, d, inventory.FabricSummaryUnhealthy)
	},
	"missing function": missingFunction,
	"replaced library": replacedLibrary,
	"bindings":         bindingsOfLibrary,
	"loader's library": loadersLibrary,
	"lengths":          lengths,
	"many processes":   manyProcesses,
}

// stubSysfs is what the kernel of the stub's node shows: no NUMA node of GPU 2.
var stubSysfs = fstest.MapFS{
	"sys/bus/pci/devices/0000:07:00.0/numa_node": {Data: []byte("3\n")},
	"sys/bus/pci/devices/0000:0f:00.0/numa_node": {Data: []byte("-1\n")},
	"sys/bus/pci/devices/0000:07:00.0/class":     {Data: []byte("0x030200\n")},
	"sys/bus/pci/devices/0000:0f:00.0/class":     {Data: []byte("0x030200\n")},
	"sys/bus/pci/devices/0000:c4:00.0/class":     {Data: []byte("0x068000\n")},
}

// TestStubProcess is the other process.
func TestStubProcess(t *testing.T) {
	part, ok := stubParts[os.Getenv(stubPart)]
	if !ok {
		t.Skip("runs in a process that another test starts")
	}
	root := os.Getenv(stubRoot)
	part(t, nvidia.New(nvidia.Options{DriverRoot: root, Root: stubSysfs}), root)
}

// runStub compiles the library of an old driver into a driver root and runs a part with it. It
// returns the output and the exit code.
func runStub(t *testing.T, part string, flags ...string) (string, int) {
	t.Helper()
	return runStubWith(t, part, nil, flags...)
}

// runStubWith is runStub with more variables in the environment of the part.
func runStubWith(t *testing.T, part string, env []string, flags ...string) (string, int) {
	t.Helper()
	root := t.TempDir()
	compileStub(t, root, flags...)
	c := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestStubProcess$", "-test.v", "-test.timeout=4m",
		"-test.gocoverdir="+flag.Lookup("test.gocoverdir").Value.String())
	c.Env = append(append(os.Environ(), stubRoot+"="+root, stubPart+"="+part), env...)
	out, err := c.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("start the test binary again: %v", err)
	}
	return string(out), c.ProcessState.ExitCode()
}

// stubPath returns where compileStub puts the library.
func stubPath(root string) string {
	return filepath.Join(root, "usr", "lib64", driverroot.NVML[:len(driverroot.NVML)-1]+"450.80.02")
}

// compileStub puts the library where a distribution would.
func compileStub(t *testing.T, root string, flags ...string) {
	t.Helper()
	folder := filepath.Join(root, "usr", "lib64")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	versioned := driverroot.NVML[:len(driverroot.NVML)-1] + "450.80.02"
	flags = append(flags, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", filepath.Join(folder, versioned),
		filepath.Join("testdata", "r450.c"))
	out, err := exec.CommandContext(t.Context(), "gcc", flags...).CombinedOutput()
	if err != nil {
		t.Fatalf("this test needs gcc and the C library's headers to compile a library: install them (%v)\n%s", err,
			out)
	}
	if err := os.Symlink(versioned, filepath.Join(folder, driverroot.NVML)); err != nil &&
		!errors.Is(err, os.ErrExist) {
		t.Fatal(err)
	}
}

func TestOldDriver(t *testing.T) {
	t.Parallel()
	if out, code := runStub(t, "old driver"); code != 0 || !strings.Contains(out, "--- PASS: TestStubProcess") {
		t.Fatalf("the process with the old library exited with %d:\n%s", code, out)
	}
}

func TestOldDriverWithLostGPU(t *testing.T) {
	t.Parallel()
	if out, code := runStub(t, "lost GPU", "-DLOST=1"); code != 0 ||
		!strings.Contains(out, "--- PASS: TestStubProcess") {
		t.Fatalf("the process with the old library exited with %d:\n%s", code, out)
	}
}

func TestNewerDrivers(t *testing.T) {
	t.Parallel()
	for _, test := range [][]string{{"2"}, {"3"}, {"2", "-DREFUSES=INVALID_ARGUMENT"}} {
		version := test[0]
		t.Run(strings.Join(test, " "), func(t *testing.T) {
			t.Parallel()
			out, code := runStub(t, "fabric "+version, append(test[1:], "-DFABRIC="+version)...)
			if code != 0 || !strings.Contains(out, "--- PASS: TestStubProcess") {
				t.Fatalf("the process with the newer library exited with %d:\n%s", code, out)
			}
		})
	}
}

// TestMissingFunctionKills shows that the two tests above can fail: a function that the library
// lacks ends the process.
func TestMissingFunctionKills(t *testing.T) {
	t.Parallel()
	if out, code := runStub(t, "missing function"); code != 127 || !strings.Contains(out, "nvmlDeviceGetNumaNodeId") {
		t.Fatalf("the process exited with %d, want 127:\n%s", code, out)
	}
}

// stubUUID returns the UUID of a GPU of the stub.
func stubUUID(gpu int) string {
	d := func(n int) string { return strings.Repeat(fmt.Sprint(gpu), n) }
	return "GPU-" + strings.Join([]string{d(8), d(4), d(4), d(4), d(12)}, "-")
}

// stubSnapshot is what the stub's node has.
func stubSnapshot() inventory.Snapshot {
	gpu := func(index, minor int, bdf string, node int, links ...inventory.Link) inventory.GPU {
		return inventory.GPU{
			UUID: stubUUID(index), Index: index, Minor: minor, BDF: bdf, Model: "A100-SXM4-40GB", MemoryBytes: 40 << 30,
			Brand: "Tesla", Architecture: "ampere", ComputeCapability: inventory.ComputeCapability{Major: 8},
			NUMANode: node,
			MIG:      inventory.MIGDisabled, Links: links,
		}
	}
	direct := func(peer int) inventory.Link {
		return inventory.Link{
			Peer: stubUUID(peer), PeerIndex: peer, NVLinks: 4, NVLinkVersion: 3, PCIe: inventory.PCIeMultiple,
		}
	}
	switched := func(peer int) inventory.Link {
		return inventory.Link{
			Peer: stubUUID(peer), PeerIndex: peer, NVLinks: 2, NVLinkVersion: 3, Switched: true,
			PCIe: inventory.PCIeSystem,
		}
	}
	pcie := func(peer int) inventory.Link {
		return inventory.Link{Peer: stubUUID(peer), PeerIndex: peer, PCIe: inventory.PCIeSystem}
	}
	mig := func(index, gi, slices int, profile string) inventory.MIGDevice {
		return inventory.MIGDevice{
			UUID: fmt.Sprintf("MIG-%s/%d/0", stubUUID(1), gi), Index: index, GI: gi, Profile: profile,
			MemoryBytes: 20096 << 20,
			Attributes:  inventory.MIGAttributes{GISlices: 3, CISlices: slices},
			Placement:   inventory.MIGPlacement{Profile: 9, Start: 4 * (gi - 1), Size: 4},
		}
	}
	s := inventory.Snapshot{
		Driver: inventory.Driver{Version: "450.80.02", CUDA: "11.0"},
		GPUs: []inventory.GPU{
			gpu(0, 0, "0000:07:00.0", 3, direct(1), switched(2)),
			gpu(1, 1, "0000:0f:00.0", inventory.NoNUMANode, direct(0), pcie(2)),
			gpu(2, 7, "0000:47:00.0", inventory.NoNUMANode, switched(0), pcie(1)),
		},
	}
	s.GPUs[0].Class, s.GPUs[1].Class = "0x030200", "0x030200" // sysfs has no more
	s.GPUs[1].MIG = inventory.MIGEnabled
	s.GPUs[1].MIGDevices = []inventory.MIGDevice{mig(0, 1, 3, "3g.20gb"), mig(3, 2, 1, "1c.3g.20gb")}
	return s
}

// oldDriver does with a library of an old driver all that the daemon does.
func oldDriver(t *testing.T, d *nvidia.Driver, _ string) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for range 2 { // sessions
		s, err := d.Open(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := d.Open(ctx); err == nil || !strings.Contains(err.Error(), "a session is already open") {
			t.Errorf("a second session at a time: got error %v", err)
		}
		if unwatched := s.Unwatched(); len(unwatched) > 0 {
			t.Errorf("GPUs without events: %v", unwatched)
		}
		snapshot, err := s.Scan(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(stubSnapshot(), snapshot, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("Scan (-want +got):\n%s", diff)
		}
		reading, err := s.Read(ctx, stubUUID(0))
		if err != nil {
			t.Fatal(err)
		}
		want := inventory.Reading{
			RowRemapPending: inventory.Known(true), RowRemapFailure: inventory.Known(false),
			UncorrectedECC: inventory.Known(uint64(5)),
			Report: inventory.Report{
				PCIeReplays: inventory.Known(7), Clocks: inventory.Known(inventory.ClockReasons(4)),
				NVLinks: inventory.Known(inventory.NVLinks{Active: 0x3f, Inactive: 0xfc0}),
			},
		}
		if diff := cmp.Diff(want, reading); diff != "" {
			t.Errorf("Read (-want +got):\n%s", diff)
		}
		if err := s.Close(ctx); err != nil {
			t.Fatal(err)
		}
	}
	s, err := d.Open(ctx)
	if err != nil {
		t.Fatal(err)
	}
	event, err := s.Next(ctx)
	if err != nil {
		t.Fatal(err)
	}
	want := inventory.Event{Kind: inventory.EventXID, UUID: stubUUID(1), XID: 43, GI: 2, CI: inventory.Unattributed}
	if diff := cmp.Diff(want, event); diff != "" {
		t.Errorf("Next (-want +got):\n%s", diff)
	}
	if err := s.Close(ctx); err != nil {
		t.Fatal(err)
	}
	useOldDriver(t, d)
}

// useOldDriver does with the library of an old driver what is done before containers start.
func useOldDriver(t *testing.T, d *nvidia.Driver) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	s, err := d.Open(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Scan(ctx); err != nil {
		t.Fatal(err)
	}
	processes, err := s.Processes(ctx, stubUUID(0))
	if err != nil {
		t.Fatal(err)
	}
	want := []inventory.Process{{PID: 4711, MemoryBytes: inventory.Known(uint64(1 << 20))}, {PID: 4712}}
	if diff := cmp.Diff(want, processes); diff != "" {
		t.Errorf("Processes (-want +got):\n%s", diff)
	}
	if err := s.Clean(ctx, stubUUID(0), inventory.RemnantClocks); !errors.Is(err, nvml.ERROR_NO_PERMISSION) ||
		!strings.Contains(err.Error(), "SYS_ADMIN") {
		t.Errorf("Clean clocks: got error %v", err)
	}
	if err := s.Clean(ctx, stubUUID(0), inventory.RemnantECC); err != nil {
		t.Errorf("Clean ECC: got error %v", err)
	}
	reading, err := s.Read(ctx, stubUUID(0))
	if err != nil {
		t.Fatal(err)
	}
	compare(t, "errors after they were cleared", inventory.Known(uint64(0)), reading.UncorrectedECC)
	if err := s.Close(ctx); err != nil {
		t.Fatal(err)
	}
}

// lostGPU looks at the stub's node with GPU 1 lost from the start.
func lostGPU(t *testing.T, d *nvidia.Driver, _ string) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	s, err := d.Open(ctx)
	if err != nil {
		t.Fatal(err)
	}
	snapshot, err := s.Scan(ctx)
	if err != nil {
		t.Fatal(err)
	}
	want := stubSnapshot()
	want.GPUs = append(want.GPUs[:1], want.GPUs[2])
	want.GPUs[0].Links = want.GPUs[0].Links[1:] // the lanes to a GPU that nobody knows are nobody's
	want.GPUs[1].Links = want.GPUs[1].Links[:1]
	want.LeftOut = []inventory.LeftOut{
		{Index: 1, Reason: "the GPU cannot be identified: nvmlDeviceGetHandleByIndex: GPU is lost", Retry: true},
	}
	if diff := cmp.Diff(want, snapshot, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("Scan (-want +got):\n%s", diff)
	}
	unwatched := []inventory.LeftOut{{Index: 1, Reason: "nvmlDeviceGetHandleByIndex: GPU is lost"}}
	if diff := cmp.Diff(unwatched, s.Unwatched()); diff != "" {
		t.Errorf("Unwatched (-want +got):\n%s", diff)
	}
	if err := s.Close(ctx); err != nil {
		t.Fatal(err)
	}
}

// newerDriver does what a library of an old driver cannot.
func newerDriver(t *testing.T, d *nvidia.Driver, summary inventory.FabricSummary) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	s, err := d.Open(ctx)
	if err != nil {
		t.Fatal(err)
	}
	snapshot, err := s.Scan(ctx)
	if err != nil {
		t.Fatal(err)
	}
	// The library says that each GPU is on node 4, which is the node of the GPU's memory; sysfs knows
	// nothing of GPU 2.
	nodes := each(snapshot, func(g inventory.GPU) int { return g.NUMANode })
	compare(t, "NUMA nodes", []int{3, inventory.NoNUMANode, inventory.NoNUMANode}, nodes)
	reading, err := s.Read(ctx, stubUUID(0))
	if err != nil {
		t.Fatal(err)
	}
	compare(t, "unrepairable memory", inventory.Known(true), reading.UnrepairableMemory)
	compare(t, "fabric", inventory.Known(inventory.Fabric{
		State: inventory.FabricCompleted, Faults: inventory.FabricRouteUnhealthy, Summary: summary,
	}), reading.Fabric)
	for gpu, want := range map[int]inventory.FabricFault{
		1: inventory.FabricDegradedBandwidth | inventory.FabricNoPartition | inventory.FabricManagerDisconnected,
		2: inventory.FabricDegradedBandwidth | inventory.FabricRouteRecovery | inventory.FabricRouteUnhealthy |
			inventory.FabricAccessTimeout | inventory.FabricInvalidGPU | inventory.FabricUnassigned,
	} {
		if reading, err := s.Read(ctx, stubUUID(gpu)); err != nil || reading.Fabric.Value.Faults != want {
			t.Errorf("faults of GPU %d: %#b, %v, want %#b", gpu, reading.Fabric.Value.Faults, err, want)
		}
	}
	compare(t, "clique", "01020304-0506-0708-090a-0b0c0d0e0f10.7", snapshot.GPUs[0].Clique)
	if err := s.Clean(ctx, stubUUID(0), inventory.RemnantClocks); !errors.Is(err, inventory.ErrNotSupported) {
		t.Errorf("Clean clocks with a driver that has none: got error %v", err)
	}
	if err := s.Close(ctx); err != nil {
		t.Fatal(err)
	}
}

// missingFunction calls what the library lacks.
func missingFunction(t *testing.T, _ *nvidia.Driver, root string) {
	path := stubPath(root)
	lib := nvml.New(nvml.WithLibraryPath(path))
	if ret := lib.Init(); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	device, ret := lib.DeviceGetHandleByIndex(0)
	if ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	device.GetNumaNodeId()
	t.Error("the process survived")
}
