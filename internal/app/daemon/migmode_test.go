package daemon_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/simulated"
)

// TestModeStatuses: the driver's answer reaches the daemon by the exit status of its other process.
func TestModeStatuses(t *testing.T) {
	t.Parallel()
	ended := func(err error) error {
		return daemon.ModeFailure(exec.Command("/bin/sh", "-c", "exit "+strconv.Itoa(daemon.ModeStatus(err))).Run(),
			"it said so")
	}
	for _, want := range []error{
		inventory.ErrOpenElsewhere, inventory.ErrInUse, inventory.ErrResetRequired, inventory.ErrNoPermission,
		inventory.ErrNotSupported,
	} {
		if got := ended(fmt.Errorf("set it: %w", want)); !errors.Is(got, want) || errors.Unwrap(got).Error() != want.Error() {
			t.Errorf("%v became %v", want, got)
		}
	}
	if got := ended(errors.New("another")); got == nil || !strings.Contains(got.Error(), "it said so") {
		t.Errorf("another error became %v", got)
	}
	if err := daemon.ModeFailure(nil, ""); err != nil {
		t.Error(err)
	}
	if err := daemon.SetMIGMode("/", "GPU-0", "on"); err == nil ||
		!strings.Contains(err.Error(), "use enabled or disabled") {
		t.Errorf("a mode that is none: %v", err)
	}
	// the GPU does not exist
	if err := daemon.SetMIGMode(t.TempDir(), "GPU-0", "enabled"); err == nil || daemon.ModeStatus(err) != 1 {
		t.Errorf("without a driver: %v", err)
	}
}

// TestModesInAVirtualMachine: modes in a virtual machine change only if configured.
func TestModesInAVirtualMachine(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "node.yaml")
	const text = "{description: One A100, driver: 580.95.05, cuda: \"13.0\", model: a100-sxm4-40gb, " +
		"virtualMachine: true, gpus: [{bdf: \"0000:17:00.0\", pcie: 0/0/0}]}"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	node := simulated.Node(t, path)
	m := &daemon.MIGModes{Configs: feed.New(config.Config{}), Node: node}
	if err := m.Check(); err == nil || !strings.Contains(err.Error(), "allow the reset with mig.resetInVM") {
		t.Errorf("not allowed: %v", err)
	}
	m.Configs.Publish(config.Config{Live: config.Live{MIG: config.MIG{ResetInVM: true}}})
	if err := m.Check(); err != nil {
		t.Errorf("allowed: %v", err)
	}
	if err := m.Set(t.Context(), node.List()[0].UUID, inventory.MIGEnabled); !errors.Is(err, inventory.ErrResetRequired) {
		t.Errorf("the mode: %v", err)
	}
	if err := node.Inject(simulator.Fault{Kind: simulator.KindHang, Call: "DeviceSetMigMode"}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := m.Set(ctx, node.List()[0].UUID, inventory.MIGEnabled); !errors.Is(err, inventory.ErrNoAnswer) {
		t.Errorf("a driver that hangs: %v", err)
	}
	if err := m.Check(); !errors.Is(err, inventory.ErrNoAnswer) {
		t.Errorf("while that hangs: %v", err)
	}
	node.Close()
}
