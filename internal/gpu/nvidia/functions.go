package nvidia

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// functions are the NVML functions that this package calls. Only what is in this table is ever
// called.
var functions = []string{
	"nvmlInit", "nvmlShutdown", "nvmlErrorString", "nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion",
	"nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetPciInfo", "nvmlDeviceGetMinorNumber",
	"nvmlDeviceGetName", "nvmlDeviceGetBrand", "nvmlDeviceGetArchitecture", "nvmlDeviceGetCudaComputeCapability",
	"nvmlDeviceGetAddressingMode", "nvmlDeviceGetMemoryInfo",
	"nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex",
	"nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId", "nvmlDeviceGetAttributes",
	"nvmlDeviceGetGpuInstanceById", "nvmlDeviceGetGpuInstanceProfileInfo", "nvmlGpuInstanceGetInfo",
	"nvmlGpuInstanceGetComputeInstanceById", "nvmlGpuInstanceGetComputeInstanceProfileInfo", "nvmlComputeInstanceGetInfo",
	"nvmlDeviceGetGpuInstancePossiblePlacements", "nvmlDeviceGetGpuInstances", "nvmlGpuInstanceGetComputeInstances",
	"nvmlDeviceSetMigMode", "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceDestroy",
	"nvmlGpuInstanceCreateComputeInstance", "nvmlGpuInstanceCreateComputeInstanceWithPlacement", "nvmlComputeInstanceDestroy",
	"nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkVersion", "nvmlDeviceGetNvLinkRemoteDeviceType",
	"nvmlDeviceGetNvLinkRemotePciInfo", "nvmlDeviceGetTopologyCommonAncestor",
	"nvmlDeviceGetFieldValues", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetTotalEccErrors",
	"nvmlDeviceGetUnrepairableMemoryFlag_v1", "nvmlDeviceGetSramEccErrorStatus", "nvmlDeviceGetGpuFabricInfo",
	"nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetRetiredPagesPendingStatus", "nvmlDeviceGetRepairStatus",
	"nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetMaxPcieLinkGeneration",
	"nvmlDeviceGetMaxPcieLinkWidth", "nvmlDeviceGetPcieReplayCounter",
	"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons",
	"nvmlDeviceGetPersistenceMode", "nvmlDeviceGetTotalEnergyConsumption",
	"nvmlDeviceGetPowerManagementLimit", "nvmlDeviceGetPowerManagementDefaultLimit",
	"nvmlDeviceGetApplicationsClock", "nvmlDeviceGetDefaultApplicationsClock",
	"nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceResetApplicationsClocks", "nvmlDeviceClearEccErrorCounts",
	"nvmlSystemGetConfComputeState", "nvmlSystemGetConfComputeGpusReadyState", "nvmlDeviceGetVirtualizationMode",
	"nvmlDeviceGetComputeMode", "nvmlDeviceSetComputeMode", "nvmlDeviceGetMemoryLimits_v1",
	"nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetClockInfo",
	"nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetEnforcedPowerLimit",
	"nvmlDeviceGetUtilizationRates", "nvmlDeviceGetEncoderUtilization", "nvmlDeviceGetDecoderUtilization",
	"nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetGridLicensableFeatures", "nvmlDeviceGetPcieThroughput",
	"nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleFree", "nvmlGpmSampleGet", "nvmlGpmMigSampleGet",
	"nvmlGpmMetricsGet",
	"nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents", "nvmlEventSetCreate", "nvmlEventSetWait", "nvmlEventSetFree",
	"nvmlSystemEventSetCreate", "nvmlSystemRegisterEvents", "nvmlSystemEventSetWait", "nvmlSystemEventSetFree",
}

