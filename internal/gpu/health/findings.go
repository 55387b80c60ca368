package health

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// findings returns the faults that a reading of g shows. Signals that are only reported, such as
// pending row remapping, give no fault. The recovery action counts whatever the other calls answer.
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
			Source: SourceLost, State: inventory.Lost, Cure: inventory.CureReboot,
			Reason: because(inventory.CureReboot, "the GPU cannot be reached (%s)", r.Reason),
		})
	case inventory.ContactResetRequired:
		return append(found, Fault{
			Source: SourceReset, State: inventory.Unhealthy, Cure: inventory.CureReset,
			Reason: because(inventory.CureReset, "the GPU refuses calls until it is reset (%s)", r.Reason),
		})
	case inventory.ContactFailing:
	}
	f, what := Fault{Source: SourceContact, Cure: inventory.CureReset}, fmt.Sprintf("calls to the GPU fail (%s)", r.Reason)
	if g.Health.State == inventory.Unknown { // as Suspect it would get new work, although it has not answered since
		f.State, f.Reason = inventory.Unhealthy, because(f.Cure, "%s", what)
		return append(found, f)
	}
	return append(found, p.suspect(f, what, now))
}

// gates reports whether a GPU with a recovery action gets no new work.
func (p Policy) gates(a inventory.RecoveryAction) bool {
	return a != inventory.RecoveryNone && (a != inventory.RecoveryIMEXDomain || p.IMEXGates)
}

// signals returns the faults that the signals of a GPU show, if the GPU answers.
func (p Policy) signals(g GPU, r inventory.Reading, now time.Time) []Fault {
	var found []Fault
	switch {
	case r.RowRemapFailure.Value:
		found = append(found, memoryFault("a row of the memory could not be remapped"))
	case r.UnrepairableMemory.Value:
		found = append(found, memoryFault("part of the memory cannot be repaired"))
	case r.SRAMThreshold.Value && g.any(Fault.uncorrected):
		found = append(found, memoryFault("the SRAM had more uncorrected errors than NVIDIA's threshold for a replacement"))
	}
	// MIG mode shuts down the NVLinks: the GPU is not part of the fabric, whatever state the driver
	// reports.
	if what := fabricFault(r.Fabric); what != "" && !p.FabricReported && !g.mig {
		found = append(found, Fault{
			Source: SourceFabric, State: inventory.Unhealthy, Cure: inventory.CureFabric,
			Reason: what,
		})
	}
	before, ecc := g.Reading.UncorrectedECC, r.UncorrectedECC
	// Without a recovery action a Suspect GPU would never be Healthy again. There, the XIDs that come
	// with such errors count.
	if !g.old && r.RecoveryAction.Known && before.Known && ecc.Value > before.Value {
		f := Fault{Source: SourceECC, Cure: inventory.CureReset}
		found = append(found, p.suspect(f, fmt.Sprintf("%d new uncorrected memory errors", ecc.Value-before.Value), now))
	}
	return found
}

// actionFault is the fault of a GPU whose driver asks for a recovery action.
func actionFault(a inventory.RecoveryAction) Fault {
	var cure inventory.Cure
	switch a {
	case inventory.RecoveryGPUReset, inventory.RecoveryBusReset:
		cure = inventory.CureReset
	case inventory.RecoveryNodeReboot, inventory.RecoverySystemReboot:
		cure = inventory.CureReboot
	case inventory.RecoveryDrainP2P:
		cure = inventory.CureDrainP2P
	case inventory.RecoveryDrainAndReset:
		cure = inventory.CureDrain
	case inventory.RecoveryIMEXDomain:
		cure = inventory.CureIMEX
	default: // one of a newer driver
		cure = inventory.CureHuman
	}
	return Fault{
		Source: SourceAction, State: inventory.Unhealthy, Cure: cure,
		Reason: because(cure, "the driver asks for recovery action %v", a),
	}
}

// memoryFault is the fault of memory that cannot be repaired.
func memoryFault(what string) Fault {
	return Fault{
		Source: SourceMemory, State: inventory.Unhealthy, Cure: inventory.CureHardware,
		Reason: because(inventory.CureHardware, "%s", what),
	}
}

// reportedFaults keep no GPU from work where the driver does not sum up the faults: a GPU may have
// no partition, or for a while no manager, and compute.
const reportedFaults = inventory.FabricUnassigned | inventory.FabricManagerDisconnected

// fabricAdvice says who has to do what about a fault, where it is not Fabric Manager that has to
// come up.
var fabricAdvice = map[inventory.FabricFault]string{
	inventory.FabricWrongSystem:         "the system has another GUID than the fabric expects: ask who installed the machine",
	inventory.FabricWrongChassis:        "the chassis has another serial number than the fabric expects: ask who installed the machine",
	inventory.FabricNoPartition:         "no partition has the GPU: have who manages the partitions of the fabric add it to one",
	inventory.FabricTooFewLinks:         "too few NVLinks of the GPU are up for its partition: check NVSwitches, cables and trays",
	inventory.FabricWrongFirmware:       "the firmware of the GPU does not fit the fabric: install the one that NVIDIA lists for it",
	inventory.FabricWrongPlace:          "the GPU is where the fabric expects none: check in which slot or tray it is",
	inventory.FabricInvalidGPU:          "the state of the GPU is not valid: stop all processes on the GPU and reset it",
	inventory.FabricMisconfigured:       "the configuration is wrong in a way that this program does not know: read Fabric Manager's log",
	inventory.FabricUnassigned:          "the GPU is not assigned to a partition: have who manages the partitions of the fabric assign it",
	inventory.FabricManagerDisconnected: "the manager of the fabric (GFM) is not connected: check that it runs, and the network to it",
}

// fabricReason names the faults of a GPU's way into the fabric, each with its advice; without one,
// Fabric Manager has to come up.
func fabricReason(faults inventory.FabricFault) string {
	var sentences []string
	advised := true
	for f := inventory.FabricFault(1); f != 0; f <<= 1 {
		if faults&f != 0 {
			advice, ok := fabricAdvice[f]
			sentences = append(sentences, cmp.Or(advice, strings.Join(f.Names(), "")))
			advised = advised && ok
		}
	}
	reason := "the connection to the NVSwitch fabric has faults: " + strings.Join(sentences, "; ")
	if advised {
		return reason
	}
	return because(inventory.CureFabric, "%s", reason)
}

// fabricFault says why a GPU cannot use the NVSwitch fabric, and what to do; empty if it can, or if
// it has no fabric.
func fabricFault(s inventory.Signal[inventory.Fabric]) string {
	f := s.Value
	switch {
	case !s.Known:
		return ""
	case f.State != inventory.FabricCompleted:
		return because(inventory.CureFabric,
			"registration with the NVSwitch fabric is %v, and CUDA does not start before it is completed", f.State)
	case f.Status != 0:
		return because(inventory.CureFabric, "registration with the NVSwitch fabric failed with NVML code %d", f.Status)
	case f.Summary == inventory.FabricSummaryUnhealthy && f.Faults == 0:
		return because(inventory.CureFabric, "the driver reports the connection to the NVSwitch fabric as unhealthy")
	case f.Summary == inventory.FabricSummaryUnhealthy || f.Summary == inventory.FabricSummaryUnknown &&
		f.Faults&^reportedFaults != 0:
		return fabricReason(f.Faults)
	} // where the driver has a summary, it has weighed the faults: with limited capacity the GPU can be used
	return ""
}
