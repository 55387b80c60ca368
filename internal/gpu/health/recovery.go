package health

import (
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// way is what it takes to close a fault.
type way int

// The ways back, each stricter than those before. All but the last two need passes: readings in a
// row in which the evidence is gone.
const (
	byReadings way = iota // passes
	bySession             // passes in a session that was opened after the fault was seen last
	byReset               // passes after evidence that the GPU was reset
	byReboot              // a new boot ID, so never within this process
	byOperator            // an operator clears it, or another proof
)

// wayBack says what closes the fault of the GPU.
func (p Policy) wayBack(g GPU, f Fault, facts Facts) way {
	rowsTell := f.Source == SourceXID && f.XID == remappingFailed && g.Reading.RowRemapFailure.Known &&
		p.Overrides.Rule(f.XID) != RuleFatal
	switch {
	case f.Source == SourceSilence || f.State == inventory.Suspect:
		return byReadings
	case p.Manual || f.Source == SourceFlapping || f.Source == SourceCUDA || f.Cure == inventory.CureHardware && !rowsTell:
		return byOperator
	case f.Source == SourceLost && f.Cure == inventory.CureReboot && !g.any(p.needsReset(g, facts)):
		return byReadings // it answered that it is lost, and answers otherwise now
	case f.State == inventory.Lost || f.Source == SourceReset:
		return bySession
	case f.Source == SourceXID && (rowsTell || p.covered(g, f.XID, facts)):
		return byReadings
	case f.Cure == inventory.CureReboot:
		return byReboot
	case f.Source == SourceXID, f.Source == SourceHangs, f.Source.event() && !g.hasAction():
		return byReset
	}
	return byReadings
}

// needsReset returns whether a fault other than a lost GPU closes by evidence that only a new
// session, or a reset, gives.
func (p Policy) needsReset(g GPU, facts Facts) func(Fault) bool {
	return func(f Fault) bool {
		if f.Source == SourceLost {
			return false
		}
		w := p.wayBack(g, f, facts)
		return w == bySession || w == byReset
	}
}

// covered reports whether the recovery action NONE means that nothing has to be done about the XID.
func (p Policy) covered(g GPU, code uint64, facts Facts) bool {
	if facts.Unmarked && (code == gspTimeout || code == gspError) {
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

// passed returns d after a reading. It is a pass for the faults whose evidence is gone; the others
// lose their passes. Faults with enough passes close.
func (j judge) passed(d Device, gone func(Fault) bool) Device {
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
		if proof, _ := j.proof(*f); f.passes == 0 || f.passing.Before(proof) {
			f.passes, f.passing = 0, j.now
		}
		f.passes++
	}
	gated, counts := !d.Health.Allocatable(), false
	d = d.closed(j.now, func(f Fault) bool {
		if !j.cured(f) {
			return false
		}
		counts = counts || j.counts(f)
		return true
	})
	if gated && counts && d.Health.State == inventory.Healthy {
		return j.recovered(d)
	}
	return d
}

// proof reports whether there is what a fault needs besides passes, and since when: only later
// passes count.
func (j judge) proof(f Fault) (since time.Time, ok bool) {
	switch j.wayBack(j.gpu, f, j.facts) {
	case byReadings:
		return time.Time{}, true
	case bySession:
		return j.facts.Opened, j.facts.Opened.After(f.Seen)
	case byReset:
		return j.gpu.reset, j.gpu.reset.After(f.Seen)
	default:
		return time.Time{}, false
	}
}

// cured reports whether a fault has all that it takes to close.
func (j judge) cured(f Fault) bool {
	if f.Source == SourceSilence {
		return true // the driver answers
	}
	settle := j.Settle
	if f.State == inventory.Suspect {
		settle = j.SuspectSettle
	}
	_, ok := j.proof(f)
	return ok && f.passes >= j.Passes && j.now.Sub(f.passing) >= settle
}

// counts reports whether the end of a fault counts for flapping: not if the recovery action was
// NONE without a reset, and not if the cause was the fabric, a slow call or a driver that did not
// answer.
func (j judge) counts(f Fault) bool {
	switch f.Source {
	case SourceLost, SourceReset:
		return true
	case SourceAction:
		return f.Cure != inventory.CureIMEX && f.Cure != inventory.CureDrainP2P
	default:
		return f.Source.event() && j.gpu.reset.After(f.Seen)
	}
}

// recovered returns d with one recovery more, and Unhealthy if there were too many of them.
func (j judge) recovered(d Device) Device {
	old := func(t time.Time) bool { return j.now.Sub(t) >= j.FlapWindow }
	d.Recoveries = append(slices.DeleteFunc(slices.Clone(d.Recoveries), old), j.now)
	if len(d.Recoveries) <= j.FlapLimit {
		return d
	}
	return d.opened(Fault{
		Source: SourceFlapping, State: inventory.Unhealthy, Cure: inventory.CureHuman,
		Reason: because(inventory.CureHuman, "the device became Unhealthy and Healthy again %d times within %v",
			len(d.Recoveries), j.FlapWindow),
	}, j.now)
}
