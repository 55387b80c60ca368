package health

import (
	"fmt"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// findings returns the faults that a reading of g shows. What it does not act on is only kept: pending remappings do
// not keep a GPU from work. The driver's recovery action counts whatever the other calls answer.
func (p Policy) findings(g GPU, r inventory.Reading, now time.Time) []Fault {
	var found []Fault
	if a := r.RecoveryAction.Value; p.demands(a) {
		found = append(found, demanded(a))
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
	if g.Health.State == inventory.Unknown { // a suspicion would give it to work, although it has not answered since
		f.State, f.Reason = inventory.Unhealthy, because(f.Cure, "%s", what)
		return append(found, f)
	}
	return append(found, p.suspect(f, what, now))
}

// demands reports whether a recovery action keeps a GPU from work.
func (p Policy) demands(a inventory.RecoveryAction) bool {
	return a != inventory.RecoveryNone && (a != inventory.RecoveryIMEXDomain || p.IMEXGates)
}

// signals returns the faults that the signals of a GPU show that answers.
func (p Policy) signals(g GPU, r inventory.Reading, now time.Time) []Fault {
	var found []Fault
	switch {
	case r.RowRemapFailure.Value:
		found = append(found, worn("a row of the memory could not be remapped"))
	case r.UnrepairableMemory.Value:
		found = append(found, worn("part of the memory cannot be repaired"))
	case r.SRAMThreshold.Value && g.any(Fault.uncorrected):
		found = append(found, worn("the chip's own memories had more uncorrected errors than a part may have"))
	}
	// Multi-instance mode shuts the NVLinks: whatever the driver says of the fabric then, the GPU has no part in it.
	if what := fabricFault(r.Fabric); what != "" && !p.FabricReported && !g.mig {
		found = append(found, Fault{
			Source: SourceFabric, State: inventory.Unhealthy, Cure: inventory.CureFabric,
			Reason: because(inventory.CureFabric, "%s", what),
		})
	}
	before, ecc := g.Reading.UncorrectedECC, r.UncorrectedECC
	// Without a recovery action nobody would acquit the GPU; there, the XIDs that come with such errors speak for them.
	if !g.old && r.RecoveryAction.Known && before.Known && ecc.Value > before.Value {
		f := Fault{Source: SourceECC, Cure: inventory.CureReset}
		found = append(found, p.suspect(f, fmt.Sprintf("%d new uncorrected memory errors", ecc.Value-before.Value), now))
	}
	return found
}

// demanded is the fault of a GPU whose driver asks for a recovery action.
func demanded(a inventory.RecoveryAction) Fault {
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

// worn is the fault of memory that is used up.
func worn(what string) Fault {
	return Fault{
		Source: SourceMemory, State: inventory.Unhealthy, Cure: inventory.CureHardware,
		Reason: because(inventory.CureHardware, "%s", what),
	}
}

// fabricFault says what keeps a GPU out of the NVSwitch fabric; empty if nothing does, or if it has no fabric.
func fabricFault(s inventory.Signal[inventory.Fabric]) string {
	f := s.Value
	switch {
	case !s.Known:
		return ""
	case f.State != inventory.FabricCompleted:
		return fmt.Sprintf("registration with the NVSwitch fabric is %v, and CUDA does not start before it is completed", f.State)
	case f.Status != 0:
		return fmt.Sprintf("registration with the NVSwitch fabric failed with NVML code %d", f.Status)
	case f.Summary == inventory.FabricSummaryUnhealthy && f.Faults == 0:
		return "the driver calls the way into the NVSwitch fabric unhealthy"
	case f.Summary == inventory.FabricSummaryUnhealthy || f.Summary == inventory.FabricSummaryUnknown && f.Faults != 0:
		return "the way into the NVSwitch fabric has faults: " + faultNames(f.Faults)
	} // a driver that sums the faults up has weighed them: with limited capacity the GPU can be used
	return ""
}

func faultNames(set inventory.FabricFault) string {
	var names []string
	for i, name := range []string{"degraded bandwidth", "route recovery", "route unhealthy", "access timeout", "misconfigured"} {
		if set&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}
