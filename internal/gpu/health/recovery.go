package health

import (
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// condition is the condition for closing a fault.
type condition int

// The conditions, from lenient to strict. All but the last two need passes: consecutive readings
// without evidence.
const (
	byReadings condition = iota // passes
	bySession                   // passes in a session newer than the last evidence
	byReset                     // passes after evidence of a reset
	byReboot                    // a new boot ID, so never within this process
	byOperator                  // an operator clears the fault, or another CUDA check succeeds
)

// conditionFor returns the condition for closing the fault of the GPU.
func (p Policy) conditionFor(g GPU, f Fault, facts Facts) condition {
	rowsTell := f.Source == SourceXID && f.XID == remappingFailed && g.Reading.RowRemapFailure.Known &&
		p.Overrides.Rule(f.XID) != RuleFatal
	switch {
	case f.Source == SourceSilence || f.State == inventory.Suspect:
		return byReadings
	case p.Manual || f.Source == SourceFlapping || f.Source == SourceCUDA ||
		f.Remedy == inventory.RemedyHardware && !rowsTell:
		return byOperator
	case f.Source == SourceLost && f.Remedy == inventory.RemedyReboot && !g.any(p.needsReset(g, facts)):
		return byReadings // the GPU was lost by its own answer, and now answers otherwise
	case f.State == inventory.Lost || f.Source == SourceReset:
		return bySession
	case f.Source == SourceXID && (rowsTell || p.isCovered(g, f.XID, facts)):
		return byReadings
	case f.Remedy == inventory.RemedyReboot:
		return byReboot
	case f.Source == SourceXID, f.Source == SourceHangs, f.Source.event() && !g.hasAction():
		return byReset
	}
	return byReadings
}

// needsReset returns a function that reports whether a fault, other than a lost GPU, closes only
// with a new session or a reset.
func (p Policy) needsReset(g GPU, facts Facts) func(Fault) bool {
	return func(f Fault) bool {
		if f.Source == SourceLost {
			return false
		}
		w := p.conditionFor(g, f, facts)
		return w == bySession || w == byReset
	}
}

// isCovered reports whether the recovery action NONE means that the XID needs no action.
func (p Policy) isCovered(g GPU, code uint64, facts Facts) bool {
	if facts.GSPUnmarked && (code == gspTimeout || code == gspError) {
		return false
	}
	return g.hasAction() && p.Overrides.Rule(code) != RuleFatal && Lookup(code).coveredBy(facts.Branch)
}

// A judge decides which faults a reading closes.
type judge struct {
	Policy
	facts Facts
	gpu   GPU
	now   time.Time
}

// afterReading returns d after a reading. The reading is a pass for faults without evidence; the
// other faults lose their passes. Faults with enough passes close.
func (j judge) afterReading(d Device, gone func(Fault) bool) Device {
	if len(d.Faults) == 0 {
		if d.Health.State == inventory.Unknown {
			return d.withVerdict(j.now)
		}
		return d
	}
	d.Faults = slices.Clone(d.Faults)
	for i := range d.Faults {
		f := &d.Faults[i]
		if !gone(*f) {
			f.passes = 0
			continue
		}
		if proof, _ := j.evidence(*f); f.passes == 0 || f.firstPass.Before(proof) {
			f.passes, f.firstPass = 0, j.now
		}
		f.passes++
	}
	wasWithheld, counts := !d.Health.Allocatable(), false
	d = d.withoutFaults(j.now, func(f Fault) bool {
		if !j.canClose(f) {
			return false
		}
		counts = counts || j.countsAsRecovery(f)
		return true
	})
	if wasWithheld && counts && d.Health.State == inventory.Healthy {
		return j.withRecovery(d)
	}
	return d
}

// evidence reports whether the evidence needed besides passes exists, and since when: only later
// passes count.
func (j judge) evidence(f Fault) (since time.Time, ok bool) {
	switch j.conditionFor(j.gpu, f, j.facts) {
	case byReadings:
		return time.Time{}, true
	case bySession:
		return j.facts.Opened, j.facts.Opened.After(f.LastSeen)
	case byReset:
		return j.gpu.lastReset, j.gpu.lastReset.After(f.LastSeen)
	default:
		return time.Time{}, false
	}
}

// canClose reports whether a fault meets all conditions for closing.
func (j judge) canClose(f Fault) bool {
	if f.Source == SourceSilence {
		return true // the driver answers
	}
	settle := j.Settle
	if f.State == inventory.Suspect {
		settle = j.SuspectSettle
	}
	_, ok := j.evidence(f)
	return ok && f.passes >= j.Passes && j.now.Sub(f.firstPass) >= settle
}

// countsAsRecovery reports whether the end of a fault counts for flapping. It does not if the
// recovery action was NONE without a reset, or after a fault of the fabric, a slow call or a driver
// without an answer.
func (j judge) countsAsRecovery(f Fault) bool {
	switch f.Source {
	case SourceLost, SourceReset:
		return true
	case SourceAction:
		return f.Remedy != inventory.RemedyIMEX && f.Remedy != inventory.RemedyDrainP2P
	default:
		return f.Source.event() && j.gpu.lastReset.After(f.LastSeen)
	}
}

// withRecovery returns d with one more recovery, and Unhealthy after too many.
func (j judge) withRecovery(d Device) Device {
	old := func(t time.Time) bool { return j.now.Sub(t) >= j.FlapWindow }
	d.Recoveries = append(slices.DeleteFunc(slices.Clone(d.Recoveries), old), j.now)
	if len(d.Recoveries) <= j.FlapLimit {
		return d
	}
	return d.withFault(Fault{
		Source: SourceFlapping, State: inventory.Unhealthy, Remedy: inventory.RemedyHuman,
		Reason: because(inventory.RemedyHuman, "the device became Unhealthy and Healthy again %d times within %v",
			len(d.Recoveries), j.FlapWindow),
	}, j.now)
}
