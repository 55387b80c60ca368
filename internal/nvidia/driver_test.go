package nvidia_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/simulator"
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
			"libnvidia-ml.so.1 is neither below the driver root /driver-root nor where the loader looks: install the driver",
		},
		"no kernel module": {
			simulator.Fault{Kind: simulator.KindDriver, Driver: "missing"}, inventory.ErrNoDriver,
			"the kernel module is not loaded",
		},
		"other kernel module": {
			fail("Init", "LIB_RM_VERSION_MISMATCH"), inventory.ErrDriverMismatch, "finish the driver's upgrade",
		},
		"no permission":   {fail("Init", "NO_PERMISSION"), nvml.ERROR_NO_PERMISSION, "run this container privileged"},
		"another failure": {fail("Init", "UNKNOWN"), nvml.ERROR_UNKNOWN, "nvmlInit: ERROR_UNKNOWN"},
		"no version":      {fail("SystemGetDriverVersion", "UNKNOWN"), nvml.ERROR_UNKNOWN, "nvmlSystemGetDriverVersion"},
		"no count":        {fail("DeviceGetCount", "DRIVER_NOT_LOADED"), inventory.ErrNoDriver, "nvmlDeviceGetCount"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			node := newNode(t, "t4")
			r := &rig{t: t, ctx: t.Context(), node: node}
			r.driver = nvidia.New(nvidia.Options{Library: node.NVML(), Root: node.Root(), DriverRoot: "/driver-root"})
			r.inject(test.fault)
			_, err := r.driver.Open(r.ctx)
			if !errors.Is(err, test.kind) || !strings.Contains(err.Error(), test.text) || !strings.HasPrefix(err.Error(), "open an NVML session: ") {
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
