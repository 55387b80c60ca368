package simulator

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// readings are the health readings of a GPU; the zero value is a healthy GPU.
type readings struct {
	recovery          nvml.DeviceGpuRecoveryAction
	energy            uint64        // in mJ, since the last reset
	energyTime        time.Duration // time of the last reading of energy, since the node was created
	uncorrectedErrors uint64        // memory errors since the last reset
	aggregateErrors   uint64        // and since the GPU was created
	remappedRows      int           // memory rows
	remapPending      bool
	remapFailure      bool
	unrepairable      bool
	// SRAM errors passed the threshold for a replacement. Package health finds a fault only
	// together with an XID of uncorrected errors.
	sramThreshold bool
	isThrottled   bool
	replays       int

	fabric    fabric
	cut       map[int]bool // broken NVLinks
	processes int          // computing processes
	clients   []string     // pod UIDs of the processes with the GPU open
	smiReset  string       // behaviour of nvidia-smi for a reset
}

// A fabric is the state of the GPU's registration with the NVSwitch fabric, relative to a complete
// one.
type fabric struct {
	behind uint8 // missing steps
	status nvml.Return
}

// A field is a value of GetFieldValues: the first branch that has it, and its reader.
type field struct {
	since int
	read  func(n *Node, g *gpu, scope uint32) (uint64, nvml.Return)
	kind  nvml.ValueType // 0 means VALUE_TYPE_UNSIGNED_INT
}

// fields are the simulated field values, by ID.
var fields = map[uint32]field{
	nvml.FI_DEV_MEMORY_TEMP:       {since: 1, read: memoryTemperature},
	nvml.FI_DEV_ECC_SBE_VOL_TOTAL: {since: 1, read: plainField(func(*gpu) uint64 { return 0 })},
	nvml.FI_DEV_ECC_SBE_AGG_TOTAL: {since: 1, read: plainField(func(*gpu) uint64 { return 0 })},
	nvml.FI_DEV_ECC_DBE_VOL_TOTAL: {since: 1, read: plainField(func(g *gpu) uint64 { return g.uncorrectedErrors })},
	nvml.FI_DEV_ECC_DBE_AGG_TOTAL: {since: 1, read: plainField(func(g *gpu) uint64 { return g.aggregateErrors })},
	nvml.FI_DEV_NVLINK_LINK_COUNT: {since: 1, read: plainField(func(g *gpu) uint64 {
		return uint64(g.spec.model.NVLink.Links)
	})},
	nvml.FI_DEV_REMAPPED_COR: {since: 450, read: remapField(func(*gpu) uint64 { return 0 })},
	nvml.FI_DEV_REMAPPED_UNC: {since: 450,
		read: remapField(func(g *gpu) uint64 { return uint64(g.remappedRows) })},
	nvml.FI_DEV_REMAPPED_PENDING: {since: 450,
		read: remapField(func(g *gpu) uint64 { return bit(g.remapPending) })},
	nvml.FI_DEV_REMAPPED_FAILURE: {since: 450,
		read: remapField(func(g *gpu) uint64 { return bit(g.remapFailure) })},
	nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_TX: {since: 450, read: nvlinkField(400),
		kind: nvml.VALUE_TYPE_UNSIGNED_LONG_LONG},
	nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_RX: {since: 450, read: nvlinkField(390),
		kind: nvml.VALUE_TYPE_UNSIGNED_LONG_LONG},
	nvml.FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL:   {since: 450, read: linkErrors(3)},
	nvml.FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL: {since: 450, read: linkErrors(1)},
	nvml.FI_DEV_NVLINK_GET_STATE: {since: 530, read: func(n *Node, g *gpu, scope uint32) (uint64, nvml.Return) {
		if scope >= uint32(g.spec.model.NVLink.Links) {
			return 0, nvml.ERROR_NOT_SUPPORTED
		}
		return bit(n.activeLocked(g, int(scope), n.profile.ends[g.slot][scope])), nvml.SUCCESS
	}},
	nvml.FI_DEV_IS_RESETLESS_MIG_SUPPORTED: {since: 525, read: func(_ *Node, g *gpu, _ uint32) (uint64, nvml.Return) {
		if len(g.spec.model.MIG) == 0 {
			return 0, nvml.ERROR_NOT_SUPPORTED
		}
		return bit(!g.resets()), nvml.SUCCESS
	}},
	nvml.FI_DEV_GET_GPU_RECOVERY_ACTION: {since: 565,
		read: plainField(func(g *gpu) uint64 { return uint64(g.recovery) })},
}

