package health

import (
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// maxCounts bounds the events counted for a device: the kinds and XIDs seen last are kept.
const maxCounts = 32

// A Device is what is known of the fitness of one physical GPU or one MIG device. It is a value: folding makes a new
// one and leaves the slices of the old one alone.
type Device struct {
	// Health is the verdict, the gravest of Faults; Unknown until the first reading.
	Health inventory.Health
	// Faults are the open faults, by ascending time of their finding.
	Faults []Fault
	// Counts are the events seen since the process started, the latest last.
	Counts []Count
	// Recoveries are the times at which the device was cured of a fault of its own, as far as they count for flapping.
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

// opened returns d with the fault open. A fault of the same source and XID that is open already stays the older one of
// the two and never becomes milder, but its way back starts anew.
func (d Device) opened(f Fault, now time.Time) Device {
	f.Since, f.Seen = now, now
	i := slices.IndexFunc(d.Faults, func(o Fault) bool { return o.Source == f.Source && o.XID == f.XID })
	if i < 0 {
		d.Faults = append(slices.Clip(d.Faults), f)
		return d.judged(now)
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
	return d.judged(now)
}

// closed returns d without the faults for which cured says true.
func (d Device) closed(now time.Time, cured func(Fault) bool) Device {
	if !slices.ContainsFunc(d.Faults, cured) {
		return d
	}
	d.Faults = slices.DeleteFunc(slices.Clone(d.Faults), cured)
	return d.judged(now)
}

// gravest returns the fault that the verdict follows from: of those that make the same of the device, the one whose cure takes
// most, as it may be the cure of the others. Without faults it is one that makes a device Healthy.
func (d Device) gravest() Fault {
	gravest := Fault{State: inventory.Healthy}
	for _, f := range d.Faults {
		worse := inventory.Worst(gravest.health(), f.health()).State != gravest.State
		if worse || f.State == gravest.State && effort(f.Cure) > effort(gravest.Cure) {
			gravest = f
		}
	}
	return gravest
}

// judged returns d with the verdict that follows from its faults.
func (d Device) judged(now time.Time) Device {
	verdict := d.gravest().health()
	verdict.Since = d.Health.Since
	if verdict.State != d.Health.State || verdict.Since.IsZero() {
		verdict.Since = now
	}
	d.Health = verdict
	return d
}
