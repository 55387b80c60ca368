package nvidia

import (
	"context"
	"fmt"
	"math"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Processes returns the processes with a compute context on a GPU of an earlier Scan of this
// session. The driver omits processes without an ID in this process's PID namespace. Only the
// node's PID namespace, or a common parent of all containers' namespaces, shows all processes.
//
// The error wraps inventory.ErrNotSupported if the GPU lacks the feature, inventory.ErrUnusable if
// the GPU answers no call, and inventory.ErrNoAnswer if the driver did not answer before the
// deadline of ctx.
func (s *Session) Processes(ctx context.Context, uuid string) ([]inventory.Process, error) {
	return ask(ctx, s, "list the processes on", uuid, processes)
}

func processes(gpu device) ([]inventory.Process, error) {
	found, ret := gpu.GetComputeRunningProcesses() // in the newest version in the library
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

// MemoryLimit returns the memory limit of a cgroup on a GPU of an earlier Scan of this session, in
// MiB; 0 without a limit. The cgroup is a directory of cgroup version 2. The errors are the errors
// of Processes: drivers before R615 have no limits.
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

// Clean removes changes left behind by earlier work on a GPU of an earlier Scan of this session. It
// needs root and CAP_SYS_ADMIN. After inventory.ErrNoAnswer the change may still happen. The error
// wraps inventory.ErrNotSupported if the driver or the GPU lacks the feature.
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
	return withCapability(failure(call, ret))
}