// versions are the newer versions of functions that go-nvml calls instead, where the library has
// them.
var versions = map[string][]string{
	"nvmlInit":                                   {"nvmlInit_v2"},
	"nvmlDeviceGetCount":                         {"nvmlDeviceGetCount_v2"},
	"nvmlDeviceGetHandleByIndex":                 {"nvmlDeviceGetHandleByIndex_v2"},
	"nvmlDeviceGetPciInfo":                       {"nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo_v3"},
	"nvmlDeviceGetAttributes":                    {"nvmlDeviceGetAttributes_v2"},
	"nvmlComputeInstanceGetInfo":                 {"nvmlComputeInstanceGetInfo_v2"},
	"nvmlDeviceGetNvLinkRemotePciInfo":           {"nvmlDeviceGetNvLinkRemotePciInfo_v2"},
	"nvmlDeviceGetGpuInstancePossiblePlacements": {"nvmlDeviceGetGpuInstancePossiblePlacements_v2"},
	"nvmlDeviceGetComputeRunningProcesses": {"nvmlDeviceGetComputeRunningProcesses_v2",
		"nvmlDeviceGetComputeRunningProcesses_v3"},
	"nvmlDeviceGetGridLicensableFeatures": {
		"nvmlDeviceGetGridLicensableFeatures_v2", "nvmlDeviceGetGridLicensableFeatures_v3", "nvmlDeviceGetGridLicensableFeatures_v4",
	},
	"nvmlEventSetWait": {"nvmlEventSetWait_v2"},
}

// needed are the functions without which no GPU can be served. Every driver since R418 has them.
var needed = []string{
	"nvmlInit", "nvmlShutdown", "nvmlErrorString", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount",
	"nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetPciInfo", "nvmlDeviceGetMinorNumber",
}

// lookUp returns which of the functions a library has. It is an error if one that is needed is
// missing.
func lookUp(symbol func(name string) error) (map[string]bool, error) {
	has := map[string]bool{}
	for _, function := range functions {
		found := func(name string) bool { return symbol(name) == nil }
		has[function] = found(function) || slices.ContainsFunc(versions[function], found)
	}
	missing := slices.DeleteFunc(slices.Clone(needed), func(function string) bool { return has[function] })
	if len(missing) > 0 {
		return nil, fmt.Errorf("%w: its library has no %s: install driver R418 or newer",
			inventory.ErrNoDriver, strings.Join(missing, ", "))
	}
	return has, nil
}

// No machine has more GPUs, and no GPU more MIG devices. What counts more is wrong.
const (
	maxGPUs       = 256
	maxMIGDevices = 64
)

// An api is NVML in one session. To call a function that the library lacks ends the process: called
// through the api and the handles that it returns, it answers ERROR_FUNCTION_NOT_FOUND.
type api struct {
	lib nvml.Interface
	has map[string]bool // of the functions in the table: those of the library
	// record is called for each call.
	record *callRecord

	mu       sync.Mutex
	supports map[question]bool // by the first answer
}

// A question is a call on one device.
type question struct {
	device   nvml.Device
	function string
	argument int // 0 for a function without one
}

func newAPI(lib nvml.Interface, has map[string]bool, r *callRecord) *api {
	return &api{lib: lib, has: has, record: r, supports: map[question]bool{}}
}

// of returns the same NVML, whose calls go into another record.
func (a *api) of(r *callRecord) *api { return newAPI(a.lib, a.has, r) }

// forget forgets what a GPU and its MIG devices did not support, so that they are asked again. What
// a GPU supports can change with its MIG devices, and the driver uses the handle of an earlier MIG
// device for a later one.
func (d device) forget() {
	d.api.mu.Lock()
	defer d.api.mu.Unlock()
	clear(d.api.supports) // each GPU has an api of its own
}

// invoke calls a function. It returns ERROR_UNKNOWN where go-nvml panics, as it does where the
// driver returns a length that cannot be.
func invoke[T any](a *api, function string, f func() (T, nvml.Return)) (value T, ret nvml.Return) {
	if !a.has[function] {
		return value, nvml.ERROR_FUNCTION_NOT_FOUND
	}
	ret = nvml.ERROR_UNKNOWN
	a.record.begin(function)
	defer func() {
		_ = recover()
		a.record.end(ret)
	}()
	return f()
}

// act calls a function that returns nothing else.
func act(a *api, function string, f func() nvml.Return) nvml.Return {
	_, ret := invoke(a, function, func() (struct{}, nvml.Return) { return struct{}{}, f() })
	return ret
}

// deviceFunctions are the functions that are about a device, by the names that go-nvml gives them.
var deviceFunctions = func() map[string]string {
	names := map[string]string{}
	for _, function := range functions {
		names[strings.TrimPrefix(function, "nvmlDevice")] = function
	}
	return names
}()

