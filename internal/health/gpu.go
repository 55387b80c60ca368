package health

import (
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// A GPU is what is known of the fitness of a physical GPU and of the MIG devices on it.
type GPU struct {
	UUID string
	Device
	// Instances are the GPU's MIG devices, in the order of the Snapshot. Only what struck one of them alone is theirs.
	Instances []Instance
	// Unread are MIG devices that could not be read in the last look, and may still be there.
	Unread []Instance
	// Reading is the last one in which the GPU answered.
	Reading inventory.Reading

	// old says that the chip is older than Ampere, mig that multi-instance mode is on.
	old, mig bool
	// read says that there was a Reading, answers that it is the latest word, session when its session was opened.
	read, answers bool
	session       time.Time
	// heard are the XIDs of the last seconds, by which way they came.
	heard heard
	// reset is when there was evidence last that the GPU was reset, or its driver loaded anew.
	reset time.Time
}

// speaks reports whether the recovery action NONE says that the GPU is good: if it can be read, since Ampere; NVIDIA says
// nothing of older chips. Before the first reading every driver that may have one is taken to have it.
func (g GPU) speaks() bool { return !g.old && (!g.read || g.Reading.RecoveryAction.Known) }

// verdicts reports whether the driver has the last word about the GPU.
func (g GPU) verdicts(facts Facts) bool {
	return g.speaks() && facts.Branch >= inventory.RecoveryActionBranch
}

// beforeAmpere are the chips to which NVIDIA's catalog of XIDs and the recovery action do not apply.
var beforeAmpere = []string{"kepler", "maxwell", "pascal", "volta", "turing"}

// Seen returns g as a look at the node found it, with the MIG devices that there are now. Those that were there before keep
// what is known of them; a new one is Healthy. With unread, some may be there that could not be read: what is known of those
// that are missing is kept until they can be, or are known to be gone.
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
			instances = append(instances, Instance{UUID: m.UUID, GI: m.GI, CI: m.CI, Device: Device{}.judged(now)})
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

// Curable reports whether a fault of the GPU is open that readings can close, so that it is worth looking often.
func (p Policy) Curable(g GPU, facts Facts) bool {
	return g.any(func(f Fault) bool {
		way := p.wayBack(g, f, facts)
		return way != byReboot && way != byOperator
	})
}

// Suspect reports whether the driver's verdict on the GPU or on one of its MIG devices is being waited for.
func (g GPU) Suspect() bool { return g.any(func(f Fault) bool { return f.State == inventory.Suspect }) }

// any reports whether a fault for which is says true is open on the GPU or on one of its MIG devices.
func (g GPU) any(is func(Fault) bool) bool {
	return slices.ContainsFunc(g.Faults, is) ||
		slices.ContainsFunc(g.Instances, func(i Instance) bool { return slices.ContainsFunc(i.Faults, is) })
}

// WantsSession reports whether only a new session can tell whether the GPU is good, and since when: it was lost or wanted
// a reset since the session was opened, or fails calls for reasons that may be the session's.
func (p Policy) WantsSession(g GPU, facts Facts) (since time.Time, wants bool) {
	g.any(func(f Fault) bool {
		if (p.wayBack(g, f, facts) == bySession || f.Source == SourceContact) && !facts.Opened.After(f.Seen) {
			since, wants = f.Since, true
		}
		return wants
	})
	return since, wants
}

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

// each returns g with every device of it, the physical GPU first, replaced by what fold makes of it.
func (g GPU) each(fold func(Device) Device) GPU {
	g.Device = fold(g.Device)
	g.Instances = slices.Clone(g.Instances)
	for i := range g.Instances {
		g.Instances[i].Device = fold(g.Instances[i].Device)
	}
	return g
}

// struck returns g with the devices that an event concerns replaced by what fold makes of them: the physical GPU, or
// the MIG devices of the GI, or of the CI in it, that the event names. It returns false if there is no such MIG device.
func (g GPU) struck(e inventory.Event, fold func(Device) Device) (GPU, bool) {
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
