package daemon

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"sync/atomic"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// SetMIGModeCommand is the command in which a process of this program sets the MIG mode of
// a GPU for the daemon. Its arguments are the driver root, the UUID and the mode.
const SetMIGModeCommand = "set-mig-mode"

// modeStatuses are the driver's reasons for refusal. The exit status of the command is
// firstModeStatus plus the index of the reason.
var modeStatuses = []error{
	inventory.ErrOpenElsewhere, inventory.ErrInUse, inventory.ErrResetRequired, inventory.ErrNoPermission,
	inventory.ErrNotSupported,
}

const firstModeStatus = 10

// SetMIGMode sets the MIG mode, "enabled" or "disabled", of a GPU, by UUID. ModeStatus
// converts its error to the exit status of the process.
func SetMIGMode(driverRoot, uuid, mode string, searchPath ...string) error {
	wanted := inventory.MIGEnabled
	if mode == inventory.MIGDisabled.String() {
		wanted = inventory.MIGDisabled
	}
	if mode != wanted.String() {
		return fmt.Errorf("%q is not a MIG mode: use enabled or disabled", mode)
	}
	return nvidia.SetMIGMode(nvidia.Options{DriverRoot: driverRoot, SearchPath: searchPath}, uuid, wanted)
}

// ModeStatus returns the exit status that stands for an error of SetMIGMode.
func ModeStatus(err error) int {
	for i, known := range modeStatuses {
		if errors.Is(err, known) {
			return firstModeStatus + i
		}
	}
	return 1
}

// ModeFailure returns the error of SetMIGMode in another process. Parameter err is the
// error of that process, and output its output.
func ModeFailure(err error, output string) error {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return err
	}
	if i := exit.ExitCode() - firstModeStatus; i >= 0 && i < len(modeStatuses) {
		return fmt.Errorf("set the MIG mode: %w", modeStatuses[i])
	}
	return fmt.Errorf("set the MIG mode: %w: %s", err, output)
}

// modeTimeout is how long the driver may take to reset a GPU for its MIG mode. The state
// of all GPUs is unknown meanwhile.
const modeTimeout = time.Minute

// maxModeOutput limits the kept output of the process, in bytes.
const maxModeOutput = 4 << 10

// modeEnd is the longest wait for a killed process.
const modeEnd = 2 * time.Second

// MIGModes sets MIG modes of GPUs that need a reset, in a separate process. It implements
// monitor.ModeSetter.
type MIGModes struct {
	Configs *feed.Feed[config.Config]
	// DriverRoot is the path of the driver in this process's view.
	DriverRoot string
	// SearchPath are folders below DriverRoot that are searched for libraries first.
	SearchPath []string
	// Node is nil on a real node.
	Node *simulator.Node

	running atomic.Bool
}

// Check implements monitor.ModeSetter.
func (m *MIGModes) Check() error {
	switch {
	case m.running.Load():
		return fmt.Errorf("set a MIG mode: an earlier process for that has not ended: %w", inventory.ErrNoAnswer)
	case nvidia.InVirtualMachine(nodeRoot(m.Node)) && !m.Configs.Value().MIG.ResetInVM:
		return errors.New("a change of the MIG mode resets the GPU, which may fail in this virtual machine: set " +
			"the mode where the virtual machine is created, or allow the reset with mig.resetInVM")
	}
	return nil
}

// Set implements monitor.ModeSetter.
func (m *MIGModes) Set(ctx context.Context, uuid string, mode inventory.MIGMode) error {
	ctx, cancel := context.WithTimeout(ctx, modeTimeout)
	defer cancel()
	m.running.Store(true)
	ended, err := nvidia.AwaitProgram(ctx, modeEnd, func() error {
		defer m.running.Store(false)
		return m.set(ctx, uuid, mode)
	})
	if !ended {
		return fmt.Errorf("set the MIG mode of GPU %s: %w", uuid, inventory.ErrNoAnswer)
	}
	return err
}

// set makes the driver set the mode, and waits for the result.
func (m *MIGModes) set(ctx context.Context, uuid string, mode inventory.MIGMode) error {
	if m.Node != nil {
		return nvidia.SetMIGMode(nvidia.Options{Library: m.Node.NVML(), Root: m.Node.Root()}, uuid, mode)
	}
	args := append([]string{SetMIGModeCommand, m.DriverRoot, uuid, mode.String()}, m.SearchPath...)
	c := exec.CommandContext(ctx, "/proc/self/exe", args...)
	c.Args[0] = "gpu-device-plugin" // under another name the program is another command
	c.WaitDelay = time.Second
	output := statefile.NewHead(maxModeOutput)
	c.Stderr = output
	return ModeFailure(c.Run(), strings.TrimSpace(output.String()))
}
