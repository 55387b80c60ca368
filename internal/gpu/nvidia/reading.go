package nvidia

import (
	"encoding/binary"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// readSignals reads the health signals of a GPU.
func (s *scanner) readSignals(_ *slot, g *gpu) {
	var a callResults
	var r inventory.Reading
	signals := []func(*gpu, *callResults, *inventory.Reading){
		s.readRecoveryAction, readAlive, readRemappedRows, readECC, readUnrepairableMemory, readSRAM, readFabric,
		readReport,
	}
	for _, read := range signals {
		if read(g, &a, &r); a.isUseless() {
			break
		}
	}
	r.Contact, r.Reason, r.Incomplete = a.contact, a.reason, a.incomplete
	g.reading, g.hasReading, g.isUnreturned = r, true, true
	if a.contact == inventory.ContactLost {
		g.results = a
	}
}

// readAlive makes a call that needs the GPU: the driver has no answer in its own memory.
func readAlive(g *gpu, a *callResults, _ *inventory.Reading) {
	_, ret := g.device.GetMemoryInfo()
	a.may("nvmlDeviceGetMemoryInfo", ret)
}

// readRecoveryAction reads field 230, before any call that a broken GPU may refuse. It does not
// call an older driver, whose answer for an unknown field says nothing about the GPU.
func (s *scanner) readRecoveryAction(g *gpu, a *callResults, r *inventory.Reading) {
	if s.versions.Branch() < inventory.RecoveryActionBranch {
		return
	}
	v, ret := g.device.GetFieldValue(nvml.FI_DEV_GET_GPU_RECOVERY_ACTION)
	if !a.may("nvmlDeviceGetFieldValues", ret) {
		return
	}
	if nvml.ValueType(v.ValueType) == nvml.VALUE_TYPE_UNSIGNED_INT {
		r.RecoveryAction = inventory.Known(inventory.RecoveryAction(binary.NativeEndian.Uint32(v.Value[:4])))
	}
}

func readRemappedRows(g *gpu, a *callResults, r *inventory.Reading) {
	rows, ret := g.device.GetRemappedRows()
	if a.signal("nvmlDeviceGetRemappedRows", ret) {
		r.RowRemapPending, r.RowRemapFailure = inventory.Known(rows.pending), inventory.Known(rows.failed)
	}
}

func readECC(g *gpu, a *callResults, r *inventory.Reading) {
	count, ret := g.device.GetUncorrectedErrors()
	if a.signal("nvmlDeviceGetTotalEccErrors", ret) {
		r.UncorrectedECC = inventory.Known(count)
	}
}

func readUnrepairableMemory(g *gpu, a *callResults, r *inventory.Reading) {
	status, ret := g.device.GetUnrepairableMemoryFlag()
	if a.signal("nvmlDeviceGetUnrepairableMemoryFlag_v1", ret) {
		r.UnrepairableMemory = inventory.Known(status.BUnrepairableMemory != 0)
	}
}

func readSRAM(g *gpu, a *callResults, r *inventory.Reading) {
	status, ret := g.device.GetSramEccErrorStatus()
	if a.extra("nvmlDeviceGetSramEccErrorStatus", ret) {
		r.SRAMThreshold = inventory.Known(status.BThresholdExceeded != 0)
	}
}

// readFabric reads the state in the NVSwitch fabric. The clique is known after the registration is
// complete.
func readFabric(g *gpu, a *callResults, r *inventory.Reading) {
	info, ret := g.device.GetGpuFabricInfo()
	if ret == nvml.SUCCESS {
		g.lastSeen.Clique = clique(info)
	}
	if a.signal("nvmlDeviceGetGpuFabricInfo", ret) && info.State != nvml.GPU_FABRIC_STATE_NOT_SUPPORTED {
		r.Fabric = inventory.Known(inventory.Fabric{
			State:   inventory.FabricState(info.State),
			Status:  info.Status,
			Faults:  fabricFaults(info.HealthMask),
			Summary: inventory.FabricSummary(info.HealthSummary),
		})
	}
}

// clique returns inventory.GPU.Clique. A fabric within one machine has a cluster UUID of zeros.
func clique(info nvml.GpuFabricInfo_v3) string {
	u := info.ClusterUuid
	if info.State != nvml.GPU_FABRIC_STATE_COMPLETED || nvml.Return(info.Status) != nvml.SUCCESS || u == [16]uint8{} {
		return ""
	}
	return fmt.Sprintf("%x-%x-%x-%x-%x.%d", u[:4], u[4:6], u[6:8], u[8:10], u[10:], info.CliqueId)
}

// fabricFaults decodes the driver's health mask. The mask of a healthy GPU is not zero: each field
// says "not supported", "fault" or "no fault".
func fabricFaults(mask uint32) inventory.FabricFault {
	var faults inventory.FabricFault
	for _, f := range []struct {
		fault inventory.FabricFault
		shift int
	}{
		{inventory.FabricDegradedBandwidth, nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW},
		{inventory.FabricRouteRecovery, nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY},
		{inventory.FabricRouteUnhealthy, nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY},
		{inventory.FabricAccessTimeout, nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY},
	} {
		// All four fields have the width of the first, and the same value for a fault.
		if mask>>f.shift&nvml.GPU_FABRIC_HEALTH_MASK_WIDTH_DEGRADED_BW == nvml.GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_TRUE {
			faults |= f.fault
		}
	}
	configuration := mask >> nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION &
		nvml.GPU_FABRIC_HEALTH_MASK_WIDTH_INCORRECT_CONFIGURATION
	switch {
	case configuration > nvml.GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_GPU_STATE_INVALID:
		faults |= inventory.FabricMisconfigured
	case configuration > nvml.GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NONE:
		// The faults have the order of the values of the field.
		const first = nvml.GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_INCORRECT_SYSGUID
		faults |= inventory.FabricWrongSystem << (configuration - first)
	}
	for _, f := range []struct {
		fault       inventory.FabricFault
		shift, isIt uint32
	}{
		{inventory.FabricUnassigned, nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_PARTITION_ASSIGNED,
			nvml.GPU_FABRIC_HEALTH_MASK_PARTITION_ASSIGNED_FALSE},
		{inventory.FabricManagerDisconnected, nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_GFM_STATE,
			nvml.GPU_FABRIC_HEALTH_MASK_GFM_STATE_DISCONNECTED},
	} {
		if mask>>f.shift&nvml.GPU_FABRIC_HEALTH_MASK_WIDTH_GFM_STATE == f.isIt { // both fields have this width
			faults |= f.fault
		}
	}
	return faults
}