// linkErrors returns a reader of an error count of all NVLinks: each for every cut NVLink.
func linkErrors(each int) func(*Node, *gpu, uint32) (uint64, nvml.Return) {
	return func(_ *Node, g *gpu, _ uint32) (uint64, nvml.Return) {
		if g.spec.model.NVLink.Links == 0 {
			return 0, nvml.ERROR_NOT_SUPPORTED
		}
		return uint64(each * len(g.cut)), nvml.SUCCESS
	}
}

// plainField returns a reader of a field of every GPU.
func plainField(read func(*gpu) uint64) func(*Node, *gpu, uint32) (uint64, nvml.Return) {
	return func(_ *Node, g *gpu, _ uint32) (uint64, nvml.Return) { return read(g), nvml.SUCCESS }
}

// remapField returns a reader of a field of the row remapper.
func remapField(read func(*gpu) uint64) func(*Node, *gpu, uint32) (uint64, nvml.Return) {
	return func(_ *Node, g *gpu, _ uint32) (uint64, nvml.Return) {
		if !remaps(g) {
			return 0, nvml.ERROR_NOT_SUPPORTED
		}
		return read(g), nvml.SUCCESS
	}
}

// bit returns 1 for true.
func bit(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

// remaps reports whether the driver reports the GPU's row remapper: since Ampere, and without MIG
// instances.
func remaps(g *gpu) bool {
	return g.spec.model.architecture >= nvml.DEVICE_ARCH_AMPERE && len(g.layout.instances) == 0
}

// GetFieldValues fills in the values of fields, each with its own return code.
func (d device) GetFieldValues(values []nvml.FieldValue) nvml.Return {
	_, ret := ask(d, "DeviceGetFieldValues", func(g *gpu) (struct{}, nvml.Return) {
		if len(values) == 0 {
			return struct{}{}, nvml.ERROR_INVALID_ARGUMENT
		}
		for i := range values {
			v := &values[i]
			f, ok := fields[v.FieldId]
			if !ok || d.session.driver.branch < f.since {
				v.NvmlReturn = uint32(nvml.ERROR_NOT_SUPPORTED)
				continue
			}
			value, ret := f.read(d.session.node, g, v.ScopeId)
			v.NvmlReturn = uint32(ret)
			v.ValueType = uint32(cmp.Or(f.kind, nvml.VALUE_TYPE_UNSIGNED_INT))
			binary.NativeEndian.PutUint64(v.Value[:], value)
		}
		return struct{}{}, nvml.SUCCESS
	})
	return ret
}

// GetRemappedRows returns the numbers of corrected and uncorrected remapped rows, and whether a
// remapping is pending or failed.
func (d device) GetRemappedRows() (int, int, bool, bool, nvml.Return) {
	type rows struct {
		remappedRows    int
		pending, failed bool
	}
	r, ret := ask(d, "DeviceGetRemappedRows", func(g *gpu) (rows, nvml.Return) {
		if !remaps(g) {
			return rows{}, nvml.ERROR_NOT_SUPPORTED
		}
		return rows{g.remappedRows, g.remapPending, g.remapFailure}, nvml.SUCCESS
	})
	return 0, r.remappedRows, r.pending, r.failed, ret
}

// GetUnrepairableMemoryFlag_v1 returns whether the memory has a fault beyond remapping.
func (d device) GetUnrepairableMemoryFlag_v1() (nvml.UnrepairableMemoryStatus_v1, nvml.Return) {
	return ask(d, "DeviceGetUnrepairableMemoryFlag_v1", func(g *gpu) (nvml.UnrepairableMemoryStatus_v1, nvml.Return) {
		if g.spec.model.architecture < nvml.DEVICE_ARCH_HOPPER {
			return nvml.UnrepairableMemoryStatus_v1{}, nvml.ERROR_NOT_SUPPORTED
		}
		return nvml.UnrepairableMemoryStatus_v1{BUnrepairableMemory: uint32(bit(g.unrepairable))}, nvml.SUCCESS
	})
}

// GetSramEccErrorStatus returns whether SRAM errors passed the threshold for a replacement.
func (d device) GetSramEccErrorStatus() (nvml.EccSramErrorStatus, nvml.Return) {
	return ask(d, "DeviceGetSramEccErrorStatus", func(g *gpu) (nvml.EccSramErrorStatus, nvml.Return) {
		if g.spec.model.architecture < nvml.DEVICE_ARCH_AMPERE {
			return nvml.EccSramErrorStatus{}, nvml.ERROR_NOT_SUPPORTED
		}
		return nvml.EccSramErrorStatus{BThresholdExceeded: uint32(bit(g.sramThreshold))}, nvml.SUCCESS
	})
}

// GetRetiredPagesPendingStatus returns whether the next reset will retire memory pages: the
// predecessor of remapped rows before Ampere.
func (d device) GetRetiredPagesPendingStatus() (nvml.EnableState, nvml.Return) {
	return ask(d, "DeviceGetRetiredPagesPendingStatus", func(g *gpu) (nvml.EnableState, nvml.Return) {
		if g.spec.model.architecture >= nvml.DEVICE_ARCH_AMPERE {
			return nvml.FEATURE_DISABLED, nvml.ERROR_NOT_SUPPORTED
		}
		return nvml.EnableState(bit(g.remapPending)), nvml.SUCCESS
	})
}

// GetRepairStatus returns that no repair is pending.
func (d device) GetRepairStatus() (nvml.RepairStatus, nvml.Return) {
	return ask(d, "DeviceGetRepairStatus", func(*gpu) (nvml.RepairStatus, nvml.Return) {
		return nvml.RepairStatus{}, nvml.SUCCESS
	})
}

// The PCIe link of each GPU.
const pcieGeneration, pcieWidth = 4, 16

// GetPcieReplayCounter returns the number of repeated PCIe packets.
func (d device) GetPcieReplayCounter() (int, nvml.Return) {
	return ask(d, "DeviceGetPcieReplayCounter", func(g *gpu) (int, nvml.Return) { return g.replays, nvml.SUCCESS })
}

// GetTotalEnergyConsumption returns the energy in mJ used since the last reset.
func (d device) GetTotalEnergyConsumption() (uint64, nvml.Return) {
	return ask(d, "DeviceGetTotalEnergyConsumption", func(g *gpu) (uint64, nvml.Return) {
		if g.spec.model.architecture < nvml.DEVICE_ARCH_VOLTA {
			return 0, nvml.ERROR_NOT_SUPPORTED
		}
		return d.session.node.energyLocked(g), nvml.SUCCESS
	})
}

// GetCurrentClocksEventReasons returns the reasons for low clocks, such as an idle GPU.
func (d device) GetCurrentClocksEventReasons() (uint64, nvml.Return) {
	return ask(d, "DeviceGetCurrentClocksEventReasons", clockReasons)
}

// GetCurrentClocksThrottleReasons returns the same under its old name.
func (d device) GetCurrentClocksThrottleReasons() (uint64, nvml.Return) {
	return ask(d, "DeviceGetCurrentClocksThrottleReasons", clockReasons)
}

func clockReasons(g *gpu) (uint64, nvml.Return) {
	if g.isThrottled {
		return nvml.ClocksThrottleReasonHwSlowdown | nvml.ClocksThrottleReasonHwThermalSlowdown, nvml.SUCCESS
	}
	return nvml.ClocksEventReasonGpuIdle, nvml.SUCCESS
}

// GetTotalEccErrors returns the number of uncorrected memory errors; there are never corrected
// ones.
func (d device) GetTotalEccErrors(kind nvml.MemoryErrorType, counter nvml.EccCounterType) (uint64, nvml.Return) {
	return ask(d, "DeviceGetTotalEccErrors", func(g *gpu) (uint64, nvml.Return) {
		switch {
		case kind == nvml.MEMORY_ERROR_TYPE_CORRECTED:
			return 0, nvml.SUCCESS
		case counter == nvml.VOLATILE_ECC:
			return g.uncorrectedErrors, nvml.SUCCESS
		}
		return g.aggregateErrors, nvml.SUCCESS
	})
}

// ClearEccErrorCounts resets a count of memory errors.
func (d device) ClearEccErrorCounts(counter nvml.EccCounterType) nvml.Return {
	_, ret := ask(d, "DeviceClearEccErrorCounts", func(g *gpu) (struct{}, nvml.Return) {
		g.uncorrectedErrors = 0
		if counter == nvml.AGGREGATE_ECC {
			g.aggregateErrors = 0
		}
		return struct{}{}, nvml.SUCCESS
	})
	return ret
}

// GetGpuFabricInfo returns the state of the GPU's registration with the NVSwitch fabric.
func (d device) GetGpuFabricInfo() (nvml.GpuFabricInfo, nvml.Return) {
	return ask(d, "DeviceGetGpuFabricInfo", func(g *gpu) (nvml.GpuFabricInfo, nvml.Return) {
		if g.spec.model.architecture < nvml.DEVICE_ARCH_HOPPER || len(d.session.node.profile.NVSwitches) == 0 {
			return nvml.GpuFabricInfo{}, nvml.ERROR_NOT_SUPPORTED
		}
		info := nvml.GpuFabricInfo{State: nvml.GPU_FABRIC_STATE_COMPLETED - g.fabric.behind,
			Status: uint32(g.fabric.status)}
		if f := d.session.node.profile.Fabric; f != nil {
			cluster, _ := hex.DecodeString(strings.ReplaceAll(f.Cluster, "-", "")) // Load has parsed it
			info.CliqueId = f.Clique
			copy(info.ClusterUuid[:], cluster)
		}
		return info, nvml.SUCCESS
	})
}

// GetCurrPcieLinkGeneration returns the generation of a GPU that is not idle.
func (d device) GetCurrPcieLinkGeneration() (int, nvml.Return) {
	return ask(d, "DeviceGetCurrPcieLinkGeneration", func(*gpu) (int, nvml.Return) {
		return pcieGeneration, nvml.SUCCESS
	})
}

// GetCurrPcieLinkWidth returns lanes.
func (d device) GetCurrPcieLinkWidth() (int, nvml.Return) {
	return ask(d, "DeviceGetCurrPcieLinkWidth", func(*gpu) (int, nvml.Return) { return pcieWidth, nvml.SUCCESS })
}

// GetMaxPcieLinkGeneration returns the generation of the slot.
func (d device) GetMaxPcieLinkGeneration() (int, nvml.Return) {
	return ask(d, "DeviceGetMaxPcieLinkGeneration", func(*gpu) (int, nvml.Return) {
		return pcieGeneration, nvml.SUCCESS
	})
}

// GetMaxPcieLinkWidth returns lanes.
func (d device) GetMaxPcieLinkWidth() (int, nvml.Return) {
	return ask(d, "DeviceGetMaxPcieLinkWidth", func(*gpu) (int, nvml.Return) { return pcieWidth, nvml.SUCCESS })
}
