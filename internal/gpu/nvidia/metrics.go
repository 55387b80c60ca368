package nvidia

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Metrics counts calls into the driver. Its methods do not block and are safe for concurrent use.
type Metrics interface {
	// DriverCalled counts a returned call, by the group of its function.
	DriverCalled(group string, took time.Duration)
	// DriverFailed counts a call that returned an error, such as GPU_IS_LOST, or 31 for a code
	// without a name here. A missing feature or element is no error.
	DriverFailed(group, code string)
}

// The groups of NVML functions.
const (
	groupSession   = "session"   // opening and closing NVML, and facts about the node
	groupInventory = "inventory" // GPUs and links
	groupMIG       = "mig"       // MIG devices
	groupReading   = "reading"   // health and measurements
	groupEvents    = "events"    // registration for events; waits are not timed
	groupUse       = "use"       // processes, and changes of GPUs
)

// groups are the groups by a part of the function name; the first match counts.
var groups = []struct{ group, names string }{
	{groupEvents, "EventSet RegisterEvents EventTypes"},
	{groupMIG, "Mig GpuInstance ComputeInstance DeviceGetAttributes"},
	{groupUse, "Processes Clear Reset Set ComputeMode"},
	{groupSession, "nvmlInit nvmlShutdown nvmlErrorString System"},
	{groupInventory, "NvLink Topology GetCount Handle UUID PciInfo MinorNumber GetName Architecture Capability"},
}

// groupOf maps functions to groups.
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

// codes are the names of errors. The driver's error text would cost another call.
var codes = map[nvml.Return]string{
	nvml.ERROR_UNINITIALIZED: "UNINITIALIZED", nvml.ERROR_NO_PERMISSION: "NO_PERMISSION",
	nvml.ERROR_INSUFFICIENT_POWER: "INSUFFICIENT_POWER", nvml.ERROR_DRIVER_NOT_LOADED: "DRIVER_NOT_LOADED",
	nvml.ERROR_IRQ_ISSUE: "IRQ_ISSUE", nvml.ERROR_LIBRARY_NOT_FOUND: "LIBRARY_NOT_FOUND",
	nvml.ERROR_CORRUPTED_INFOROM: "CORRUPTED_INFOROM", nvml.ERROR_GPU_IS_LOST: "GPU_IS_LOST",
	nvml.ERROR_RESET_REQUIRED: "RESET_REQUIRED", nvml.ERROR_LIB_RM_VERSION_MISMATCH: "LIB_RM_VERSION_MISMATCH",
	nvml.ERROR_IN_USE: "IN_USE", nvml.ERROR_MEMORY: "MEMORY", nvml.ERROR_NO_DATA: "NO_DATA",
	nvml.ERROR_UNKNOWN: "UNKNOWN",
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

// countCall counts a call. The duration of a wait for events is not counted.
func countCall(m Metrics, function string, took time.Duration, ret nvml.Return) {
	if m == nil || function == "" {
		return
	}
	group := groupOf[function]
	if !strings.HasSuffix(function, "EventSetWait") {
		m.DriverCalled(group, took)
	}
	switch ret {
	case nvml.SUCCESS, nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND, nvml.ERROR_TIMEOUT,
		nvml.ERROR_INVALID_ARGUMENT, nvml.ERROR_NOT_FOUND: // these end lists, such as the list of
	default:
		m.DriverFailed(group, codeOf(ret))
	}
}
