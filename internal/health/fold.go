package health

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// FoldEvent folds what the driver said into what is known of the GPU. It returns false, and g as it was, if the event
// is attributed to a MIG device that g does not have.
//
// An event opens faults and never closes one: whatever follows from it is told by the next reading. An XID that both the
// driver's event and the kernel's log tell counts once.
func (p Policy) FoldEvent(g GPU, e inventory.Event, facts Facts, now time.Time) (GPU, bool) {
	f, accused := p.accusation(g, e, facts, now)
	// Only the recovery action tells that what struck a MIG device concerns its GPU. Without it the catalog does.
	wide := e.GI != inventory.Unattributed && !g.verdicts(facts) && (f.Source != SourceXID || Lookup(f.XID).wide())
	next, hit := g.struck(e, func(d Device) Device {
		d = d.counted(e, now)
		if accused && !wide {
			d = d.opened(f, now)
		}
		return d
	})
	if !hit {
		return g, false
	}
	if accused && wide {
		next.Device = next.opened(f, now)
	}
	heard, twin := g.heard.with(e, now)
	if twin {
		next = g
	}
	next.heard = heard
	return next, true
}

// accusation returns the fault that an event opens, and false if it only asks for a look.
func (p Policy) accusation(g GPU, e inventory.Event, facts Facts, now time.Time) (Fault, bool) {
	f := Fault{State: inventory.Unhealthy, Cure: inventory.CureReset}
	switch e.Kind {
	case inventory.EventXID:
		return p.verdict(g, e.XID, facts, now)
	case inventory.EventFatalPoison:
		f.Source = SourcePoison
		f.Reason = because(f.Cure, "poisoned memory was consumed and not contained")
		return f, true
	case inventory.EventNonFatalPoison:
		f.Source = SourcePoison
		return p.suspect(f, "poisoned memory was consumed", now), true
	case inventory.EventDRAMRetirementFailure:
		f.Source = SourceRetirement
		return p.suspect(f, "memory could not be retired", now), true
	case inventory.EventUnavailable:
		f.Source = SourceUnavailable
		return p.suspect(f, "the driver said that the GPU is unavailable", now), true
	default: // they say that something can be read, or are only counted
		return Fault{}, false
	}
}

// FoldSilence folds in that nobody could ask the GPU how it is; why says what is wrong with the one who asks.
func (p Policy) FoldSilence(g GPU, why string, now time.Time) GPU {
	f := Fault{Source: SourceSilence, State: inventory.Unknown, Cure: inventory.CureHuman, Reason: why}
	if g.Health.Allocatable() {
		f.limit = now.Add(p.UnknownGrace)
	}
	g.answers = false
	g.Device = g.opened(f, now)
	return g
}

// FoldHang folds in that a call to the GPU does not return, while the driver answers other calls. The call is named as
// NVML names it.
func (p Policy) FoldHang(g GPU, call string, now time.Time) GPU {
	g.answers = false
	g.Device = g.opened(Fault{
		Source: SourceHang, State: inventory.Unhealthy, Cure: inventory.CureReset,
		Reason: fmt.Sprintf("the driver does not return from %s for this GPU: the kernel log says why; "+
			"if it stays so, reset the GPU or restart the node", call),
	}, now)
	return g
}

// FoldAbsence folds in that the driver counts the GPU but cannot tell it any more; why is what was left out instead.
func (p Policy) FoldAbsence(g GPU, why string, now time.Time) GPU {
	g.answers = false
	g.Device = g.opened(Fault{
		Source: SourceLost, State: inventory.Lost, Cure: inventory.CureReconnect,
		Reason: because(inventory.CureReconnect, "the driver cannot find the GPU any more (%s)", why),
	}, now)
	return g
}

// FoldReset folds in that the GPU was reset or that its driver was loaded anew. It is evidence, not yet a cure.
func (p Policy) FoldReset(g GPU, now time.Time) GPU {
	g.reset = now
	return g
}

// FoldCleared folds in that the daemon itself cleared the counts of memory errors, or tried to: what was counted before says
// nothing about what is counted next, neither of a reset nor of new errors.
func (p Policy) FoldCleared(g GPU) GPU {
	g.Reading.UncorrectedECC = inventory.Signal[uint64]{}
	return g
}

