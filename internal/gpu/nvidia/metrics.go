package nvidia

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Metrics counts calls into the driver. Its methods return at once. They may be called by several
// goroutines.
type Metrics interface {
	// DriverCalled counts a call that returned, by the group of its function.
	DriverCalled(group string, took time.Duration)
	// DriverFailed counts a call that returned an error, such as GPU_IS_LOST, or 31 where it has no
	// name here. That the driver does not support something, or that there is no such thing, is none.
	DriverFailed(group, code string)
}

// The groups of NVML functions.
const (
	groupSession   = "session"   // opening and closing NVML, and what holds for the node
	groupInventory = "inventory" // which GPUs and links there are
	groupMIG       = "mig"       // MIG devices
	groupReading   = "reading"   // health and measurements
	groupEvents    = "events"    // registering for events; the time of waits for them is not counted
	groupUse       = "use"       // processes, and changes of a GPU
)

// groups are the groups by what the name of a function contains; the first that fits counts.
var groups = []struct{ group, names string }{
	{groupEvents, "EventSet RegisterEvents EventTypes"},
	{groupMIG, "Mig GpuInstance ComputeInstance DeviceGetAttributes"},
	{groupUse, "Processes Clear Reset Set ComputeMode"},
	{groupSession, "nvmlInit nvmlShutdown nvmlErrorString System"},
	{groupInventory, "NvLink Topology GetCount Handle UUID PciInfo MinorNumber GetName Architecture Capability"},
}

// groupOf has the group of each function.
var groupOf = func() map[string]string {
	of := map[string]string{}
	for _, function := range functions {
		of[function] = groupReading
		for _, g := range groups {
			if containsAny(function, strings.Fields(g.names)) {
				of[function] = g.group
				break
			}
		}
	}
	return of
}()

// codes are names of errors. The driver's own text of an error is a call into it.
var codes = map[nvml.Return]string{
	nvml.ERROR_UNINITIALIZED: "UNINITIALIZED", nvml.ERROR_NO_PERMISSION: "NO_PERMISSION",
	nvml.ERROR_INSUFFICIENT_POWER: "INSUFFICIENT_POWER", nvml.ERROR_DRIVER_NOT_LOADED: "DRIVER_NOT_LOADED",
	nvml.ERROR_IRQ_ISSUE: "IRQ_ISSUE", nvml.ERROR_LIBRARY_NOT_FOUND: "LIBRARY_NOT_FOUND",
	nvml.ERROR_CORRUPTED_INFOROM: "CORRUPTED_INFOROM", nvml.ERROR_GPU_IS_LOST: "GPU_IS_LOST",
	nvml.ERROR_RESET_REQUIRED: "RESET_REQUIRED", nvml.ERROR_LIB_RM_VERSION_MISMATCH: "LIB_RM_VERSION_MISMATCH",
	nvml.ERROR_IN_USE: "IN_USE", nvml.ERROR_MEMORY: "MEMORY", nvml.ERROR_NO_DATA: "NO_DATA", nvml.ERROR_UNKNOWN: "UNKNOWN",
}

func codeOf(ret nvml.Return) string {
	if name, known := codes[ret]; known {
		return name
	}
	return strconv.Itoa(int(ret))
}

func containsAny(text string, parts []string) bool {
	return slices.ContainsFunc(parts, func(part string) bool { return strings.Contains(text, part) })
}

// counted counts a call. A wait for events lasts until an event or its timeout, so its duration
// does not count.
func counted(m Metrics, function string, took time.Duration, ret nvml.Return) {
	if m == nil || function == "" {
		return
	}
	group := groupOf[function]
	if !strings.HasSuffix(function, "EventSetWait") {
		m.DriverCalled(group, took)
	}
	switch ret {
	case nvml.SUCCESS, nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND, nvml.ERROR_TIMEOUT,
		nvml.ERROR_INVALID_ARGUMENT, nvml.ERROR_NOT_FOUND: // the last two end lists, such as that of MIG devices
	default:
		m.DriverFailed(group, codeOf(ret))
	}
}
