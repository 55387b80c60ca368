package nvidia

import (
	"context"
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Repartition begins to change how multi-instance mode divides a GPU that an earlier Scan of this
// session found. It returns when that is done, or when it takes long: the reset of a GPU takes
// seconds, in which others are to be asked. The error says why it was not begun with.
//
// The function that it returns waits for the end, and may be called again. It returns the ID of the
// instance that was created, and 0 for other steps. Its error wraps inventory.ErrSessionInUse,
// inventory.ErrInUse, inventory.ErrResetRequired, inventory.ErrNoPermission or
// inventory.ErrNotSupported where those fit, and inventory.ErrNoAnswer when the deadline of its ctx
// came first: then the step may still happen.
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
		err = s.driver.calls.room(ctx, sl.record, gpuPatience)
	}
	if err != nil {
		return nil, wrap(err, what)
	}
	handle := sl.gpu.device
	sl.gpu.fresh = false // what was read changes
	var id int
	failed := errors.New("the step was not finished") // where the job panics
	done := make(chan struct{})
	counts := sl.gpm
	if sl.gpm != nil && (step.Action == inventory.MIGDestroyCompute || step.Action == inventory.MIGDestroyInstance) {
		sl.gpm = nil
	} else {
		counts = nil
	}
	run := func() {
		defer close(done)
		if counts != nil { // they may keep the instance from being destroyed
			clear(counts.seen)
			counts.sweep(handle.api)
		}
		id, failed = repartition(handle, step)
	}
	_ = s.driver.calls.run(ctx, sl.record, gpuPatience, run, nil) // the function that waits for the end returns the error
	return func(ctx context.Context) (int, error) {
		select {
		case <-done:
			return id, wrap(failed, what)
		case <-ctx.Done():
			return 0, wrap(stopped(ctx), what)
		}
	}, nil
}

// repartition makes a step, and returns the ID of what was created.
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
			return 0, refused("nvmlDeviceCreateGpuInstanceWithPlacement", ret)
		}
		info, ret := gi.GetInfo()
		return int(info.Id), failure("nvmlGpuInstanceGetInfo", ret)
	}
	gi, ret := gpu.GetGpuInstanceByID(step.GI)
	if ret != nvml.SUCCESS {
		return 0, refused("nvmlDeviceGetGpuInstanceById", ret)
	}
	switch step.Action {
	case inventory.MIGDestroyInstance:
		return 0, refused("nvmlGpuInstanceDestroy", gi.Destroy())
	case inventory.MIGDestroyCompute:
		return 0, refused("nvmlComputeInstanceDestroy", gi.DestroyComputeInstance(step.CI))
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
			return 0, refused("nvmlGpuInstanceGetComputeInstanceProfileInfo", ret)
		}
		ci, ret := gi.CreateComputeInstance(profile, nvml.ComputeInstancePlacement{Start: uint32(step.Start),
			Size: uint32(step.Size)})
		return int(ci.Id), refused("nvmlGpuInstanceCreateComputeInstance", ret)
	}
	return 0, fmt.Errorf("%w: a compute instance with %d slices", inventory.ErrNotSupported, step.Size)
}

// refused is failure for a call that changes something.
func refused(call string, ret nvml.Return) error {
	if ret == nvml.ERROR_IN_USE {
		return fmt.Errorf("%s: %w", call, inventory.ErrInUse)
	}
	return unprivileged(failure(call, ret))
}
