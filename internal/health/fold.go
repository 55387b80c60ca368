package health

import (
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// FoldEvent folds what the driver said into what is known of the GPU. It returns false, and g as it was, if the event
// is attributed to a MIG device that g does not have.
//
// An event opens faults and never closes one: whatever follows from it is told by the next reading.
func (p Policy) FoldEvent(g GPU, e inventory.Event, facts Facts, now time.Time) (GPU, bool) {
	speaks := g.speaks()
	next, hit := g.struck(e, func(d Device) Device {
		d = d.counted(e, now)
		if f, ok := p.accusation(e, facts, speaks, now); ok {
			d = d.opened(f, now)
		}
		return d
	})
	if !hit {
		return g, false
	}
	return next, true
}

// accusation returns the fault that an event opens, and false if it only asks for a look.
func (p Policy) accusation(e inventory.Event, facts Facts, speaks bool, now time.Time) (Fault, bool) {
	f := Fault{State: inventory.Unhealthy, Cure: inventory.CureReset}
	switch e.Kind {
	case inventory.EventXID:
		return p.verdict(e.XID, facts, speaks, now)
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
	g.reset = g.resetSeen(r, facts, now)
	g.answers = r.Contact == inventory.ContactGood
	if g.answers {
		g.Reading, g.read = r, true
	}
	if len(found) == 0 && !g.any(func(Fault) bool { return true }) && g.Health.State == inventory.Healthy {
		return g
	}
	bad := func(s Source) bool { return slices.ContainsFunc(found, func(f Fault) bool { return f.Source == s }) }
	gone := func(f Fault) bool {
		if f.Source == SourceSilence {
			return true
		}
		// What an event said stands while the driver wants something done.
		return r.Contact == inventory.ContactGood && !bad(f.Source) && !(f.Source.event() && bad(SourceAction))
	}
	judge := judge{Policy: p, facts: facts, speaks: g.speaks(), reset: g.reset, now: now}
	g = g.each(func(d Device) Device { return judge.passed(d, gone) })
	for _, f := range found {
		g.Device = g.opened(f, now)
	}
	return g
}

// resetSeen returns when there was evidence last that the GPU was reset: what g knows, or now if the reading shows it.
// It does if the driver asked for a reset or more and does no longer, if the count of errors, which only a reset or a new
// driver clears, is back at zero, or if the GPU answers again in a session that was opened after it was lost.
func (g GPU) resetSeen(r inventory.Reading, facts Facts, now time.Time) time.Time {
	if r.Contact != inventory.ContactGood {
		return g.reset
	}
	back := slices.ContainsFunc(g.Faults, func(f Fault) bool {
		return (f.Source == SourceLost || f.Source == SourceReset) && facts.Opened.After(f.Seen) && !g.reset.After(f.Seen)
	})
	action, ecc := g.Reading.RecoveryAction, g.Reading.UncorrectedECC
	asked := action.Known && takesReset(action.Value)
	asks := !r.RecoveryAction.Known || takesReset(r.RecoveryAction.Value)
	zeroed := ecc.Known && ecc.Value > 0 && r.UncorrectedECC.Known && r.UncorrectedECC.Value == 0
	if back || asked && !asks || zeroed {
		return now
	}
	return g.reset
}

// takesReset reports whether the GPU is reset, at least, when what the driver asks for is done.
func takesReset(a inventory.RecoveryAction) bool {
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
