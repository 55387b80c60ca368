package nvidia

import (
	"context"
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Repartition starts a change of the MIG layout of a GPU of an earlier Scan of this session. It
// returns after the change, or early if the change takes long: the reset of a GPU takes seconds,
// and other GPUs must be read meanwhile. The error says why the change was not started.
//
// The returned function waits for the end of the change, and may be called repeatedly. It returns
// the ID of a created instance, and 0 for other steps. Its error wraps inventory.ErrSessionInUse,
// inventory.ErrInUse, inventory.ErrResetRequired, inventory.ErrNoPermission or
// inventory.ErrNotSupported where possible. It wraps inventory.ErrNoAnswer after the deadline of
// its ctx; the step may then still happen.
func (s *Session) Repartition(
	ctx context.Context, uuid string, step inventory.MIGStep,
) (func(context.Context) (int, error), error) {
	what := fmt.Sprintf("%s on GPU %s", step.Action, uuid)
	if err := s.enter(ctx); err != nil {
		return nil, wrap(err, what)
	}
	defer s.driver.calls.release()
	sl, err := s.scanner.find(uuid)
	if err == nil {
		err = s.driver.calls.awaitRoom(ctx, sl.record, gpuPatience)
	}
	if err != nil {
		return nil, wrap(err, what)
	}
	handle := sl.gpu.device
	sl.gpu.isUnreturned = false // the reading is out of date
	var id int
	failed := errors.New("the step was not finished") // if the job panics
	done := make(chan struct{})
	counts := sl.gpm
	if sl.gpm != nil && (step.Action == inventory.MIGDestroyCompute || step.Action == inventory.MIGDestroyInstance) {
		sl.gpm = nil
	} else {
		counts = nil
	}
	run := func() {
		defer close(done)
		if counts != nil { // the counts may keep the instance from being destroyed
			clear(counts.measuredGIs)
			counts.sweep(handle.api)
		}
		id, failed = repartition(handle, step)
	}
	_ = s.driver.calls.run(ctx, sl.record, gpuPatience, run, nil) // the returned function returns the error
	return func(ctx context.Context) (int, error) {
		select {
		case <-done:
			return id, wrap(failed, what)
		case <-ctx.Done():
			return 0, wrap(endOfContext(ctx), what)
		}
	}, nil
}

// repartition makes a step, and returns the ID of a created instance.
func repartition(gpu device, step inventory.MIGStep) (int, error) {
	if mode, set := step.Mode(); set {
		if resetsForMIGMode(gpu) {
			return 0, inventory.ErrSessionInUse
		}
		return 0, setMIGMode(gpu, modeNumber(mode))
	}
	if step.Action == inventory.MIGCreateInstance {
		gi, ret := gpu.CreateGpuInstance(step.Profile, nvml.GpuInstancePlacement{Start: uint32(step.Start),
			Size: uint32(step.Size)})
		if ret != nvml.SUCCESS {
			return 0, changeFailure("nvmlDeviceCreateGpuInstanceWithPlacement", ret)
		}
		info, ret := gi.GetInfo()
		return int(info.Id), failure("nvmlGpuInstanceGetInfo", ret)
	}
	gi, ret := gpu.GetGpuInstanceByID(step.GI)
	if ret != nvml.SUCCESS {
		return 0, changeFailure("nvmlDeviceGetGpuInstanceById", ret)
	}
	switch step.Action {
	case inventory.MIGDestroyInstance:
		return 0, changeFailure("nvmlGpuInstanceDestroy", gi.Destroy())
	case inventory.MIGDestroyCompute:
		return 0, changeFailure("nvmlComputeInstanceDestroy", gi.DestroyComputeInstance(step.CI))
	case inventory.MIGCreateCompute:
		return createCompute(gi, step)
	default:
		panic("no such action: " + string(step.Action))
	}
}

// createCompute creates a compute instance, and returns its ID.
func createCompute(gi gpuInstance, step inventory.MIGStep) (int, error) {
	for number, size := range computeInstanceProfiles {
		if size != step.Size {
			continue
		}
		profile, ret := gi.GetComputeInstanceProfileInfo(number, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		if ret != nvml.SUCCESS {
			return 0, changeFailure("nvmlGpuInstanceGetComputeInstanceProfileInfo", ret)
		}
		ci, ret := gi.CreateComputeInstance(profile, nvml.ComputeInstancePlacement{Start: uint32(step.Start),
			Size: uint32(step.Size)})
		return int(ci.Id), changeFailure("nvmlGpuInstanceCreateComputeInstance", ret)
	}
	return 0, fmt.Errorf("%w: a compute instance with %d slices", inventory.ErrNotSupported, step.Size)
}

// changeFailure is failure for a call that changes a GPU.
func changeFailure(call string, ret nvml.Return) error {
	if ret == nvml.ERROR_IN_USE {
		return fmt.Errorf("%s: %w", call, inventory.ErrInUse)
	}
	return withCapability(failure(call, ret))
}
