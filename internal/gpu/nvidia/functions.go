package nvidia

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// functions are all NVML functions called by this package.
var functions = []string{
	"nvmlInit", "nvmlShutdown", "nvmlErrorString", "nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion",
	"nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetPciInfo",
	"nvmlDeviceGetMinorNumber",
	"nvmlDeviceGetName", "nvmlDeviceGetBrand", "nvmlDeviceGetArchitecture", "nvmlDeviceGetCudaComputeCapability",
	"nvmlDeviceGetAddressingMode", "nvmlDeviceGetMemoryInfo",
	"nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex",
	"nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId", "nvmlDeviceGetAttributes",
	"nvmlDeviceGetGpuInstanceById", "nvmlDeviceGetGpuInstanceProfileInfo", "nvmlGpuInstanceGetInfo",
	"nvmlGpuInstanceGetComputeInstanceById", "nvmlGpuInstanceGetComputeInstanceProfileInfo",
	"nvmlComputeInstanceGetInfo",
	"nvmlDeviceGetGpuInstancePossiblePlacements", "nvmlDeviceGetGpuInstances", "nvmlGpuInstanceGetComputeInstances",
	"nvmlDeviceSetMigMode", "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceDestroy",
	"nvmlGpuInstanceCreateComputeInstance", "nvmlGpuInstanceCreateComputeInstanceWithPlacement",
	"nvmlComputeInstanceDestroy",
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
	"nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents", "nvmlEventSetCreate", "nvmlEventSetWait",
	"nvmlEventSetFree",
	"nvmlSystemEventSetCreate", "nvmlSystemRegisterEvents", "nvmlSystemEventSetWait", "nvmlSystemEventSetFree",
}

// versions are newer versions of functions. go-nvml prefers them if the library has them.
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
		"nvmlDeviceGetGridLicensableFeatures_v2", "nvmlDeviceGetGridLicensableFeatures_v3",
		"nvmlDeviceGetGridLicensableFeatures_v4",
	},
	"nvmlEventSetWait": {"nvmlEventSetWait_v2"},
}

// requiredFunctions are the functions needed to serve any GPU. Every driver since R418 has them.
var requiredFunctions = []string{
	"nvmlInit", "nvmlShutdown", "nvmlErrorString", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount",
	"nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetPciInfo", "nvmlDeviceGetMinorNumber",
}

// lookUp returns the functions that a library has. It fails if a needed function is missing.
func lookUp(symbol func(name string) error) (map[string]bool, error) {
	has := map[string]bool{}
	for _, function := range functions {
		found := func(name string) bool { return symbol(name) == nil }
		has[function] = found(function) || slices.ContainsFunc(versions[function], found)
	}
	missing := slices.DeleteFunc(slices.Clone(requiredFunctions), func(function string) bool { return has[function] })
	if len(missing) > 0 {
		return nil, fmt.Errorf("%w: its library has no %s: install driver R418 or newer",
			inventory.ErrNoDriver, strings.Join(missing, ", "))
	}
	return has, nil
}

// No machine has more GPUs, and no GPU more MIG devices. A larger count is an error of the driver.
const (
	maxGPUs       = 256
	maxMIGDevices = 64
)

// An api is NVML in one session. Calling a missing function would end the process. Through the api
// and its handles, a missing function returns ERROR_FUNCTION_NOT_FOUND.
type api struct {
	lib nvml.Interface
	has map[string]bool // functions of the table in the library
	// record records each call.
	record *callRecord

	mu       sync.Mutex
	supports map[question]bool // from the first answer
}

// A question is a call about one device.
type question struct {
	device   nvml.Device
	function string
	argument int // 0 for a function without argument
}

func newAPI(lib nvml.Interface, has map[string]bool, r *callRecord) *api {
	return &api{lib: lib, has: has, record: r, supports: map[question]bool{}}
}

// withRecord returns the same NVML with another record of calls.
func (a *api) withRecord(r *callRecord) *api { return newAPI(a.lib, a.has, r) }

// forget discards the unsupported calls of a GPU and its MIG devices, for another try. The
// supported calls of a GPU can change with its MIG devices, and the driver reuses the handles of
// MIG devices.
func (d device) forget() {
	d.api.mu.Lock()
	defer d.api.mu.Unlock()
	clear(d.api.supports) // each GPU has its own api
}

// invoke calls a function. It returns ERROR_UNKNOWN after a panic of go-nvml, for example for an
// impossible length from the driver.
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

// act calls a function without further results.
func act(a *api, function string, f func() nvml.Return) nvml.Return {
	_, ret := invoke(a, function, func() (struct{}, nvml.Return) { return struct{}{}, f() })
	return ret
}

// deviceFunctions are the functions about a device, by their names in go-nvml.
var deviceFunctions = func() map[string]string {
	names := map[string]string{}
	for _, function := range functions {
		names[strings.TrimPrefix(function, "nvmlDevice")] = function
	}
	return names
}()

// command calls a function to change a device.
func command(d device, function string, f func() nvml.Return) nvml.Return {
	return act(d.api, deviceFunctions[function], f)
}

// query calls a function to read from a device. After ERROR_NOT_SUPPORTED, the call is not repeated
// for the device in this session: some of these calls are slow, and some write a line to the kernel
// log of a virtual machine.
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

// DeviceGetCount returns the number of GPUs. If the driver counts more than maxGPUs, only the GPUs
// with an index count.
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

// EventSetCreate returns a set, unless the library lacks a function to use it.
func (a *api) EventSetCreate() (nvml.EventSet, nvml.Return) {
	if !a.has["nvmlEventSetWait"] || !a.has["nvmlEventSetFree"] {
		return nil, nvml.ERROR_FUNCTION_NOT_FOUND
	}
	return invoke(a, "nvmlEventSetCreate", a.lib.EventSetCreate)
}

// SystemEventSetCreate fills in a set, unless the library lacks a function to use it.
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