// command calls a function that changes something about a device.
func command(d device, function string, f func() nvml.Return) nvml.Return {
	return act(d.api, deviceFunctions[function], f)
}

// query calls a function that asks a device for something. A device whose first answer was
// ERROR_NOT_SUPPORTED is not asked again in this session: some such calls are slow, and in a
// virtual machine some leave a line in the kernel's log.
func query[T any](d device, function string, f func() (T, nvml.Return)) (T, nvml.Return) {
	return queryFor(d, function, 0, func(int) (T, nvml.Return) { return f() })
}

// queryFor is query with an argument, such as the number of a lane.
func queryFor[T any](d device, function string, argument int, f func(int) (T, nvml.Return)) (T, nvml.Return) {
	q := question{d.handle, deviceFunctions[function], argument}
	d.api.mu.Lock()
	supported, known := d.api.supports[q]
	d.api.mu.Unlock()
	if known && !supported {
		var none T
		return none, nvml.ERROR_NOT_SUPPORTED
	}
	value, ret := invoke(d.api, q.function, func() (T, nvml.Return) { return f(argument) })
	if !known && (ret == nvml.SUCCESS || ret == nvml.ERROR_NOT_SUPPORTED) {
		d.api.mu.Lock()
		d.api.supports[q] = ret == nvml.SUCCESS
		d.api.mu.Unlock()
	}
	return value, ret
}

func (a *api) SystemGetDriverVersion() (string, nvml.Return) {
	return invoke(a, "nvmlSystemGetDriverVersion", a.lib.SystemGetDriverVersion)
}

func (a *api) SystemGetCudaDriverVersion() (int, nvml.Return) {
	return invoke(a, "nvmlSystemGetCudaDriverVersion", a.lib.SystemGetCudaDriverVersion)
}

func (a *api) SystemGetConfComputeState() (nvml.ConfComputeSystemState, nvml.Return) {
	return invoke(a, "nvmlSystemGetConfComputeState", a.lib.SystemGetConfComputeState)
}

// SystemGetConfComputeGpusReadyState returns nvml.CC_ACCEPTING_CLIENT_REQUESTS_TRUE if the GPUs
// accept work.
func (a *api) SystemGetConfComputeGpusReadyState() (uint32, nvml.Return) {
	return invoke(a, "nvmlSystemGetConfComputeGpusReadyState", a.lib.SystemGetConfComputeGpusReadyState)
}

// DeviceGetCount returns how many GPUs there are. A driver that counts more than maxGPUs is wrong:
// then those count that have an index.
func (a *api) DeviceGetCount() (int, nvml.Return) {
	count, ret := invoke(a, "nvmlDeviceGetCount", a.lib.DeviceGetCount)
	if count <= maxGPUs {
		return count, ret
	}
	for i := range maxGPUs {
		if _, ret := a.DeviceGetHandleByIndex(i); ret == nvml.ERROR_INVALID_ARGUMENT {
			return i, nvml.SUCCESS
		}
	}
	return maxGPUs, nvml.SUCCESS
}

func (a *api) DeviceGetHandleByIndex(index int) (device, nvml.Return) {
	const function = "nvmlDeviceGetHandleByIndex"
	handle, ret := invoke(a, function, func() (nvml.Device, nvml.Return) { return a.lib.DeviceGetHandleByIndex(index) })
	return device{a, handle}, ret
}

// EventSetCreate returns a set. A library that lacks what a set is used with has no sets.
func (a *api) EventSetCreate() (nvml.EventSet, nvml.Return) {
	if !a.has["nvmlEventSetWait"] || !a.has["nvmlEventSetFree"] {
		return nil, nvml.ERROR_FUNCTION_NOT_FOUND
	}
	return invoke(a, "nvmlEventSetCreate", a.lib.EventSetCreate)
}

// SystemEventSetCreate fills in a set. A library that lacks what a set is used with has no sets.
func (a *api) SystemEventSetCreate(r *nvml.SystemEventSetCreateRequest) nvml.Return {
	for _, function := range []string{
		"nvmlSystemEventSetCreate", "nvmlSystemRegisterEvents", "nvmlSystemEventSetWait", "nvmlSystemEventSetFree",
	} {
		if !a.has[function] {
			return nvml.ERROR_FUNCTION_NOT_FOUND
		}
	}
	return a.lib.SystemEventSetCreate(r)
}
