package nvidia

import (
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// reportPause is the time between two Reports of a GPU: nothing depends on them.
const reportPause = 25 * time.Second

// readReport adds the Report: a new one if due, otherwise the last Report with the values of this
// scan.
func readReport(g *gpu, a *callResults, r *inventory.Reading) {
	if now := time.Now(); now.Sub(g.reportTime) >= reportPause && !g.skipReport {
		g.report, g.reportTime = readNewReport(g, a), now
		g.persistence, g.energy = readEvidence(g, a)
		if mode, ret := g.device.GetComputeMode(); a.extra("nvmlDeviceGetComputeMode", ret) {
			g.lastSeen.ComputeMode = inventory.ComputeMode(mode)
		}
		readPermission(g, a)
	}
	r.Persistence, r.Energy = g.persistence, g.energy
	r.Report = g.report
}

// readPermission reads whether programs may use the GPU, and at full speed. Values missing in the
// driver stay unchanged.
func readPermission(g *gpu, a *callResults) {
	switch state, ret := g.device.api.SystemGetConfComputeState(); {
	case !a.extra("nvmlSystemGetConfComputeState", ret):
	case state.CcFeature != nvml.CC_SYSTEM_FEATURE_ENABLED:
		g.lastSeen.NotReady = false
	default:
		accepting, ret := g.device.api.SystemGetConfComputeGpusReadyState()
		if a.extra("nvmlSystemGetConfComputeGpusReadyState", ret) {
			g.lastSeen.NotReady = accepting != nvml.CC_ACCEPTING_CLIENT_REQUESTS_TRUE
		}
	}
	mode, ret := g.device.GetVirtualizationMode()
	if a.extra("nvmlDeviceGetVirtualizationMode", ret) && mode == nvml.GPU_VIRTUALIZATION_MODE_VGPU {
		if licensed, ret := g.device.GetGridLicensed(); a.extra("nvmlDeviceGetGridLicensableFeatures", ret) {
			g.lastSeen.Unlicensed = !licensed
		}
	}
}

func readNewReport(g *gpu, a *callResults) inventory.Report {
	var r inventory.Report
	if pending, ret := g.device.GetRetiredPagesPendingStatus(); a.extra("nvmlDeviceGetRetiredPagesPendingStatus", ret) {
		r.RetiredPagesPending = inventory.Known(pending == nvml.FEATURE_ENABLED)
	}
	if status, ret := g.device.GetRepairStatus(); a.extra("nvmlDeviceGetRepairStatus", ret) {
		r.RepairPending = inventory.Known(status.BChannelRepairPending|status.BTpcRepairPending != 0)
	}
	if count, ret := g.device.GetPcieReplayCounter(); a.extra("nvmlDeviceGetPcieReplayCounter", ret) {
		r.PCIeReplays = inventory.Known(count)
	}
	if reasons, ret := g.device.GetCurrentClocksEventReasons(); a.extra("nvmlDeviceGetCurrentClocksEventReasons", ret) {
		r.Clocks = inventory.Known(inventory.ClockReasons(reasons))
	}
	return r
}

// readEvidence reads whether decreased counters prove a reset. The values change as slowly as a
// Report.
func readEvidence(g *gpu, a *callResults) (persistence inventory.Signal[bool], energy inventory.Signal[uint64]) {
	if mode, ret := g.device.GetPersistenceMode(); a.extra("nvmlDeviceGetPersistenceMode", ret) {
		persistence = inventory.Known(mode == nvml.FEATURE_ENABLED)
	}
	if mJ, ret := g.device.GetTotalEnergyConsumption(); a.extra("nvmlDeviceGetTotalEnergyConsumption", ret) {
		energy = inventory.Known(mJ)
	}
	return persistence, energy
}
