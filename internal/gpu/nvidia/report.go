package nvidia

import (
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// reportPause is how long a GPU's Report holds: nobody acts on it, so it is not read at every look.
const reportPause = 25 * time.Second

// readReport adds the Report, of the last look but for what was scanned in this one unless it is
// time for a new one.
func readReport(g *gpu, a *callResults, r *inventory.Reading) {
	if now := time.Now(); now.Sub(g.reported) >= reportPause && !g.hurried {
		g.report, g.reported = readNewReport(g, a), now
		g.persistence, g.energy = readEvidence(g, a)
		if mode, ret := g.device.GetComputeMode(); a.extra("nvmlDeviceGetComputeMode", ret) {
			g.seen.ComputeMode = inventory.ComputeMode(mode)
		}
		readPermission(g, a)
	}
	r.Persistence, r.Energy = g.persistence, g.energy
	r.Report = g.report
}

// readPermission reads whether programs may use the GPU, and at full speed. What the driver does
// not tell stays as it was.
func readPermission(g *gpu, a *callResults) {
	switch state, ret := g.device.api.SystemGetConfComputeState(); {
	case !a.extra("nvmlSystemGetConfComputeState", ret):
	case state.CcFeature != nvml.CC_SYSTEM_FEATURE_ENABLED:
		g.seen.NotReady = false
	default:
		accepting, ret := g.device.api.SystemGetConfComputeGpusReadyState()
		if a.extra("nvmlSystemGetConfComputeGpusReadyState", ret) {
			g.seen.NotReady = accepting != nvml.CC_ACCEPTING_CLIENT_REQUESTS_TRUE
		}
	}
	mode, ret := g.device.GetVirtualizationMode()
	if a.extra("nvmlDeviceGetVirtualizationMode", ret) && mode == nvml.GPU_VIRTUALIZATION_MODE_VGPU {
		if licensed, ret := g.device.GetGridLicensed(); a.extra("nvmlDeviceGetGridLicensableFeatures", ret) {
			g.seen.Unlicensed = !licensed
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

// readEvidence reads what tells whether counters that fell prove a reset. It changes as slowly as a
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
