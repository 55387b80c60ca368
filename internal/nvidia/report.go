package nvidia

import (
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// reportPause is how long a GPU's Report holds: nobody acts on it, so it is not read at every look of those that follow one
// another fast. It is a bit less than the time between two slow ones.
const reportPause = 25 * time.Second

// reportSymbols says which of the functions for a Report the library has.
type reportSymbols struct {
	clocksEventReasons, clocksThrottleReasons bool // from R535; until CUDA 14
	retiredPages, pcieReplays                 bool
	repairStatus                              bool // R580
	persistenceMode, energy                   bool
}

func lookUpReport(has func(name string) bool) reportSymbols {
	return reportSymbols{
		clocksEventReasons:    has("nvmlDeviceGetCurrentClocksEventReasons"),
		clocksThrottleReasons: has("nvmlDeviceGetCurrentClocksThrottleReasons"),
		retiredPages:          has("nvmlDeviceGetRetiredPagesPendingStatus"),
		pcieReplays:           has("nvmlDeviceGetPcieReplayCounter"),
		repairStatus:          has("nvmlDeviceGetRepairStatus"),
		persistenceMode:       has("nvmlDeviceGetPersistenceMode"),
		energy:                has("nvmlDeviceGetTotalEnergyConsumption"),
	}
}

// readReport adds the Report, of the last look but for what was scanned in this one unless it is time for a new one.
func (s *scanner) readReport(g *gpu, a *account, r *inventory.Reading) {
	if now := time.Now(); now.Sub(g.reported) >= reportPause {
		g.report, g.reported = s.report(g, a), now
		g.persistence, g.energy = s.evidence(g, a)
	}
	r.Persistence, r.Energy = g.persistence, g.energy
	r.Report = g.report
	if g.nvlink.active|g.nvlink.inactive != 0 {
		r.Report.NVLinks = inventory.Known(inventory.NVLinks{Active: g.nvlink.active, Inactive: g.nvlink.inactive})
	}
}

func (s *scanner) report(g *gpu, a *account) inventory.Report {
	var r inventory.Report
	has := s.has.report
	if has.retiredPages {
		if pending, ret := g.device.GetRetiredPagesPendingStatus(); a.extra("nvmlDeviceGetRetiredPagesPendingStatus", ret) {
			r.RetiredPagesPending = inventory.Known(pending == nvml.FEATURE_ENABLED)
		}
	}
	if has.repairStatus {
		if status, ret := g.device.GetRepairStatus(); a.extra("nvmlDeviceGetRepairStatus", ret) {
			r.RepairPending = inventory.Known(status.BChannelRepairPending|status.BTpcRepairPending != 0)
		}
	}
	if has.pcieReplays {
		if count, ret := g.device.GetPcieReplayCounter(); a.extra("nvmlDeviceGetPcieReplayCounter", ret) {
			r.PCIeReplays = inventory.Known(count)
		}
	}
	if reasons, ret := s.clockReasons(g); a.extra("nvmlDeviceGetCurrentClocksEventReasons", ret) {
		r.Clocks = inventory.Known(inventory.ClockReasons(reasons))
	}
	return r
}

// evidence reads what tells whether counters that fell prove a reset. It changes as slowly as a Report.
func (s *scanner) evidence(g *gpu, a *account) (persistence inventory.Signal[bool], energy inventory.Signal[uint64]) {
	if s.has.report.persistenceMode {
		if mode, ret := g.device.GetPersistenceMode(); a.extra("nvmlDeviceGetPersistenceMode", ret) {
			persistence = inventory.Known(mode == nvml.FEATURE_ENABLED)
		}
	}
	if s.has.report.energy {
		if mJ, ret := g.device.GetTotalEnergyConsumption(); a.extra("nvmlDeviceGetTotalEnergyConsumption", ret) {
			energy = inventory.Known(mJ)
		}
	}
	return persistence, energy
}

// clockReasons returns why the GPU's clocks are not higher, by the function that the library has.
func (s *scanner) clockReasons(g *gpu) (uint64, nvml.Return) {
	switch {
	case s.has.report.clocksEventReasons:
		return g.device.GetCurrentClocksEventReasons()
	case s.has.report.clocksThrottleReasons:
		return g.device.GetCurrentClocksThrottleReasons()
	}
	return 0, nvml.ERROR_FUNCTION_NOT_FOUND
}
