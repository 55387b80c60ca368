package nvidia_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

func TestProcesses(t *testing.T) {
	t.Parallel()
	r := newRig(t, "dgx-h100", simulator.Fault{Kind: simulator.KindProcesses, GPU: "3", Count: 2})
	r.scan()
	for gpu, want := range map[int][]inventory.Process{
		2: {},
		3: {{PID: 100000, MemoryBytes: inventory.Known(uint64(1 << 30))},
			{PID: 100001, MemoryBytes: inventory.Known(uint64(1 << 30))}},
	} {
		got, err := r.Processes(r.ctx, r.uuid(gpu))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("GPU %d (-want +got):\n%s", gpu, diff)
		}
	}
}

// TestMemoryLimit: a cgroup has the limit that the driver says, none, or has ended; drivers before
// R615 have no limits.
func TestMemoryLimit(t *testing.T) {
	t.Parallel()
	limited, free := t.TempDir(), t.TempDir()
	text := "drm/0000:03:00.0/vram0 max\nnvidia/0000:43:00.0 4294967296\nnvidia/0000:52:00.0 8589934592\n"
	if err := os.WriteFile(filepath.Join(limited, "dmem.max"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	profile, err := simulator.Load("dgx-h100")
	if err != nil {
		t.Fatal(err)
	}
	profile.Driver = "615.71.05"
	node := simulator.New(profile)
	s, err := nvidia.New(nvidia.Options{Library: node.NVML(), Root: node.Root()}).Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close(t.Context())
	seen, err := s.Scan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	uuid := seen.GPUs[1].UUID
	for folder, want := range map[string]int{limited: 4096, free: 0} {
		if got, err := s.MemoryLimit(t.Context(), uuid, folder); err != nil || got != want {
			t.Errorf("limit %d, want %d, %v", got, want, err)
		}
	}
	if _, err := s.MemoryLimit(t.Context(), uuid, filepath.Join(free, "ended")); !errors.Is(err,
		nvml.ERROR_OPERATING_SYSTEM) {
		t.Errorf("a cgroup that has ended: %v", err)
	}
	old := newRig(t, "dgx-h100")
	old.scan()
	if _, err := old.MemoryLimit(old.ctx, old.uuid(1), limited); !errors.Is(err, inventory.ErrNotSupported) {
		t.Errorf("an older driver: %v", err)
	}
}

func TestClean(t *testing.T) {
	t.Parallel()
	r := newRig(t, "dgx-h100", simulator.Fault{Kind: simulator.KindECC, GPU: "1", Count: 7})
	r.scan()
	for _, what := range []inventory.Remnant{inventory.RemnantClocks, inventory.RemnantECC} {
		if err := r.Clean(r.ctx, r.uuid(1), what); err != nil {
			t.Errorf("clean %s: %v", what, err)
		}
	}
	reading, err := r.Read(r.ctx, r.uuid(1))
	if err != nil {
		t.Fatal(err)
	}
	if want := inventory.Known(uint64(0)); reading.UncorrectedECC != want {
		t.Errorf("errors after they were cleared: %v, want %v", reading.UncorrectedECC, want)
	}
}

// TestUseFails walks through what may become of the calls that are made before a container starts.
func TestUseFails(t *testing.T) {
	t.Parallel()
	calls := map[string]struct {
		call string // of NVML
		use  func(*nvidia.Session, context.Context, string) error
	}{
		"processes": {"DeviceGetComputeRunningProcesses", func(s *nvidia.Session, ctx context.Context,
			uuid string) error {
			_, err := s.Processes(ctx, uuid)
			return err
		}},
		"clocks": {"DeviceResetApplicationsClocks", func(s *nvidia.Session, ctx context.Context, uuid string) error {
			return s.Clean(ctx, uuid, inventory.RemnantClocks)
		}},
		"ecc": {"DeviceClearEccErrorCounts", func(s *nvidia.Session, ctx context.Context, uuid string) error {
			return s.Clean(ctx, uuid, inventory.RemnantECC)
		}},
	}
	returns := map[string]error{
		"NOT_SUPPORTED": inventory.ErrNotSupported, "NO_PERMISSION": nvml.ERROR_NO_PERMISSION,
		"GPU_IS_LOST": nvml.ERROR_GPU_IS_LOST,
	}
	for name, c := range calls {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, "dgx-h100")
			r.scan()
			for ret, want := range returns {
				r.inject(simulator.Fault{Kind: simulator.KindFail, GPU: "1", Call: c.call, Return: ret})
				err := c.use(r.Session, r.ctx, r.uuid(1))
				if !errors.Is(err, want) || !strings.Contains(err.Error(), r.uuid(1)) {
					t.Errorf("%s: got error %v, want %v and the GPU's name", ret, err, want)
				}
				r.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "1"})
			}
			if err := c.use(r.Session, r.ctx, "GPU-none"); err == nil || !strings.Contains(err.Error(), "unknown GPU") {
				t.Errorf("a GPU that nobody has seen: got error %v", err)
			}

			r.inject(simulator.Fault{Kind: simulator.KindHang, GPU: "1", Call: c.call})
			ctx, cancel := context.WithTimeout(r.ctx, 50*time.Millisecond)
			defer cancel()
			if err := c.use(r.Session, ctx, r.uuid(1)); !errors.Is(err, inventory.ErrNoAnswer) {
				t.Errorf("a call that hangs: got error %v", err)
			}
			r.inject(simulator.Fault{Kind: simulator.KindRestore})
			if err := r.Close(r.ctx); err != nil {
				t.Fatal(err)
			}
			if err := c.use(r.Session, r.ctx, r.uuid(1)); err == nil ||
				!strings.Contains(err.Error(), "the NVML session is closed") {
				t.Errorf("after the session's end: got error %v", err)
			}
		})
	}
}
