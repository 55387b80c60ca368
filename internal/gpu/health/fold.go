package health

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// FoldEvent folds an event of the driver into what is known of the GPU. It returns false, and g
// unchanged, if the event is attributed to a MIG device that g does not have.
//
// An event opens faults and never closes one; the next reading tells what follows from it. An XID
// that comes both as an event and as a line of the kernel log counts once.
func (p Policy) FoldEvent(g GPU, e inventory.Event, facts Facts, now time.Time) (GPU, bool) {
	f, accused := p.faultOf(g, e, facts, now)
	// Without a recovery action, only the catalog tells that a fault of a MIG device concerns the
	// whole GPU.
	wide := !g.actionDecides(facts) && (f.Source != SourceXID || Lookup(f.XID).wholeGPU())
	next, hit := g.atTargets(e, func(d Device) Device {
		d = d.counted(e, now)
		if accused && !wide {
			d = d.opened(p.standIn(g, d, f, facts), now)
		}
		return d
	})
	if !hit {
		return g, false
	}
	if accused && wide {
		next.Device = next.opened(p.standIn(g, next.Device, f, facts), now)
	}
	recent, duplicate := g.recent.with(e, now)
	if duplicate {
		next = g
	}
	next.recent = recent
	return next, true
}

// faultOf returns the fault that an event opens, and false if it opens none.
func (p Policy) faultOf(g GPU, e inventory.Event, facts Facts, now time.Time) (Fault, bool) {
	f := Fault{State: inventory.Unhealthy, Cure: inventory.CureReset}
	switch e.Kind {
	case inventory.EventXID:
		return p.xidFault(g, e.XID, facts, now)
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
		return p.suspect(f, "the driver reported that the GPU is unavailable", now), true
	default: // the next reading shows what they are about, or they are only counted
		return Fault{}, false
	}
}

// FoldSilence folds in that the driver did not answer for this GPU; why is the reason, which need
// not be the GPU's fault.
func (p Policy) FoldSilence(g GPU, why string, now time.Time) GPU {
	f := Fault{Source: SourceSilence, State: inventory.Unknown, Cure: inventory.CureHuman, Reason: why}
	if g.Health.Allocatable() {
		f.limit = now.Add(p.UnknownGrace)
	}
	g.answers = false
	g.Device = g.opened(f, now)
	return g
}

// FoldHang folds in that a call to the GPU does not return, while the driver answers other calls.
// The call is named as NVML names it.
//
// If a call hangs for longStall twice within stallsWithin, the GSP of the GPU may hang. A driver
// that does not mark such a GPU as one that needs a reset would show it as good as soon as a call
// returns. With such a driver evidence of a reset is needed.
func (p Policy) FoldHang(g GPU, stall inventory.Stall, facts Facts, now time.Time) GPU {
	call, since := cmp.Or(stall.Call.Function, "reading its files"), stall.Call.Since
	g.answers = false
	if now.Sub(since) >= longStall && !stall.Over && !since.Equal(g.stalled) {
		if facts.Unmarked && !g.stalled.IsZero() && since.Sub(g.stalled) <= stallsWithin {
			g.Device = g.opened(Fault{
				Source: SourceHangs, State: inventory.Unhealthy, Cure: inventory.CureReset,
				Reason: because(inventory.CureReset, "calls to this GPU hung for %v twice within %v, as when its GSP firmware hangs, "+
					"and drivers before %s do not say that this needs a reset", longStall, stallsWithin, inventory.MarksGSP),
			}, now)
		}
		g.stalled = since
	}
	g.Device = g.opened(Fault{
		Source: SourceHang, State: inventory.Unhealthy, Cure: inventory.CureReset,
		Reason: fmt.Sprintf("the driver does not return from %s for this GPU: the kernel log says why; "+
			"if it stays so, reset the GPU or restart the node", call),
	}, now)
	return g
}

// longStall and stallsWithin say which calls count together as a GSP that hangs: its driver gives a
// call up after 45 s.
const (
	longStall    = 30 * time.Second
	stallsWithin = 10 * time.Minute
)

// FoldStall folds in that a call to the GPU has not returned for a while. Work is still given to
// the GPU: the call may be slow.
func (p Policy) FoldStall(g GPU, call string, now time.Time) GPU {
	g.answers = false
	g.Device = g.opened(Fault{
		Source: SourceHang, State: inventory.Suspect, Cure: inventory.CureReset,
		Reason: fmt.Sprintf("the driver has not returned from %s for this GPU yet", call),
	}, now)
	return g
}

// FoldAbsence folds in that the driver counts the GPU but can no longer identify it; why is the
// reason of what was left out.
func (p Policy) FoldAbsence(g GPU, why string, now time.Time) GPU {
	g.answers = false
	g.Device = g.opened(Fault{
		Source: SourceLost, State: inventory.Lost, Cure: inventory.CureReconnect,
		Reason: because(inventory.CureReconnect, "the driver cannot find the GPU any more (%s)", why),
	}, now)
	return g
}

