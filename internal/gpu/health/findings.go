package health

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// findings returns the faults found in a reading of g. Signals for display only, such as pending
// row remapping, are no faults. The recovery action counts even if other calls fail.
func (p Policy) findings(g GPU, r inventory.Reading, now time.Time) []Fault {
	var found []Fault
	if a := r.RecoveryAction.Value; p.gates(a) {
		found = append(found, actionFault(a))
	}
	switch r.Contact {
	case inventory.ContactGood:
		return append(found, p.signals(g, r, now)...)
	case inventory.ContactLost:
		return append(found, Fault{
			Source: SourceLost, State: inventory.Lost, Remedy: inventory.RemedyReboot,
			Reason: because(inventory.RemedyReboot, "the GPU cannot be reached (%s)", r.Reason),
		})
	case inventory.ContactResetRequired:
		return append(found, Fault{
			Source: SourceReset, State: inventory.Unhealthy, Remedy: inventory.RemedyReset,
			Reason: because(inventory.RemedyReset, "the GPU refuses calls until it is reset (%s)", r.Reason),
		})
	case inventory.ContactFailing:
	}
	f, what := Fault{Source: SourceContact, Remedy: inventory.RemedyReset},
		fmt.Sprintf("calls to the GPU fail (%s)", r.Reason)
	if g.Health.State == inventory.Unknown { // a Suspect GPU would get new work without an answer since
		f.State, f.Reason = inventory.Unhealthy, because(f.Remedy, "%s", what)
		return append(found, f)
	}
	return append(found, p.suspect(f, what, now))
}

// gates reports whether a recovery action keeps new work from the GPU.
func (p Policy) gates(a inventory.RecoveryAction) bool {
	return a != inventory.RecoveryNone && (a != inventory.RecoveryIMEXDomain || p.IMEXGates)
}

// signals returns the faults found in the signals of a GPU that answers.
func (p Policy) signals(g GPU, r inventory.Reading, now time.Time) []Fault {
	var found []Fault
	switch {
	case r.RowRemapFailure.Value:
		found = append(found, memoryFault("a row of the memory could not be remapped"))
	case r.UnrepairableMemory.Value:
		found = append(found, memoryFault("part of the memory cannot be repaired"))
	case r.SRAMThreshold.Value && g.any(Fault.uncorrected):
		found = append(found, memoryFault("the SRAM had more uncorrected errors than NVIDIA's threshold for a "+
			"replacement"))
	}
	// MIG mode shuts down the NVLinks: the GPU is not part of the fabric, whatever state the driver
	// reports.
	if what := fabricFault(r.Fabric); what != "" && !p.FabricReported && !g.migEnabled {
		found = append(found, Fault{
			Source: SourceFabric, State: inventory.Unhealthy, Remedy: inventory.RemedyFabric,
			Reason: what,
		})
	}
	before, ecc := g.Reading.UncorrectedECC, r.UncorrectedECC
	// Without a recovery action, a Suspect GPU could never become Healthy again. The XIDs sent with
	// such errors then count instead.
	if !g.preAmpere && r.RecoveryAction.Known && before.Known && ecc.Value > before.Value {
		f := Fault{Source: SourceECC, Remedy: inventory.RemedyReset}
		found = append(found, p.suspect(f, fmt.Sprintf("%d new uncorrected memory errors", ecc.Value-before.Value),
			now))
	}
	return found
}

// actionFault returns the fault for a recovery action of the driver.
func actionFault(a inventory.RecoveryAction) Fault {
	var remedy inventory.Remedy
	switch a {
	case inventory.RecoveryGPUReset, inventory.RecoveryBusReset:
		remedy = inventory.RemedyReset
	case inventory.RecoveryNodeReboot, inventory.RecoverySystemReboot:
		remedy = inventory.RemedyReboot
	case inventory.RecoveryDrainP2P:
		remedy = inventory.RemedyDrainP2P
	case inventory.RecoveryDrainAndReset:
		remedy = inventory.RemedyDrain
	case inventory.RecoveryIMEXDomain:
		remedy = inventory.RemedyIMEX
	default: // an action of a newer driver
		remedy = inventory.RemedyHuman
	}
	return Fault{
		Source: SourceAction, State: inventory.Unhealthy, Remedy: remedy,
		Reason: because(remedy, "the driver asks for recovery action %v", a),
	}
}

