package health

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// FoldEvent folds a driver event into the state of the GPU. For an event of an unknown MIG device,
// it returns false and g unchanged.
//
// An event opens faults and never closes any; the next reading shows the consequences. An XID
// reported both as an event and in the kernel log counts once.
func (p Policy) FoldEvent(g GPU, e inventory.Event, facts Facts, now time.Time) (GPU, bool) {
	f, opensFault := p.faultOf(g, e, facts, now)
	// Without a recovery action, the catalog alone tells whether a fault of a MIG device concerns
	// the whole GPU.
	wide := !g.actionDecides(facts) && (f.Source != SourceXID || Lookup(f.XID).wholeGPU())
	next, hit := g.mapTargets(e, func(d Device) Device {
		d = d.withCount(e, now)
		if opensFault && !wide {
			d = d.withFault(p.substituteFor(g, d, f, facts), now)
		}
		return d
	})
	if !hit {
		return g, false
	}
	if opensFault && wide {
		next.Device = next.withFault(p.substituteFor(g, next.Device, f, facts), now)
	}
	recent, duplicate := g.recentXIDs.with(e, now)
	if duplicate {
		next = g
	}
	next.recentXIDs = recent
	return next, true
}

// faultOf returns the fault opened by an event, and false if there is none.
func (p Policy) faultOf(g GPU, e inventory.Event, facts Facts, now time.Time) (Fault, bool) {
	f := Fault{State: inventory.Unhealthy, Remedy: inventory.RemedyReset}
	switch e.Kind {
	case inventory.EventXID:
		return p.xidFault(g, e.XID, facts, now)
	case inventory.EventFatalPoison:
		f.Source = SourcePoison
		f.Reason = because(f.Remedy, "poisoned memory was consumed and not contained")
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
	default: // counted only, or explained by the next reading
		return Fault{}, false
	}
}

// FoldSilence folds in a missing answer of the driver, for a reason that may not be the fault of
// the GPU.
func (p Policy) FoldSilence(g GPU, why string, now time.Time) GPU {
	f := Fault{Source: SourceSilence, State: inventory.Unknown, Remedy: inventory.RemedyHuman, Reason: why}
	if g.Health.Allocatable() {
		f.limit = now.Add(p.UnknownGrace)
	}
	g.answers = false
	g.Device = g.withFault(f, now)
	return g
}

// FoldHang folds in a call to the GPU that does not return, while the driver answers other calls.
// The stall has the name of the NVML call.
//
// Two calls that hang for longStall within stallsWithin may mean a hanging GSP. Some drivers have
// no recovery action for a hanging GSP, and show the GPU as good as soon as a call returns. With
// such a driver, the fault needs evidence of a reset.
func (p Policy) FoldHang(g GPU, stall inventory.Stall, facts Facts, now time.Time) GPU {
	call, since := cmp.Or(stall.Call.Function, "reading its files"), stall.Call.Since
	g.answers = false
	if now.Sub(since) >= longStall && !stall.Over && !since.Equal(g.lastStall) {
		if facts.GSPUnmarked && !g.lastStall.IsZero() && since.Sub(g.lastStall) <= stallsWithin {
			g.Device = g.withFault(Fault{
				Source: SourceHangs, State: inventory.Unhealthy, Remedy: inventory.RemedyReset,
				Reason: because(inventory.RemedyReset, "calls to this GPU hung for %v twice within %v, "+
					"as when its GSP firmware hangs, "+
					"and drivers before %s do not say that this needs a reset", longStall, stallsWithin,
					inventory.MarksGSP),
			}, now)
		}
		g.lastStall = since
	}
	g.Device = g.withFault(Fault{
		Source: SourceHang, State: inventory.Unhealthy, Remedy: inventory.RemedyReset,
		Reason: fmt.Sprintf("the driver does not return from %s for this GPU: see the kernel log; "+
			"if this persists, reset the GPU or restart the node", call),
	}, now)
	return g
}

// Two calls of at least longStall within stallsWithin count as a hanging GSP: the driver gives up a
// GSP call after 45 s.
const (
	longStall    = 30 * time.Second
	stallsWithin = 10 * time.Minute
)

// FoldStall folds in a call to the GPU that has not returned for a while. The GPU still gets work:
// the call may just be slow.
func (p Policy) FoldStall(g GPU, call string, now time.Time) GPU {
	g.answers = false
	g.Device = g.withFault(Fault{
		Source: SourceHang, State: inventory.Suspect, Remedy: inventory.RemedyReset,
		Reason: fmt.Sprintf("the driver has not returned from %s for this GPU yet", call),
	}, now)
	return g
}

// FoldAbsence folds in the absence of a GPU that the driver still counts but can no longer
// identify.
func (p Policy) FoldAbsence(g GPU, why string, now time.Time) GPU {
	g.answers = false
	g.Device = g.withFault(Fault{
		Source: SourceLost, State: inventory.Lost, Remedy: inventory.RemedyReconnect,
		Reason: because(inventory.RemedyReconnect, "the driver cannot find the GPU any more (%s)", why),
	}, now)
	return g
}

// FoldReset folds in a reset of the GPU or a reload of the driver, as evidence of a reset. A fault
// also needs passes to close.
func (p Policy) FoldReset(g GPU, now time.Time) GPU {
	g.lastReset = now
	return g
}

// FoldCleared folds in a clear of the memory error counts by the daemon, or an attempt. Earlier
// counts are then no evidence of a reset or of new errors.
func (p Policy) FoldCleared(g GPU) GPU {
	g.Reading.UncorrectedECC = inventory.Signal[uint64]{}
	return g
}

