package health

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// maxCounts limits the event counts of a device, keeping the latest kinds and XIDs.
const maxCounts = 32

// A Device is the state of a physical GPU or a MIG device. It is a value: folding returns a new
// Device and does not modify the slices of the old one.
type Device struct {
	// Health is the verdict, from the worst of Faults; Unknown until the first reading.
	Health inventory.Health
	// Faults are the open faults, oldest first.
	Faults []Fault
	// Counts are the events since the process started, latest last.
	Counts []Count
	// Recoveries are the times of recoveries from faults of the device within the flap window.
	Recoveries []time.Time
}

// A Count is the number of occurrences of an event.
type Count struct {
	Kind inventory.EventKind
	// XID is the number of an EventXID.
	XID uint64
	N   int
	// Last is the time of the last occurrence.
	Last time.Time
}

// An Instance is the Device of a MIG device.
type Instance struct {
	UUID   string
	GI, CI int
	Device
}

// withCount returns d with one more occurrence of the event.
func (d Device) withCount(e inventory.Event, now time.Time) Device {
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

// withFault returns d with the fault open. An open fault of the same source and XID keeps the start
// time and does not become less severe, but loses all passes.
func (d Device) withFault(f Fault, now time.Time) Device {
	f.Since, f.LastSeen = now, now
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
	if milder || f.State == old.State && old.Remedy == inventory.RemedyReboot {
		f.State, f.Reason, f.Remedy, f.limit = old.State, old.Reason, old.Remedy, old.limit
	}
	d.Faults = slices.Clone(d.Faults)
	d.Faults[i] = f
	return d.withVerdict(now)
}

// withoutFaults returns d without the faults that match.
func (d Device) withoutFaults(now time.Time, isOver func(Fault) bool) Device {
	if !slices.ContainsFunc(d.Faults, isOver) {
		return d
	}
	d.Faults = slices.DeleteFunc(slices.Clone(d.Faults), isOver)
	return d.withVerdict(now)
}

// worst returns the fault that decides the verdict: the fault with the worst state, and among
// equals with the most expensive remedy, which may also end the others. Without faults, the result
// is Healthy.
func (d Device) worst() Fault {
	worst := Fault{State: inventory.Healthy}
	for _, f := range d.Faults {
		worse := inventory.Worst(worst.health(), f.health()).State != worst.State
		if worse || f.State == worst.State && effort(f.Remedy) > effort(worst.Remedy) {
			worst = f
		}
	}
	return worst
}

// firstXID returns the oldest XID of the open faults, or 0.
func (d Device) firstXID() uint64 {
	for _, f := range d.Faults {
		if f.XID != 0 {
			return f.XID
		}
	}
	return 0
}

// withVerdict returns d with the verdict of its faults.
func (d Device) withVerdict(now time.Time) Device {
	worst := d.worst()
	verdict := worst.health()
	if worst.Source == SourceAction {
		// The recovery action has the remedy, and the XID the cause. They arrive in any order.
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