// memoryFault returns the fault for unrepairable memory.
func memoryFault(what string) Fault {
	return Fault{
		Source: SourceMemory, State: inventory.Unhealthy, Remedy: inventory.RemedyHardware,
		Reason: because(inventory.RemedyHardware, "%s", what),
	}
}

// toleratedFaults are the faults of a GPU that may still work if the driver has no summary: a GPU
// may compute without a partition, or for a while without a manager.
const toleratedFaults = inventory.FabricUnassigned | inventory.FabricManagerDisconnected

// fabricAdvice is the advice for each fault not remedied by starting Fabric Manager.
var fabricAdvice = map[inventory.FabricFault]string{
	inventory.FabricWrongSystem: "the system GUID is not the expected one: ask the installer of the machine",
	inventory.FabricWrongChassis: "the chassis serial number is not the expected one: " +
		"ask the installer of the machine",
	inventory.FabricNoPartition: "no partition has the GPU: " +
		"ask the administrator of the fabric to add it to one",
	inventory.FabricTooFewLinks: "too few NVLinks of the GPU are up for its partition: " +
		"check NVSwitches, cables and trays",
	inventory.FabricWrongFirmware: "the GPU's firmware does not match the fabric: " +
		"install the version that NVIDIA lists",
	inventory.FabricWrongPlace:    "the fabric expects no GPU in this place: check the slot or tray",
	inventory.FabricInvalidGPU:    "the state of the GPU is not valid: stop all processes on the GPU and reset it",
	inventory.FabricMisconfigured: "unknown misconfiguration: see Fabric Manager's log",
	inventory.FabricUnassigned: "the GPU is not assigned to a partition: " +
		"ask the administrator of the fabric to assign it",
	inventory.FabricManagerDisconnected: "the fabric manager (GFM) is not connected: " +
		"check that it is running and reachable",
}

// fabricReason returns a reason with the advice for each fault. A fault without advice is remedied
// by starting Fabric Manager.
func fabricReason(faults inventory.FabricFault) string {
	var sentences []string
	hasAdvice := true
	for f := inventory.FabricFault(1); f != 0; f <<= 1 {
		if faults&f != 0 {
			advice, ok := fabricAdvice[f]
			sentences = append(sentences, cmp.Or(advice, strings.Join(f.Names(), "")))
			hasAdvice = hasAdvice && ok
		}
	}
	reason := "the connection to the NVSwitch fabric has faults: " + strings.Join(sentences, "; ")
	if hasAdvice {
		return reason
	}
	return because(inventory.RemedyFabric, "%s", reason)
}

// fabricFault returns why a GPU cannot use the NVSwitch fabric, with the remedy; empty if the GPU
// can use the fabric or has none.
func fabricFault(s inventory.Signal[inventory.Fabric]) string {
	f := s.Value
	switch {
	case !s.Known:
		return ""
	case f.State != inventory.FabricCompleted:
		return because(inventory.RemedyFabric,
			"registration with the NVSwitch fabric is %v, and CUDA does not start before it is completed", f.State)
	case f.Status != 0:
		return because(inventory.RemedyFabric, "registration with the NVSwitch fabric failed with NVML code %d",
			f.Status)
	case f.Summary == inventory.FabricSummaryUnhealthy && f.Faults == 0:
		return because(inventory.RemedyFabric, "the driver reports the connection to the NVSwitch fabric as unhealthy")
	case f.Summary == inventory.FabricSummaryUnhealthy || f.Summary == inventory.FabricSummaryUnknown &&
		f.Faults&^toleratedFaults != 0:
		return fabricReason(f.Faults)
	} // a driver's summary already weighs the faults: with limited capacity the GPU is usable
	return ""
}
