package health

import (
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// HasLedgerEntries reports whether the GPU or one of its MIG devices has faults or recoveries, and
// so possibly entries for the ledger.
func (g GPU) HasLedgerEntries() bool {
	hasEntries := func(d Device) bool { return len(d.Faults)+len(d.Recoveries) > 0 }
	hasInstanceEntries := func(i Instance) bool { return hasEntries(i.Device) }
	return hasEntries(g.Device) || slices.ContainsFunc(g.Instances, hasInstanceEntries) ||
		slices.ContainsFunc(g.Unread, hasInstanceEntries)
}

// DurableFaults returns the open faults that must survive a restart of the process: a bad device
// stays bad.
func (d Device) DurableFaults() []Fault {
	return slices.DeleteFunc(slices.Clone(d.Faults), func(f Fault) bool { return !f.durable() })
}

// OutlivesBoot reports whether a fault with this remedy stays open after a restart of the node.
// Only a fault that needs an operator does.
func OutlivesBoot(c inventory.Remedy) bool {
	return c == inventory.RemedyHuman || c == inventory.RemedyHardware
}

// WithRestored returns g with the faults and recoveries saved by an earlier process for the GPU and
// its MIG devices, by UUID. A fault found meanwhile is not replaced.
func (g GPU) WithRestored(entriesOf func(uuid string) ([]Fault, []time.Time), now time.Time) GPU {
	restore := func(uuid string, d Device) Device {
		faults, recoveries := entriesOf(uuid)
		return d.withRestored(faults, recoveries, now)
	}
	g.Device = restore(g.UUID, g.Device)
	g.Instances = slices.Clone(g.Instances)
	for i := range g.Instances {
		g.Instances[i].Device = restore(g.Instances[i].UUID, g.Instances[i].Device)
	}
	return g
}

// withRestored adds saved faults and recoveries to d. Times in the future come from a clock that
// was set back: they count as now, and the fault as older than all other evidence.
func (d Device) withRestored(faults []Fault, recoveries []time.Time, now time.Time) Device {
	for _, at := range recoveries {
		if at.After(now) {
			at = now
		}
		d.Recoveries = append(slices.Clip(d.Recoveries), at)
	}
	faults = slices.DeleteFunc(slices.Clone(faults), func(f Fault) bool {
		return slices.ContainsFunc(d.Faults, func(found Fault) bool {
			return found.Source == f.Source && found.XID == f.XID
		})
	})
	if len(faults) == 0 {
		return d
	}
	for i, f := range faults {
		if f.Since.After(now) {
			faults[i].Since, faults[i].LastSeen = now, time.Time{}
		}
	}
	d.Faults = slices.Concat(d.Faults, faults)
	d = d.withVerdict(now)
	d.Health.Since = d.worst().Since
	return d
}
