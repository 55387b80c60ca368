package health

import (
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// way is what it takes to close a fault.
type way int

// The ways back. All but the last two take passes: readings in a row that find the evidence gone.
const (
	byReadings way = iota // passes
	bySession             // passes in a session that was opened after the fault was seen last
	byReset               // passes after evidence that the GPU was reset
	byReboot              // a new boot ID: none within this process
	byOperator            // an operator's word
)

// wayBack says what closes the fault of the GPU.
func (p Policy) wayBack(g GPU, f Fault, facts Facts) way {
	rowsTell := f.Source == SourceXID && f.XID == remappingFailed && g.Reading.RowRemapFailure.Known &&
		p.Overrides.Rule(f.XID) != RuleFatal
	switch {
	case f.Source == SourceSilence || f.State == inventory.Suspect:
		return byReadings
	case p.Manual || f.Source == SourceFlapping || f.Cure == inventory.CureHardware && !rowsTell:
		return byOperator
	case f.State == inventory.Lost || f.Source == SourceReset:
		return bySession
	case f.Source == SourceXID && (rowsTell || p.spoken(g, f.XID, facts)):
		return byReadings
	case f.Cure == inventory.CureReboot:
		return byReboot
	case f.Source == SourceXID, f.Source.event() && !g.speaks():
		return byReset
	}
	return byReadings
}

// spoken reports whether the recovery action NONE means that nothing has to be done about the XID.
func (p Policy) spoken(g GPU, code uint64, facts Facts) bool {
	return g.speaks() && p.Overrides.Rule(code) != RuleFatal && Lookup(code).spokenFor(facts.Branch)
}

// A judge decides which faults of a GPU's devices a reading closes.
type judge struct {
	Policy
	facts Facts
	gpu   GPU
	now   time.Time
}

// passed returns d after a reading. Faults whose evidence is gone had a pass, the others start anew; those that had
// enough of them close.
func (j judge) passed(d Device, gone func(Fault) bool) Device {
	if len(d.Faults) == 0 {
		if d.Health.State == inventory.Unknown {
			return d.judged(j.now)
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

// proof returns what a fault needs besides passes: whether it is there, and since when, as only later passes count.
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
		return true // the fault was that there is no answer, and here is one
	}
	settle := j.Settle
	if f.State == inventory.Suspect {
		settle = j.SuspectSettle
	}
	_, ok := j.proof(f)
	return ok && f.passes >= j.Passes && j.now.Sub(f.passing) >= settle
}

// counts reports whether the cure of a fault is a recovery of the GPU itself: not if the driver acquitted it, nor if the
// fault was the fabric's or the one's who asks.
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

// recovered returns d, Healthy again, with the recovery on its record; or Unhealthy, if there were too many of them.
func (j judge) recovered(d Device) Device {
	old := func(t time.Time) bool { return j.now.Sub(t) >= j.FlapWindow }
	d.Recoveries = append(slices.DeleteFunc(slices.Clone(d.Recoveries), old), j.now)
	if len(d.Recoveries) <= j.FlapLimit {
		return d
	}
	return d.opened(Fault{
		Source: SourceFlapping, State: inventory.Unhealthy, Cure: inventory.CureHuman,
		Reason: because(inventory.CureHuman, "struck and cured %d times within %v", len(d.Recoveries), j.FlapWindow),
	}, j.now)
}
