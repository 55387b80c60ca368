package nvidia

import (
	"context"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// SetComputeMode sets the compute mode of a GPU of an earlier Scan of this session, and returns the
// previous mode. The mode outlives this session, until the next change or until the driver releases
// the GPU.
//
// The error wraps inventory.ErrNotSupported for a GPU without compute modes. It wraps
// inventory.ErrNoAnswer if the driver did not answer before the deadline of ctx; the mode may then
// have been set.
func (s *Session) SetComputeMode(
	ctx context.Context, uuid string, mode inventory.ComputeMode,
) (inventory.ComputeMode, error) {
	return ask(ctx, s, fmt.Sprintf("set the compute mode %s of", mode), uuid,
		func(gpu device) (inventory.ComputeMode, error) {
			return setComputeMode(gpu, mode)
		})
}

// setComputeMode does not call a GPU already in the mode: a change needs privileges.
func setComputeMode(gpu device, mode inventory.ComputeMode) (before inventory.ComputeMode, err error) {
	now, ret := gpu.GetComputeMode()
	if err := failure("nvmlDeviceGetComputeMode", ret); err != nil {
		return 0, err
	}
	if inventory.ComputeMode(now) == mode {
		return mode, nil
	}
	ret = gpu.SetComputeMode(nvml.ComputeMode(mode))
	if err := failure("nvmlDeviceSetComputeMode", ret); err != nil {
		if ret == nvml.ERROR_NO_PERMISSION {
			return 0, fmt.Errorf("%w: run this container as root and privileged", err)
		}
		return 0, err
	}
	taken, ret := gpu.GetComputeMode()
	if err := failure("nvmlDeviceGetComputeMode", ret); err != nil {
		return 0, err
	}
	if inventory.ComputeMode(taken) != mode {
		return 0, fmt.Errorf("the driver took the compute mode %s, and the GPU has %s", mode,
			inventory.ComputeMode(taken))
	}
	return inventory.ComputeMode(now), nil
}
