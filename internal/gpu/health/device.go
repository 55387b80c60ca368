package health

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// maxCounts bounds the events counted for a device: the kinds and XIDs seen last are kept.
const maxCounts = 32

// A Device is what is known about one physical GPU or one MIG device. It is a value: folding makes
// a new one and does not change the slices of the old one.
type Device struct {
	// Health is the verdict, the worst of Faults; Unknown until the first reading.
	Health inventory.Health
	// Faults are the open faults, in the order in which they were found.
	Faults []Fault
	// Counts are the events seen since the process started, the latest last.
	Counts []Count
	// Recoveries are the times at which the device became Healthy again after a fault of its own,
	// within the flap window.
	Recoveries []time.Time
}

// A Count is how often an event was seen.
type Count struct {
	Kind inventory.EventKind
	// XID is the number of an EventXID.
	XID uint64
	N   int
	// Last is when it was seen last.
	Last time.Time
}

// An Instance is a Device that is one MIG device.
type Instance struct {
	UUID   string
	GI, CI int
	Device
}

// counted returns d with the event counted.
func (d Device) counted(e inventory.Event, now time.Time) Device {
	counts := make([]Count, 0, len(d.Counts)+1)
	seen := Count{Kind: e.Kind, XID: e.XID}
	for _, c := range d.Counts {
		if c.Kind == e.Kind && c.XID == e.XID {
			seen.N = c.N
			continue
		}
		counts = append(counts, c)
	}
	seen.N++
	seen.Last = now
	counts = append(counts, seen)
	d.Counts = counts[max(0, len(counts)-maxCounts):]
	return d
}

// opened returns d with the fault open. If a fault of the same source and XID is open, it keeps its
// time and does not become less severe, but its passes start again.
func (d Device) opened(f Fault, now time.Time) Device {
	f.Since, f.Seen = now, now
	i := slices.IndexFunc(d.Faults, func(o Fault) bool { return o.Source == f.Source && o.XID == f.XID })
	if i < 0 {
		d.Faults = append(slices.Clip(d.Faults), f)
		return d.withVerdict(now)
	}
	old := d.Faults[i]
	f.Since = old.Since
	if f.State == old.State {
		f.limit = old.limit
	}
	milder := inventory.Worst(f.health(), old.health()).State != f.State
	if milder || f.State == old.State && old.Cure == inventory.CureReboot {
		f.State, f.Reason, f.Cure, f.limit = old.State, old.Reason, old.Cure, old.limit
	}
	d.Faults = slices.Clone(d.Faults)
	d.Faults[i] = f
	return d.withVerdict(now)
}

// closed returns d without the faults for which cured says true.
func (d Device) closed(now time.Time, cured func(Fault) bool) Device {
	if !slices.ContainsFunc(d.Faults, cured) {
		return d
	}
	d.Faults = slices.DeleteFunc(slices.Clone(d.Faults), cured)
	return d.withVerdict(now)
}

// worst returns the fault that decides the verdict: that of the worst state, and of several with
// that state the one whose cure takes most effort, as it may cure the others too. Without faults it
// returns one with the state Healthy.
func (d Device) worst() Fault {
	worst := Fault{State: inventory.Healthy}
	for _, f := range d.Faults {
		worse := inventory.Worst(worst.health(), f.health()).State != worst.State
		if worse || f.State == worst.State && effort(f.Cure) > effort(worst.Cure) {
			worst = f
		}
	}
	return worst
}

// firstXID returns the XID that was found first among the open faults; 0 if none has one.
func (d Device) firstXID() uint64 {
	for _, f := range d.Faults {
		if f.XID != 0 {
			return f.XID
		}
	}
	return 0
}

// withVerdict returns d with the verdict that follows from its faults.
func (d Device) withVerdict(now time.Time) Device {
	worst := d.worst()
	verdict := worst.health()
	if worst.Source == SourceAction {
		// The action says what to do, the XID what happened. Which of the two is read first is chance.
		if xid := d.firstXID(); xid != 0 {
			verdict.XID, verdict.Reason = xid, fmt.Sprintf("%v: %s", Lookup(xid), verdict.Reason)
		}
	}
	verdict.Since = d.Health.Since
	if verdict.State != d.Health.State || verdict.Since.IsZero() {
		verdict.Since = now
	}
	d.Health = verdict
	return d
}
