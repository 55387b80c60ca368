package nvidia_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

func TestOpenErrors(t *testing.T) {
	t.Parallel()
	fail := func(call, ret string) simulator.Fault {
		return simulator.Fault{Kind: simulator.KindFail, Call: call, Return: ret}
	}
	for name, test := range map[string]struct {
		fault simulator.Fault
		kind  error
		text  string // part of the sentence
	}{
		"no library": {
			simulator.Fault{Kind: simulator.KindDriver, Driver: "no-library"}, inventory.ErrNoDriver,
			"libnvidia-ml.so.1 is neither below the driver root /driver-root nor where the loader looks: install the " +
				"driver",
		},
		"no kernel module": {
			simulator.Fault{Kind: simulator.KindDriver, Driver: "missing"}, inventory.ErrNoDriver,
			"the kernel module is not loaded",
		},
		"other kernel module": {
			fail("Init", "LIB_RM_VERSION_MISMATCH"), inventory.ErrDriverMismatch,
			"the versions of the kernel module and the library differ: restart the node",
		},
		"no permission":   {fail("Init", "NO_PERMISSION"), nvml.ERROR_NO_PERMISSION, "run this container privileged"},
		"another failure": {fail("Init", "UNKNOWN"), nvml.ERROR_UNKNOWN, "nvmlInit: ERROR_UNKNOWN"},
		"no version": {fail("SystemGetDriverVersion", "UNKNOWN"), nvml.ERROR_UNKNOWN,
			"nvmlSystemGetDriverVersion"},
		"no count": {fail("DeviceGetCount", "DRIVER_NOT_LOADED"), inventory.ErrNoDriver, "nvmlDeviceGetCount"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			node := newNode(t, "t4")
			r := &rig{t: t, ctx: t.Context(), node: node}
			r.driver = nvidia.New(nvidia.Options{Library: node.NVML(), Root: node.Root(), DriverRoot: "/driver-root"})
			r.inject(test.fault)
			_, err := r.driver.Open(r.ctx)
			if !errors.Is(err, test.kind) || !strings.Contains(err.Error(), test.text) ||
				!strings.HasPrefix(err.Error(), "open an NVML session: ") {
				t.Errorf("got error %v, want %v with %q", err, test.kind, test.text)
			}
			r.clean()
			r.inject(simulator.Fault{Kind: simulator.KindRestore})
			s, err := r.driver.Open(r.ctx)
			if err != nil {
				t.Fatalf("once the fault is gone: %v", err)
			}
			if err := s.Close(r.ctx); err != nil {
				t.Error(err)
			}
			r.clean()
		})
	}
}

// TestReplacedFiles: the driver's files are replaced on disk, and the kernel module is not. A
// session that is open goes on and says so; a process that starts then cannot open one, and another
// process cannot either, unless its files are newer.
func TestReplacedFiles(t *testing.T) {
	t.Parallel()
	files := func(version string) simulator.Fault {
		return simulator.Fault{Kind: simulator.KindDriverFiles, Driver: version}
	}
	r := newRig(t, "t4")
	r.inject(files("580.95.05"))
	for range 2 {
		snapshot, err := r.Scan(r.ctx)
		if got, want := snapshot.Driver.Mismatch(),
			"driver 580.95.05 on disk, 550.163.01 loaded: restart the node"; err != nil || got != want ||
			len(snapshot.GPUs) != 1 {
			t.Fatalf("the open session says %q and %v of %d GPUs, want %q", got, err, len(snapshot.GPUs), want)
		}
	}
	for version, want := range map[string]struct {
		kind error
		text string
	}{
		"580.95.05": {inventory.ErrDriverMismatch, "driver 580.95.05 on disk, 550.163.01 loaded: restart the node"},
		"535.10.05": {inventory.ErrOldLibrary,
			"driver 535.10.05 in this container, 550.163.01 loaded: restart the pod"},
	} {
		r.inject(files(version))
		another := nvidia.New(nvidia.Options{Library: r.node.NVML(), Root: r.node.Root()})
		for range 2 {
			_, err := another.Open(r.ctx)
			old := want.kind == inventory.ErrOldLibrary //nolint:errorlint // the kind itself
			if !errors.Is(err, want.kind) || errors.Is(err, inventory.ErrOldLibrary) != old ||
				!strings.Contains(err.Error(), want.text) {
				t.Errorf("a new process with %s: %v, want %q", version, err, want.text)
			}
		}
		r.inject(simulator.Fault{Kind: simulator.KindRestore})
		if _, err := another.Open(r.ctx); !errors.Is(err, inventory.ErrDriverReplaced) ||
			errors.Is(err, inventory.ErrDriverMismatch) {
			t.Errorf("the files fit again, and the process has others: %v", err)
		}
	}
	if snapshot, err := r.Scan(r.ctx); err != nil || snapshot.Driver.OnDisk != "" {
		t.Errorf("the files fit again, and the open session says %q and %v", snapshot.Driver.Mismatch(), err)
	}
}

// TestOpenWithoutLibrary looks for the machine's own library, which is not there.
func TestOpenWithoutLibrary(t *testing.T) {
	t.Parallel()
	s, err := nvidia.New(nvidia.Options{DriverRoot: t.TempDir()}).Open(t.Context())
	if err == nil {
		t.Skipf("this machine has a driver; closing its session: %v", s.Close(t.Context()))
	}
	if !errors.Is(err, inventory.ErrNoDriver) {
		t.Errorf("got error %v, want ErrNoDriver", err)
	}
}
