package nvidia

import (
	"encoding/binary"
	"errors"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// read reads the health signals of a GPU that was seen.
func (s *scanner) read(uuid string) (inventory.Reading, error) {
	g, err := s.find(uuid)
	if err != nil {
		return inventory.Reading{}, err
	}
	return s.readSignals(g), nil
}

// find returns a GPU that was seen.
func (s *scanner) find(uuid string) (*gpu, error) {
	for _, g := range s.known {
		if g.seen.UUID == uuid && uuid != "" {
			return g, nil
		}
	}
	return nil, errors.New("this session has seen no such GPU")
}

func (s *scanner) readSignals(g *gpu) inventory.Reading {
	var a account
	var r inventory.Reading
	signals := []func(*gpu, *account, *inventory.Reading){
		s.readRecoveryAction, readAlive, readRemappedRows, readECC, s.readUnrepairableMemory, s.readSRAM, s.readFabric, s.readReport,
	}
	for _, read := range signals {
		if read(g, &a, &r); a.gone() {
			break
		}
	}
	r.Contact, r.Reason, r.Incomplete = a.contact, a.reason, a.incomplete
	return r
}

// readAlive makes a call that the driver cannot answer from memory of its own.
func readAlive(g *gpu, a *account, _ *inventory.Reading) {
	_, ret := g.device.GetMemoryInfo()
	a.may("nvmlDeviceGetMemoryInfo", ret)
}

// actionBranch is the first branch of the driver that has a recovery action.
const actionBranch = 565

// readRecoveryAction reads field 230, before a call that a sick GPU refuses can end the reading. An older driver is not
// asked: what it answers for a field that it does not know says nothing about the GPU.
func (s *scanner) readRecoveryAction(g *gpu, a *account, r *inventory.Reading) {
	if s.driver.Branch() < actionBranch {
		return
	}
	values := [1]nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
	if !a.may("nvmlDeviceGetFieldValues", g.device.GetFieldValues(values[:])) {
		return
	}
	v := values[0]
	if !a.may("nvmlDeviceGetFieldValues(recovery action)", nvml.Return(v.NvmlReturn)) {
		return
	}
	if nvml.ValueType(v.ValueType) == nvml.VALUE_TYPE_UNSIGNED_INT {
		r.RecoveryAction = inventory.Known(inventory.RecoveryAction(binary.NativeEndian.Uint32(v.Value[:4])))
	}
}

func readRemappedRows(g *gpu, a *account, r *inventory.Reading) {
	_, _, pending, failed, ret := g.device.GetRemappedRows()
	if a.signal("nvmlDeviceGetRemappedRows", ret) {
		r.RowRemapPending, r.RowRemapFailure = inventory.Known(pending), inventory.Known(failed)
	}
}

func readECC(g *gpu, a *account, r *inventory.Reading) {
	count, ret := g.device.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
	if a.signal("nvmlDeviceGetTotalEccErrors", ret) {
		r.UncorrectedECC = inventory.Known(count)
	}
}

func (s *scanner) readUnrepairableMemory(g *gpu, a *account, r *inventory.Reading) {
	if !s.has.unrepairableMemory {
		return
	}
	status, ret := g.device.GetUnrepairableMemoryFlag_v1()
	if a.signal("nvmlDeviceGetUnrepairableMemoryFlag_v1", ret) {
		r.UnrepairableMemory = inventory.Known(status.BUnrepairableMemory != 0)
	}
}

func (s *scanner) readSRAM(g *gpu, a *account, r *inventory.Reading) {
	if !s.has.sramStatus {
		return
	}
	status, ret := g.device.GetSramEccErrorStatus()
	if a.extra("nvmlDeviceGetSramEccErrorStatus", ret) {
		r.SRAMThreshold = inventory.Known(status.BThresholdExceeded != 0)
	}
}

// readFabric reads the state in the NVSwitch fabric, by the newest of the functions that the driver has.
func (s *scanner) readFabric(g *gpu, a *account, r *inventory.Reading) {
	var info nvml.GpuFabricInfo_v3
	var ret nvml.Return
	switch {
	case s.has.fabricVersioned:
		info, ret = g.device.GetGpuFabricInfoV().V3()
		if ret == nvml.ERROR_ARGUMENT_VERSION_MISMATCH || ret == nvml.ERROR_INVALID_ARGUMENT { // before R580
			var v2 nvml.GpuFabricInfo_v2
			v2, ret = g.device.GetGpuFabricInfoV().V2()
			info = nvml.GpuFabricInfo_v3{State: v2.State, Status: v2.Status, HealthMask: v2.HealthMask}
		}
	case s.has.fabric:
		var v1 nvml.GpuFabricInfo
		v1, ret = g.device.GetGpuFabricInfo()
		info = nvml.GpuFabricInfo_v3{State: v1.State, Status: v1.Status}
	default:
		return
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

// fabricFaults unpacks the driver's health mask. It is not zero on a healthy GPU: each field says "not supported",
// "fault" or "no fault".
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
		// All four fields have the width of the first, and its value for a fault.
		if mask>>f.shift&nvml.GPU_FABRIC_HEALTH_MASK_WIDTH_DEGRADED_BW == nvml.GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_TRUE {
			faults |= f.fault
		}
	}
	configuration := mask >> nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION &
		nvml.GPU_FABRIC_HEALTH_MASK_WIDTH_INCORRECT_CONFIGURATION
	if configuration > nvml.GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NONE {
		faults |= inventory.FabricMisconfigured
	}
	return faults
}
