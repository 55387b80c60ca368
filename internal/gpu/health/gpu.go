package health

import (
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// A GPU is what is known about a physical GPU and the MIG devices on it.
type GPU struct {
	UUID string
	Device
	// Instances are the GPU's MIG devices, in the order of the Snapshot, with the faults that concern
	// one of them alone.
	Instances []Instance
	// Unread are MIG devices that could not be read in the last scan, and may still be there.
	Unread []Instance
	// Reading is the last one in which the GPU answered.
	Reading inventory.Reading

	// old says that the chip is older than Ampere, mig that MIG mode is on.
	old, mig bool
	// read says that there was a Reading; answers, that it is the latest thing that was folded in.
	// Session is when the session of the Reading was opened.
	read, answers bool
	session       time.Time
	// stalled is the beginning of the last call that hung for longStall.
	stalled time.Time
	// recent are the XIDs of the last seconds, and how they came.
	recent recentXIDs
	// reset is the time of the latest evidence that the GPU was reset or its driver loaded again.
	reset time.Time
}

// hasAction reports whether the recovery action NONE means that the GPU is good: if it can be read,
// and since Ampere, as NVIDIA documents nothing for older chips. Before the first reading it is
// assumed that it can be read.
func (g GPU) hasAction() bool { return !g.old && (!g.read || g.Reading.RecoveryAction.Known) }

// actionDecides reports whether the recovery action of this driver decides about the GPU.
func (g GPU) actionDecides(facts Facts) bool {
	return g.hasAction() && facts.Branch >= inventory.RecoveryActionBranch
}

// beforeAmpere are the chips to which NVIDIA's catalog of XIDs and the recovery action do not
// apply.
var beforeAmpere = []string{"kepler", "maxwell", "pascal", "volta", "turing"}

// Seen returns g as a scan found it, with the MIG devices that there are now. MIG devices that were
// there before keep their faults; a new one is Healthy. With unread, some could not be read: what
// is known of those that are missing is kept in Unread until they can be read, or are known to be
// gone.
func (g GPU) Seen(found inventory.GPU, unread bool, now time.Time) GPU {
	g.old, g.mig = slices.Contains(beforeAmpere, found.Architecture), found.MIG == inventory.MIGEnabled
	devices := found.MIGDevices
	same := slices.EqualFunc(g.Instances, devices, func(i Instance, m inventory.MIGDevice) bool {
		return i.UUID == m.UUID && i.GI == m.GI && i.CI == m.CI
	})
	if same && len(g.Unread) == 0 {
		return g
	}
	before := slices.Concat(g.Instances, g.Unread)
	instances := make([]Instance, 0, len(devices))
	for _, m := range devices {
		i := slices.IndexFunc(before, func(i Instance) bool { return i.UUID == m.UUID })
		if i < 0 {
			instances = append(instances, Instance{UUID: m.UUID, GI: m.GI, CI: m.CI, Device: Device{}.withVerdict(now)})
			continue
		}
		known := before[i]
		known.GI, known.CI = m.GI, m.CI
		instances = append(instances, known)
	}
	g.Instances, g.Unread = instances, nil
	if unread {
		g.Unread = slices.DeleteFunc(before, func(i Instance) bool {
			return slices.ContainsFunc(devices, func(m inventory.MIGDevice) bool { return m.UUID == i.UUID })
		})
	}
	return g
}

// Suspect reports whether the GPU or one of its MIG devices waits for the recovery action of the
// driver.
func (g GPU) Suspect() bool { return g.any(func(f Fault) bool { return f.State == inventory.Suspect }) }

// any reports whether the GPU or one of its MIG devices has an open fault for which is returns
// true.
func (g GPU) any(is func(Fault) bool) bool {
	return slices.ContainsFunc(g.Faults, is) ||
		slices.ContainsFunc(g.Instances, func(i Instance) bool { return slices.ContainsFunc(i.Faults, is) })
}

// WantsSession reports whether the GPU can only be found good in a new NVML session, and since
// when: it was lost, answered that it needs a reset, or its calls fail, since this session was
// opened.
func (p Policy) WantsSession(g GPU, facts Facts) (since time.Time, wants bool) {
	g.any(func(f Fault) bool {
		lost := f.Source == SourceLost && !g.answers
		if (p.wayBack(g, f, facts) == bySession || f.Source == SourceContact || lost) && !facts.Opened.After(f.Seen) {
			since, wants = f.Since, true
		}
		return wants
	})
	return since, wants
}

// ResetSeen returns when there was evidence last that the GPU was reset or its driver loaded again;
// zero if there was none.
func (g GPU) ResetSeen() time.Time { return g.reset }

// Answers reports whether the GPU answered the last reading.
func (g GPU) Answers() bool { return g.answers }

// Whole reports whether the GPU has no MIG devices.
func (g GPU) Whole() bool { return len(g.Instances) == 0 }

// Limit returns when FoldTime will change something next, the zero time if it will not.
func (g GPU) Limit() time.Time {
	limit := earliest(time.Time{}, g.Faults)
	for _, i := range g.Instances {
		limit = earliest(limit, i.Faults)
	}
	return limit
}

func earliest(limit time.Time, faults []Fault) time.Time {
	for _, f := range faults {
		if !f.limit.IsZero() && (limit.IsZero() || f.limit.Before(limit)) {
			limit = f.limit
		}
	}
	return limit
}

// each returns g with fold applied to all its devices: the physical GPU and its MIG devices.
func (g GPU) each(fold func(Device) Device) GPU {
	g.Device = fold(g.Device)
	g.Instances = slices.Clone(g.Instances)
	for i := range g.Instances {
		g.Instances[i].Device = fold(g.Instances[i].Device)
	}
	return g
}

// atTargets returns g with fold applied to the devices that an event concerns: the physical GPU, or
// the MIG devices of the GI or CI that the event names. It returns false if there is no such MIG
// device.
func (g GPU) atTargets(e inventory.Event, fold func(Device) Device) (GPU, bool) {
	if e.GI == inventory.Unattributed {
		g.Device = fold(g.Device)
		return g, true
	}
	hit := false
	instances := slices.Clone(g.Instances)
	for i := range instances {
		if instances[i].GI == e.GI && (e.CI == inventory.Unattributed || instances[i].CI == e.CI) {
			instances[i].Device = fold(instances[i].Device)
			hit = true
		}
	}
	g.Instances = instances
	return g, hit
}