// FoldReading folds in a reading. It opens the faults found in the reading, and counts as a pass
// for all others.
func (p Policy) FoldReading(g GPU, r inventory.Reading, facts Facts, now time.Time) GPU {
	found := p.findings(g, r, now)
	g.lastReset = p.lastReset(g, r, facts, now)
	g.answers = r.Contact == inventory.ContactGood
	if g.answers {
		g.Reading, g.hasReading, g.session = r, true, facts.Opened
	}
	if len(found) == 0 && !g.any(func(Fault) bool { return true }) && g.Health.State == inventory.Healthy {
		return g
	}
	bad := func(s Source) bool { return slices.ContainsFunc(found, func(f Fault) bool { return f.Source == s }) }
	gone := func(f Fault) bool {
		// Faults of events stay open while the driver requests an action. Faults of signals stay
		// open while a signal is unreadable.
		return r.Contact == inventory.ContactGood && !bad(f.Source) && !(f.Source.event() && bad(SourceAction)) &&
			!(f.Source.signal() && r.Incomplete != "")
	}
	judge := judge{Policy: p, facts: facts, gpu: g, now: now}
	g = g.mapDevices(func(d Device) Device { return judge.afterReading(d, gone) })
	for _, f := range found {
		g.Device = g.withFault(f, now)
	}
	return g
}

// lastReset returns the time of the latest evidence of a reset: now for evidence in the reading,
// else the time in g. Evidence is a disappeared request of the driver for a reset, an answer of a
// lost GPU in a newer session, or a decrease of counters cleared only by a reset.
func (p Policy) lastReset(g GPU, r inventory.Reading, facts Facts, now time.Time) time.Time {
	if r.Contact != inventory.ContactGood {
		return g.lastReset
	}
	over := slices.ContainsFunc(g.Faults, func(f Fault) bool {
		if g.lastReset.After(f.LastSeen) {
			return false // this fault already had evidence
		}
		switch f.Source {
		case SourceLost, SourceReset:
			return facts.Opened.After(f.LastSeen)
		case SourceAction: // also works after a restart of the daemon: the fault is in the ledger
			return takesReset(f.Remedy) && r.RecoveryAction.Known && !asksReset(r.RecoveryAction.Value)
		default:
			return false
		}
	})
	if over || p.countersFell(g, r, facts) {
		return now
	}
	return g.lastReset
}

// countersFell reports whether counters decreased as in a reset. Without persistence mode, counters
// also decrease when the last session closes.
func (p Policy) countersFell(g GPU, r inventory.Reading, facts Facts) bool {
	was := g.Reading
	if !facts.Opened.Equal(g.session) && !(was.Persistence.Value && r.Persistence.Value) {
		return false
	}
	return was.UncorrectedECC.Value > 0 && r.UncorrectedECC == inventory.Known(uint64(0)) ||
		p.EnergyEvidence && r.Energy.Known && r.Energy.Value < was.Energy.Value
}

// takesReset reports whether a disappeared request for this remedy proves a reset. The driver keeps
// the request for a reset in registers of the GPU, cleared only by a reset. The request for a
// reboot disappears without a reset.
func takesReset(c inventory.Remedy) bool {
	return c == inventory.RemedyReset || c == inventory.RemedyDrain
}

// asksReset reports whether a recovery action includes a reset of the GPU.
func asksReset(a inventory.RecoveryAction) bool {
	switch a {
	case inventory.RecoveryGPUReset, inventory.RecoveryDrainAndReset, inventory.RecoveryBusReset,
		inventory.RecoveryNodeReboot,
		inventory.RecoverySystemReboot:
		return true
	default:
		return false
	}
}

// FoldProof folds in the result of a CUDA check of the GPU or MIG device with the given UUID: why
// CUDA does not work, with the remedy. An empty reason means success. It returns false for an
// unknown device.
func (p Policy) FoldProof(g GPU, uuid, why string, remedy inventory.Remedy, now time.Time) (GPU, bool) {
	fold := func(d Device) Device {
		if slices.ContainsFunc(d.Faults, func(f Fault) bool { return f.Source == SourceCUDA && f.Reason == why }) {
			return d
		}
		d = d.withoutFaults(now, func(f Fault) bool { return f.Source == SourceCUDA })
		if why != "" {
			d = d.withFault(Fault{Source: SourceCUDA, State: inventory.Unhealthy, Remedy: remedy, Reason: why}, now)
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

// FoldTime folds in the passage of time: Suspect devices become Unhealthy, and Unknown devices lose
// their grace.
func (p Policy) FoldTime(g GPU, now time.Time) GPU {
	limit := g.Limit()
	if limit.IsZero() || now.Before(limit) {
		return g
	}
	return g.mapDevices(func(d Device) Device {
		faults := slices.Clone(d.Faults)
		for i := range faults {
			f := &faults[i]
			if f.limit.IsZero() || now.Before(f.limit) {
				continue
			}
			f.limit = time.Time{}
			if f.State == inventory.Suspect {
				f.State = inventory.Unhealthy
				f.Reason = because(f.Remedy, "%s, which did not come within %v", f.Reason, p.SuspectLimit)
			}
		}
		d.Faults = faults
		return d.withVerdict(now)
	})
}

// Clear clears the faults of the GPU with the given UUID and all its MIG devices, or of one MIG
// device. The next reading finds the remaining faults again. It returns false for an unknown
// device.
func (p Policy) Clear(g GPU, uuid string, now time.Time) (GPU, bool) {
	clean := func(d Device) Device {
		d.Recoveries = nil
		// the driver still does not answer
		return d.withoutFaults(now, func(f Fault) bool { return f.Source != SourceSilence })
	}
	if uuid == g.UUID {
		g.Unread = nil // the MIG devices have no known faults now
		return g.mapDevices(clean), true
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
