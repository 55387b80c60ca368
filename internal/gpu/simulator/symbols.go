package simulator

import "strings"

// symbolBranches are the first driver branches with each function, for functions missing from some
// supported drivers (R450 is the oldest). A function in neither this table nor handlers is in every
// library.
var symbolBranches = map[string]int{
	"nvmlDeviceGetPgpuMetadataString":             460,
	"nvmlDeviceGetNvLinkRemoteDeviceType":         470,
	"nvmlDeviceGetMemoryInfo_v2":                  510,
	"nvmlGpmQueryDeviceSupport":                   520,
	"nvmlGpmSampleAlloc":                          520,
	"nvmlGpmSampleFree":                           520,
	"nvmlGpmSampleGet":                            520,
	"nvmlGpmMigSampleGet":                         520,
	"nvmlGpmMetricsGet":                           520,
	"nvmlDeviceGetGpuFabricInfo":                  525,
	"nvmlDeviceGetSramEccErrorStatus":             535,
	"nvmlDeviceGetCurrentClocksEventReasons":      535,
	"nvmlDeviceGetNumaNodeId":                     550,
	"nvmlSystemEventSetCreate":                    575,
	"nvmlSystemEventSetFree":                      575,
	"nvmlSystemRegisterEvents":                    575,
	"nvmlSystemEventSetWait":                      575,
	"nvmlDeviceGetAddressingMode":                 580,
	"nvmlDeviceGetRepairStatus":                   580,
	"nvmlDeviceGetUnrepairableMemoryFlag_v1":      590,
	"nvmlDeviceGetGpuFabricInfo_v4":               615,
	"nvmlDeviceGetMemoryLimits_v1":                615,
	"nvmlDeviceGetBankRemapperStatus_v1":          615,
	"nvmlEventSetWait_v3":                         615,
	"nvmlEventSetRegisterGpuOperationalEvents_v1": 615,
}

// handlers are functions available in go-nvml only through values with a C handle. A simulated
// library lacks these functions.
var handlers = map[string]bool{
	"nvmlDeviceGetC2cModeInfoV":                     true,
	"nvmlDeviceGetGpuFabricInfoV":                   true,
	"nvmlDeviceGetGpuInstanceProfileInfoV":          true,
	"nvmlDeviceGetGpuInstanceProfileInfoByIdV":      true,
	"nvmlDeviceGetNvLinkInfo":                       true,
	"nvmlDeviceGetTemperatureV":                     true,
	"nvmlGpuInstanceGetComputeInstanceProfileInfoV": true,
}

// exists reports whether the library of a driver branch has a function.
func exists(symbol string, branch int) bool {
	return strings.HasPrefix(symbol, "nvml") && !handlers[symbol] && branch >= symbolBranches[symbol]
}