// FoldReading folds a reading in: it opens the faults that it shows, and counts as a pass for the other ones.
func (p Policy) FoldReading(g GPU, r inventory.Reading, facts Facts, now time.Time) GPU {
	found := p.findings(g, r, now)
	g.reset = p.resetSeen(g, r, facts, now)
	g.answers = r.Contact == inventory.ContactGood
	if g.answers {
		g.Reading, g.read, g.session = r, true, facts.Opened
	}
	if len(found) == 0 && !g.any(func(Fault) bool { return true }) && g.Health.State == inventory.Healthy {
		return g
	}
	bad := func(s Source) bool { return slices.ContainsFunc(found, func(f Fault) bool { return f.Source == s }) }
	gone := func(f Fault) bool {
		if f.Source == SourceSilence {
			return true
		}
		// What an event said stands while the driver wants something done, and what a signal said while one is missing.
		return r.Contact == inventory.ContactGood && !bad(f.Source) && !(f.Source.event() && bad(SourceAction)) &&
			!(f.Source.signal() && r.Incomplete != "")
	}
	judge := judge{Policy: p, facts: facts, gpu: g, now: now}
	g = g.each(func(d Device) Device { return judge.passed(d, gone) })
	for _, f := range found {
		g.Device = g.opened(f, now)
	}
	return g
}

// resetSeen returns when there was evidence last that the GPU was reset: what g knows, or now if the reading shows it.
// It does if the driver asked for a reset and does no longer, if the GPU answers again in a session that was opened after
// it was lost, or if a count is back at zero that the driver clears only with a reset.
func (p Policy) resetSeen(g GPU, r inventory.Reading, facts Facts, now time.Time) time.Time {
	if r.Contact != inventory.ContactGood {
		return g.reset
	}
	over := slices.ContainsFunc(g.Faults, func(f Fault) bool {
		if g.reset.After(f.Seen) {
			return false // that was the evidence
		}
		switch f.Source {
		case SourceLost, SourceReset:
			return facts.Opened.After(f.Seen)
		case SourceAction: // the fault outlives the process, so that the question does
			return takesReset(f.Cure) && r.RecoveryAction.Known && !asksReset(r.RecoveryAction.Value)
		default:
			return false
		}
	})
	if over || p.countersFell(g, r, facts) {
		return now
	}
	return g.reset
}

// countersFell reports whether counters fell as they do when a GPU is reset. Without persistence mode they also do when
// the last session ends.
func (p Policy) countersFell(g GPU, r inventory.Reading, facts Facts) bool {
	was := g.Reading
	if !facts.Opened.Equal(g.session) && !(was.Persistence.Value && r.Persistence.Value) {
		return false
	}
	ecc, energy := was.UncorrectedECC, was.Energy
	return ecc.Known && ecc.Value > 0 && r.UncorrectedECC.Known && r.UncorrectedECC.Value == 0 ||
		p.EnergyEvidence && energy.Known && r.Energy.Known && r.Energy.Value < energy.Value
}

// takesReset reports whether a driver that asks for that cure, and later for none, has seen a reset: it notes a reset in
// registers that only one clears. A restart that it asked for it forgets by itself.
func takesReset(c inventory.Cure) bool { return c == inventory.CureReset || c == inventory.CureDrain }

// asksReset reports whether the GPU is reset, at least, when what the driver asks for is done.
func asksReset(a inventory.RecoveryAction) bool {
	switch a {
	case inventory.RecoveryGPUReset, inventory.RecoveryDrainAndReset, inventory.RecoveryBusReset, inventory.RecoveryNodeReboot,
		inventory.RecoverySystemReboot:
		return true
	default:
		return false
	}
}

// FoldTime folds in that time went by: limits of suspicion and graces that ran out.
func (p Policy) FoldTime(g GPU, now time.Time) GPU {
	limit := g.Limit()
	if limit.IsZero() || now.Before(limit) {
		return g
	}
	return g.each(func(d Device) Device {
		faults := slices.Clone(d.Faults)
		for i := range faults {
			f := &faults[i]
			if f.limit.IsZero() || now.Before(f.limit) {
				continue
			}
			f.limit = time.Time{}
			if f.State == inventory.Suspect {
				f.State = inventory.Unhealthy
				f.Reason = because(f.Cure, "%s, which did not come within %v", f.Reason, p.SuspectLimit)
			}
		}
		d.Faults = faults
		return d.judged(now)
	})
}

// Clear folds in that an operator takes the device with the given UUID, the GPU itself or one of its MIG devices, for
// good; clearing a GPU clears its MIG devices, too. What is still wrong is found again by the next reading. It returns
// false if the UUID is neither.
func (p Policy) Clear(g GPU, uuid string, now time.Time) (GPU, bool) {
	clean := func(d Device) Device {
		d.Recoveries = nil
		return d.closed(now, func(f Fault) bool { return f.Source != SourceSilence }) // which is none of the device's
	}
	if uuid == g.UUID {
		g.Unread = nil // nothing is known of them any more
		return g.each(clean), true
	}
	one := func(i Instance) bool { return i.UUID == uuid }
	if slices.ContainsFunc(g.Unread, one) {
		g.Unread = slices.DeleteFunc(slices.Clone(g.Unread), one)
		return g, true
	}
	i := slices.IndexFunc(g.Instances, one)
	if i < 0 {
		return g, false
	}
	g.Instances = slices.Clone(g.Instances)
	g.Instances[i].Device = clean(g.Instances[i].Device)
	return g, true
}
