package nvidia

/*
#cgo LDFLAGS: -ldl
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

typedef int (*list_processes)(void *device, unsigned int *count, void *first);
typedef int (*list_placements)(void *device, unsigned int profile, void *first, unsigned int *count);

// find returns a function of the library loaded by go-nvml with RTLD_GLOBAL, or NULL.
static void *find(const char *name) { return dlsym(RTLD_DEFAULT, name); }

static int processes(void *f, void *device, unsigned int *count, void *first) {
	return ((list_processes)f)(device, count, first);
}

static int placements(void *f, void *device, unsigned int profile, void *first, unsigned int *count) {
	return ((list_placements)f)(device, profile, first, count);
}
*/
import "C"

import (
	"math"
	"reflect"
	"unsafe"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// go-nvml allocates lists of the length requested by the driver, and slices them by the length
// returned by the driver. A wrong length would cost gigabytes, or end the process. The functions of
// this file offer the driver at most maxListed elements.
const (
	firstListed = 64   // enough for most calls
	maxListed   = 4096 // processes of a GPU, or placements of a MIG profile
)

// readList calls fill with a growing slice until the list fits. fill returns the number of
// elements, even without enough room.
func readList[T any](fill func(room []T) (count int, ret nvml.Return)) ([]T, nvml.Return) {
	for length := firstListed; ; length = maxListed {
		room := make([]T, length)
		count, ret := fill(room)
		switch {
		case ret == nvml.ERROR_INSUFFICIENT_SIZE && length < maxListed:
		case ret != nvml.SUCCESS:
			return nil, ret
		case count > length: // too many elements to fit, no success
			return nil, nvml.ERROR_UNKNOWN
		default:
			return room[:count:count], ret
		}
	}
}

// handleOf returns the library's handle of a device; nil for a simulated device.
func handleOf(d nvml.Device) unsafe.Pointer {
	v := reflect.ValueOf(d)
	if v.Kind() != reflect.Struct {
		return nil
	}
	if handle := v.FieldByName("Handle"); handle.IsValid() && handle.Kind() == reflect.Pointer {
		return handle.UnsafePointer()
	}
	return nil
}

// symbol returns a function of the loaded library; nil if it is missing. name must end with a zero
// byte.
func symbol(name string) unsafe.Pointer {
	return C.find((*C.char)(unsafe.Pointer(unsafe.StringData(name))))
}

// computeProcesses returns the processes with a compute context on a GPU, from the newest version
// of the function.
func computeProcesses(d nvml.Device) ([]nvml.ProcessInfo, nvml.Return) {
	handle := handleOf(d)
	if handle == nil {
		return d.GetComputeRunningProcesses()
	}
	for _, name := range []string{"nvmlDeviceGetComputeRunningProcesses_v3\x00",
		"nvmlDeviceGetComputeRunningProcesses_v2\x00"} {
		if f := symbol(name); f != nil {
			return readList(func(room []nvml.ProcessInfo) (int, nvml.Return) { return fillProcesses(f, handle, room) })
		}
	}
	f := symbol("nvmlDeviceGetComputeRunningProcesses\x00")
	if f == nil {
		return nil, nvml.ERROR_FUNCTION_NOT_FOUND
	}
	found, ret := readList(func(room []nvml.ProcessInfo_v1) (int, nvml.Return) {
		return fillProcesses(f, handle, room)
	})
	processes := make([]nvml.ProcessInfo, len(found))
	for i, p := range found {
		processes[i] = nvml.ProcessInfo{
			Pid: p.Pid, UsedGpuMemory: p.UsedGpuMemory, GpuInstanceId: math.MaxUint32,
			ComputeInstanceId: math.MaxUint32,
		}
	}
	return processes, ret
}

func fillProcesses[T any](f, device unsafe.Pointer, room []T) (int, nvml.Return) {
	count := C.uint(len(room))
	ret := nvml.Return(C.processes(f, device, &count, unsafe.Pointer(&room[0])))
	return int(count), ret
}

// possiblePlacements returns the possible placements of a GPU instance profile, from the newest
// version of the function.
func possiblePlacements(d nvml.Device, info *nvml.GpuInstanceProfileInfo) ([]nvml.GpuInstancePlacement, nvml.Return) {
	handle := handleOf(d)
	if handle == nil {
		return d.GetGpuInstancePossiblePlacements(info)
	}
	f := symbol("nvmlDeviceGetGpuInstancePossiblePlacements_v2\x00")
	if f == nil {
		f = symbol("nvmlDeviceGetGpuInstancePossiblePlacements\x00")
	}
	if f == nil {
		return nil, nvml.ERROR_FUNCTION_NOT_FOUND
	}
	var count C.uint // the driver ignores the length of the buffer: ask for the count first
	if ret := nvml.Return(C.placements(f, handle, C.uint(info.Id), nil, &count)); ret != nvml.SUCCESS {
		return nil, ret
	}
	if count == 0 {
		return nil, nvml.SUCCESS
	}
	if count > maxListed {
		return nil, nvml.ERROR_UNKNOWN
	}
	room := make([]nvml.GpuInstancePlacement, count)
	ret := nvml.Return(C.placements(f, handle, C.uint(info.Id), unsafe.Pointer(&room[0]), &count))
	if int(count) > len(room) {
		return nil, nvml.ERROR_UNKNOWN
	}
	return room[:count], ret
}