// FoldReset folds in that the GPU was reset or its driver loaded again. That is evidence; passes
// are needed as well.
func (p Policy) FoldReset(g GPU, now time.Time) GPU {
	g.reset = now
	return g
}

// FoldCleared folds in that the daemon itself cleared the counts of memory errors, or tried to. A
// count of before is then no evidence of a reset or of new errors.
func (p Policy) FoldCleared(g GPU) GPU {
	g.Reading.UncorrectedECC = inventory.Signal[uint64]{}
	return g
}

// FoldReading folds a reading in: it opens the faults that it shows, and is a pass for the other
// ones.
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
		// Faults of events stay open while the driver asks for something, and faults of signals while one
		// cannot be read.
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

// resetSeen returns the time of the latest evidence that the GPU was reset: the one that g has, or
// now if the reading shows it. It does if the driver asked for a reset and no longer does, if the
// GPU answers again in a session that was opened after it was lost, or if counters fell that only a
// reset clears.
func (p Policy) resetSeen(g GPU, r inventory.Reading, facts Facts, now time.Time) time.Time {
	if r.Contact != inventory.ContactGood {
		return g.reset
	}
	over := slices.ContainsFunc(g.Faults, func(f Fault) bool {
		if g.reset.After(f.Seen) {
			return false // this fault has had its evidence
		}
		switch f.Source {
		case SourceLost, SourceReset:
			return facts.Opened.After(f.Seen)
		case SourceAction: // the fault is in the ledger, so this also works after a restart of the daemon
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

// countersFell reports whether counters fell as they do when a GPU is reset. Without persistence
// mode they also fall when the last session is closed.
func (p Policy) countersFell(g GPU, r inventory.Reading, facts Facts) bool {
	was := g.Reading
	if !facts.Opened.Equal(g.session) && !(was.Persistence.Value && r.Persistence.Value) {
		return false
	}
	return was.UncorrectedECC.Value > 0 && r.UncorrectedECC == inventory.Known(uint64(0)) ||
		p.EnergyEvidence && r.Energy.Known && r.Energy.Value < was.Energy.Value
}

// takesReset reports whether a reset happened when the driver asked for this cure and later asks
// for nothing. The driver keeps the request for a reset in registers of the GPU, which only a reset
// clears; the request for a reboot it forgets by itself.
func takesReset(c inventory.Cure) bool { return c == inventory.CureReset || c == inventory.CureDrain }

// asksReset reports whether a recovery action contains a reset of the GPU.
func asksReset(a inventory.RecoveryAction) bool {
	switch a {
	case inventory.RecoveryGPUReset, inventory.RecoveryDrainAndReset, inventory.RecoveryBusReset, inventory.RecoveryNodeReboot,
		inventory.RecoverySystemReboot:
		return true
	default:
		return false
	}
}

// FoldProof folds in what a proof showed of the device with the given UUID, the GPU or one of its
// MIG devices: why CUDA does not work on it, with the cure; nothing is wrong if why is empty. It
// returns false if the GPU has no such device.
func (p Policy) FoldProof(g GPU, uuid, why string, cure inventory.Cure, now time.Time) (GPU, bool) {
	fold := func(d Device) Device {
		if slices.ContainsFunc(d.Faults, func(f Fault) bool { return f.Source == SourceCUDA && f.Reason == why }) {
			return d
		}
		d = d.closed(now, func(f Fault) bool { return f.Source == SourceCUDA })
		if why != "" {
			d = d.opened(Fault{Source: SourceCUDA, State: inventory.Unhealthy, Cure: cure, Reason: why}, now)
		}
		return d
	}
	if uuid == g.UUID {
		g.Device = fold(g.Device)
		return g, true
	}
	i := slices.IndexFunc(g.Instances, func(i Instance) bool { return i.UUID == uuid })
	if i < 0 {
		return g, false
	}
	g.Instances = slices.Clone(g.Instances)
	g.Instances[i].Device = fold(g.Instances[i].Device)
	return g, true
}

// FoldTime folds in that time went by: Suspect devices become Unhealthy, and Unknown ones lose
// their grace.
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
		return d.withVerdict(now)
	})
}

// Clear clears the faults of the device with the given UUID: the GPU with all its MIG devices, or
// one MIG device. The next reading finds again what is still wrong. It returns false if the GPU has
// no such device.
func (p Policy) Clear(g GPU, uuid string, now time.Time) (GPU, bool) {
	clean := func(d Device) Device {
		d.Recoveries = nil
		return d.closed(now, func(f Fault) bool { return f.Source != SourceSilence }) // the driver still does not answer
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
