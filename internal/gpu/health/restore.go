package health

import (
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Marked reports whether the GPU or one of its MIG devices has faults or recoveries, which may have
// to be kept on disk.
func (g GPU) Marked() bool {
	marked := func(d Device) bool { return len(d.Faults)+len(d.Recoveries) > 0 }
	markedOne := func(i Instance) bool { return marked(i.Device) }
	return marked(g.Device) || slices.ContainsFunc(g.Instances, markedOne) || slices.ContainsFunc(g.Unread, markedOne)
}

// Durable returns the open faults that must outlive the process, so that a bad device is not
// Healthy after a restart.
func (d Device) Durable() []Fault {
	return slices.DeleteFunc(slices.Clone(d.Faults), func(f Fault) bool { return !f.durable() })
}

// OutlivesBoot reports whether a fault with this cure is still open after a restart of the node:
// only one that an operator has to clear is.
func OutlivesBoot(c inventory.Cure) bool {
	return c == inventory.CureHuman || c == inventory.CureHardware
}

// Restored returns g with the faults and recoveries that an earlier process had noted for it and
// its MIG devices, by UUID. A fault that was found meanwhile stays as it was found.
func (g GPU) Restored(noted func(uuid string) ([]Fault, []time.Time), now time.Time) GPU {
	restore := func(uuid string, d Device) Device {
		faults, recoveries := noted(uuid)
		return d.restored(faults, recoveries, now)
	}
	g.Device = restore(g.UUID, g.Device)
	g.Instances = slices.Clone(g.Instances)
	for i := range g.Instances {
		g.Instances[i].Device = restore(g.Instances[i].UUID, g.Instances[i].Device)
	}
	return g
}

// restored takes over faults and recoveries. Times that are to come are of a clock that went back:
// they count as now, and a fault as found before anything that this process knows.
func (d Device) restored(faults []Fault, recoveries []time.Time, now time.Time) Device {
	for _, at := range recoveries {
		if at.After(now) {
			at = now
		}
		d.Recoveries = append(slices.Clip(d.Recoveries), at)
	}
	faults = slices.DeleteFunc(slices.Clone(faults), func(f Fault) bool {
		return slices.ContainsFunc(d.Faults, func(found Fault) bool { return found.Source == f.Source && found.XID == f.XID })
	})
	if len(faults) == 0 {
		return d
	}
	for i, f := range faults {
		if f.Since.After(now) {
			faults[i].Since, faults[i].Seen = now, time.Time{}
		}
	}
	d.Faults = slices.Concat(d.Faults, faults)
	d = d.withVerdict(now)
	d.Health.Since = d.worst().Since
	return d
}
