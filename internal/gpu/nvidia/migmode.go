package nvidia

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// SetMIGMode sets the MIG mode of a GPU, by UUID, in a separate session without events. It is for a
// process with no other task: it waits for a hanging call. The error wraps the same errors as in
// Session.Repartition, or inventory.ErrOpenElsewhere if any other process has the GPU open.
func SetMIGMode(o Options, uuid string, mode inventory.MIGMode) (err error) {
	defer func() { err = wrap(err, "set the MIG mode of GPU "+uuid) }()
	d := New(o)
	lib, err := d.library()
	if err != nil {
		return err
	}
	if err := lib.lookUp(); err != nil {
		return err
	}
	if ret := lib.Init(); ret != nvml.SUCCESS {
		return initFailure(ret)
	}
	defer func() { _ = lib.Shutdown() }()
	a := newAPI(lib, lib.has, d.node)
	count, ret := a.DeviceGetCount()
	if err := failure("nvmlDeviceGetCount", ret); err != nil {
		return err
	}
	for i := range count {
		gpu, ret := a.DeviceGetHandleByIndex(i)
		if ret != nvml.SUCCESS {
			continue // another GPU may be lost
		}
		if found, ret := gpu.GetUUID(); ret == nvml.SUCCESS && found == uuid {
			err := setMIGMode(gpu, modeNumber(mode))
			if errors.Is(err, inventory.ErrInUse) && resetsForMIGMode(gpu) {
				return inventory.ErrOpenElsewhere
			}
			return err
		}
	}
	return errors.New("the driver has no such GPU")
}

// modeNumber returns NVML's number of a MIG mode.
func modeNumber(mode inventory.MIGMode) int {
	if mode == inventory.MIGEnabled {
		return nvml.DEVICE_MIG_ENABLE
	}
	return nvml.DEVICE_MIG_DISABLE
}

// setMIGMode sets the MIG mode. Without an error, the mode is in force. In a virtual machine the
// driver may not reset the GPU, and the mode is pending.
func setMIGMode(gpu device, mode int) error {
	const call = "nvmlDeviceSetMigMode"
	activation, ret := gpu.SetMigMode(mode)
	if ret != nvml.SUCCESS {
		return changeFailure(call, ret)
	}
	pending := activation == nvml.ERROR_RESET_REQUIRED
	if activation == nvml.ERROR_NOT_SUPPORTED {
		modes, ret := gpu.GetMigModes()
		pending = ret == nvml.SUCCESS && modes.pending == mode && modes.current != mode
	}
	if pending {
		return fmt.Errorf("%s: %w", call, inventory.ErrResetRequired)
	}
	return changeFailure(call+", activation", activation)
}

// InVirtualMachine reports whether the node is a virtual machine, from /proc/cpuinfo below root. It
// works on x86 only.
func InVirtualMachine(root fs.FS) bool {
	text, err := fs.ReadFile(root, "proc/cpuinfo")
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(text)) {
		if flags, found := strings.CutPrefix(line, "flags"); found {
			return slices.Contains(strings.Fields(flags), "hypervisor")
		}
	}
	return false
}

// resetsForMIGMode reports whether the driver resets a GPU for a change of the MIG mode. Drivers
// without this information do so on Ampere.
func resetsForMIGMode(gpu device) bool {
	v, ret := gpu.GetFieldValue(nvml.FI_DEV_IS_RESETLESS_MIG_SUPPORTED)
	if value, known := number(v); ret == nvml.SUCCESS && known {
		return value == 0
	}
	architecture, ret := gpu.GetArchitecture()
	return ret == nvml.SUCCESS && architecture == nvml.DEVICE_ARCH_AMPERE
}

// resetless reports whether the driver is known to change the MIG mode of a GPU without a reset.
func resetless(gpu device) bool {
	_, ret := gpu.GetArchitecture()
	return ret == nvml.SUCCESS && !resetsForMIGMode(gpu)
}

// LostByClose describes the settings lost by GPUs without persistence mode when this session closes
// while no other process has the GPUs open. It is empty without any. It fails if a GPU cannot be
// read.
func (s *Session) LostByClose(ctx context.Context) (_ string, err error) {
	defer func() { err = wrap(err, "ask what GPUs lose when the session is closed") }()
	if err := s.enter(ctx); err != nil {
		return "", err
	}
	defer s.driver.calls.release()
	for _, sl := range s.scanner.slots {
		if sl.gpu.lastSeen.UUID == "" || sl.isPaused {
			continue
		}
		handle, lost := sl.gpu.device, ""
		if err := s.driver.calls.job(ctx, sl.record, gpuPatience, func() { lost = lostByClose(handle) },
			nil); err != nil {
			return "", err
		}
		if lost != "" {
			return fmt.Sprintf("GPU %d would lose its %s, as it has no persistence mode: switch that on with "+
				"nvidia-smi -i %d -pm 1",
				sl.record.gpu, lost, sl.record.gpu), nil
		}
	}
	return "", nil
}

// lostByClose returns the settings that a GPU loses with its last user. Locked clocks cannot be
// read.
func lostByClose(gpu device) string {
	if mode, ret := gpu.GetPersistenceMode(); ret != nvml.SUCCESS || mode == nvml.FEATURE_ENABLED {
		return ""
	}
	limit, ret := gpu.GetPowerManagementLimit()
	usual, unknown := gpu.GetPowerManagementDefaultLimit()
	if ret == nvml.SUCCESS && unknown == nvml.SUCCESS && limit != usual {
		return fmt.Sprintf("power limit of %d W", limit/1000)
	}
	for name, clock := range map[string]nvml.ClockType{"graphics": nvml.CLOCK_GRAPHICS, "memory": nvml.CLOCK_MEM} {
		set, ret := gpu.GetApplicationsClock(clock)
		usual, unknown := gpu.GetDefaultApplicationsClock(clock)
		if ret == nvml.SUCCESS && unknown == nvml.SUCCESS && set != usual {
			return fmt.Sprintf("application clock (%s) of %d MHz", name, set)
		}
	}
	if mode, ret := gpu.GetComputeMode(); ret == nvml.SUCCESS && mode != nvml.COMPUTEMODE_DEFAULT {
		return "compute mode"
	}
	return ""
}
