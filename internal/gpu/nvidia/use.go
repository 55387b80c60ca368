package nvidia

import (
	"context"
	"fmt"
	"math"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Processes returns the processes that have a compute context on a GPU that an earlier Scan of this
// session found. The driver leaves out those that have no number in this process's PID namespace:
// only in the node's own one, or in one that all containers are below, are all of them seen.
//
// The error wraps inventory.ErrNotSupported where the GPU cannot tell, inventory.ErrUnusable where
// it answers nothing, and inventory.ErrNoAnswer when the driver did not answer by the deadline of
// ctx.
func (s *Session) Processes(ctx context.Context, uuid string) ([]inventory.Process, error) {
	return ask(ctx, s, "list the processes on", uuid, processes)
}

func processes(gpu device) ([]inventory.Process, error) {
	found, ret := gpu.GetComputeRunningProcesses() // by the newest of its versions that the library has
	if err := failure("nvmlDeviceGetComputeRunningProcesses", ret); err != nil {
		if contact(ret) >= inventory.ContactResetRequired {
			err = fmt.Errorf("%w: %w", inventory.ErrUnusable, err)
		}
		return nil, err
	}
	processes := make([]inventory.Process, len(found))
	for i, p := range found {
		processes[i].PID = int(p.Pid)
		if p.UsedGpuMemory != math.MaxUint64 { // NVML_VALUE_NOT_AVAILABLE
			processes[i].MemoryBytes = inventory.Known(p.UsedGpuMemory)
		}
		if p.GpuInstanceId != math.MaxUint32 {
			processes[i].GI = inventory.Known(int(p.GpuInstanceId))
		}
	}
	return processes, nil
}

// MemoryLimit returns how much memory of a GPU that an earlier Scan of this session found the
// processes of a cgroup may use, in MiB; 0 where the driver limits nothing. The cgroup is its
// folder, of version 2. The errors are those of Processes: a driver before R615 has no limits.
func (s *Session) MemoryLimit(ctx context.Context, uuid, cgroup string) (mib int, err error) {
	return ask(ctx, s, "read the memory limit of a cgroup on", uuid, func(gpu device) (int, error) {
		limits, ret := gpu.GetMemoryLimits(cgroup)
		if err := failure("nvmlDeviceGetMemoryLimits_v1", ret); err != nil ||
			limits.HardLimit == nvml.DEVICE_MEMORY_LIMIT_MAX {
			return 0, err
		}
		return int(limits.HardLimit >> 20), nil
	})
}

// Clean takes back what earlier work left behind on a GPU that an earlier Scan of this session
// found. It needs root and CAP_SYS_ADMIN. After inventory.ErrNoAnswer it may still happen. The
// error wraps inventory.ErrNotSupported where the driver or the GPU has no such thing.
func (s *Session) Clean(ctx context.Context, uuid string, what inventory.Remnant) error {
	_, err := ask(ctx, s, fmt.Sprintf("reset %s of", what), uuid, func(gpu device) (struct{}, error) {
		return struct{}{}, clean(gpu, what)
	})
	return err
}

func clean(gpu device, what inventory.Remnant) error {
	var call string
	var ret nvml.Return
	switch what {
	case inventory.RemnantClocks:
		call, ret = "nvmlDeviceResetApplicationsClocks", gpu.ResetApplicationsClocks()
	case inventory.RemnantECC:
		call, ret = "nvmlDeviceClearEccErrorCounts", gpu.ClearEccErrorCounts(nvml.VOLATILE_ECC)
	default:
		panic("no such remnant: " + what.String())
	}
	return unprivileged(failure(call, ret))
}
