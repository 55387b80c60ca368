package telemetry

import (
	"strconv"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// sendStatus sends the gauges of the daemon, computed from its status at each scrape.
func sendStatus(out *page, s status.Status) {
	sendDaemon(out, s)
	sendResources(out, s)
	for _, d := range s.GPUs {
		if d.GPU == "" {
			sendGPU(out, d, s.GPUs)
		}
	}
	for _, step := range s.Steps {
		stepReached.sendBool(out, step.Reached, step.Name)
		stepChange.sendTime(out, step.Since, step.Name)
	}
	if s.Validation != nil {
		for _, d := range s.Validation.Devices {
			cudaProven.sendBool(out, d.Result == status.Proven, d.UUID, d.Index)
		}
	}
}

func sendDaemon(out *page, s status.Status) {
	buildInfo.send(out, 1, s.Version)
	if s.Driver != "" {
		driverInfo.send(out, 1, s.Driver, s.CUDA)
	}
	ready.sendBool(out, s.Readiness.Ready)
	leads.sendBool(out, s.Lead.This)
	if !s.Lead.Since.IsZero() {
		leadsSince.sendTime(out, s.Lead.Since)
	}
	hardwareHeld.sendBool(out, s.Lead.PreviousLeader != "")
	if s.MIG != nil && s.MIG.State != "" {
		for _, state := range []string{"pending", "rebooting", "success", "failed"} {
			migLayoutState.sendBool(out, s.MIG.State == state, state)
		}
	}
	if s.Repair != nil {
		repairCount.send(out, float64(s.Repair.Repaired), "repaired")
		repairCount.send(out, float64(s.Repair.Failed), "failed")
		for _, step := range s.Repair.Steps {
			repairState.send(out, 1, step.UUID, strconv.Itoa(step.Index), string(step.State))
		}
	}
	if d := s.DriverChange; d != nil {
		for _, state := range driverchange.States {
			driverChangeState.sendBool(out, d.State == state, string(state))
		}
		driverChangeSince.sendTime(out, d.Since)
		driverChangePercent.send(out, float64(d.Percent))
	}
	quiesced.sendBool(out, s.Quiet)
	reexecutions.send(out, float64(s.Reexecutions))
	kubelets.send(out, float64(s.Kubelets))
	leftOut.send(out, float64(len(s.LeftOut)))
	planWarnings.send(out, float64(len(s.Warnings)))
	labelsWithheld.sendBool(out, s.LabelsError != "")

	if s.DRA != nil {
		sliceCount.send(out, float64(s.DRA.Slices))
		sliceDevices.send(out, float64(s.DRA.Devices))
		poolGeneration.send(out, float64(s.DRA.Generation))
		slicesPublished.sendBool(out, s.DRA.Problem == "")
		prepared := 0
		for _, c := range s.DRA.Claims {
			if c.Released == "" {
				prepared++
			}
		}
		claimCount.send(out, float64(prepared))
	}
	snapshotTime.sendTime(out, s.Looked)
	snapshotGeneration.send(out, float64(s.Generation))
	snapshotStale.sendBool(out, s.Stale != "")
	callsHanging.send(out, float64(s.Hanging))
	if len(s.Calls) > 0 {
		callOldest.sendTime(out, s.Calls[0].Since)
	}

	configGeneration.send(out, float64(s.ConfigGeneration))
	configSuccessful.sendBool(out, s.ConfigError == "")
	configSuccess.sendTime(out, s.ConfigLoaded)
}

func sendResources(out *page, s status.Status) {
	held, seen := map[string]int{}, map[[2]string]bool{}
	for _, h := range s.Holds {
		if device := [2]string{h.Resource, h.Device}; !seen[device] { // a device may have several holds
			seen[device] = true
			held[h.Resource]++
		}
	}
	for _, r := range s.Resources {
		devices.send(out, float64(r.Healthy), r.Name, "healthy")
		devices.send(out, float64(r.Devices-r.Healthy), r.Name, "unhealthy")
		devicesHeld.send(out, float64(held[r.Name]), r.Name)
		devicesDeparting.send(out, float64(len(r.Departing)), r.Name)
		resourcePlanned.sendBool(out, r.Planned, r.Name)
		resourceRegistered.sendBool(out, r.Serving(), r.Name)
		resourceAgreed.sendBool(out, r.Agreed, r.Name)
		resourceYielding.sendBool(out, r.Yielding(), r.Name)
	}
}

// states are the states of a GPU.
var states = []inventory.State{inventory.Unknown, inventory.Healthy, inventory.Suspect, inventory.Unhealthy,
	inventory.Lost}

// sendGPU sends the metrics of a GPU; all also has its MIG devices.
func sendGPU(out *page, g status.Device, all []status.Device) {
	minor := ""
	if g.Minor != nil {
		minor = strconv.Itoa(*g.Minor)
	}
	gpuInfo.send(out, 1, g.UUID, g.Index, busID(g.PCI), g.Model, minor)
	for _, state := range states {
		gpuHealth.sendBool(out, g.State == state.String(), g.UUID, g.Index, state.String())
	}
	gpuStateChange.sendTime(out, g.Since, g.UUID, g.Index)
	if g.UnitsMiB > 0 {
		gpuUnits.send(out, float64(g.UnitsMiB)*(1<<20), g.UUID, g.Index)
	}
	sendFaults(out, g.UUID, g.Index, g)
	parts := map[string][2]int{} // healthy and unhealthy MIG devices by profile
	for _, m := range all {
		if m.GPU != g.UUID {
			continue
		}
		sendFaults(out, g.UUID, g.Index, m)
		n, health := parts[m.Profile], 1
		if m.State == inventory.Healthy.String() || m.State == inventory.Suspect.String() {
			health = 0
		}
		n[health]++
		parts[m.Profile] = n
	}
	for profile, n := range ascending(parts) {
		for health, name := range []string{"healthy", "unhealthy"} {
			if n[health] > 0 {
				migDevices.send(out, float64(n[health]), g.UUID, g.Index, profile, name)
			}
		}
	}
}

// sendFaults sends the open faults of a GPU or of one of its MIG devices.
func sendFaults(out *page, uuid, index string, d status.Device) {
	_, mig, _ := strings.Cut(d.Index, ":")
	for _, f := range d.Faults {
		xid := ""
		if f.XID != 0 {
			xid = strconv.FormatUint(f.XID, 10)
		}
		gpuFault.send(out, 1, uuid, index, mig, f.Source, xid, f.Remedy)
	}
}

// busID converts a PCI address of sysfs, such as 0000:1b:00.0, to the format of NVML and
// dcgm-exporter: 00000000:1B:00.0.
func busID(pci string) string {
	if domain, _, _ := strings.Cut(pci, ":"); len(domain) == 4 {
		pci = "0000" + pci
	}
	return strings.ToUpper(pci)
}
