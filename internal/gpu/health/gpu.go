package health

import (
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// A GPU is the state of a physical GPU and its MIG devices.
type GPU struct {
	UUID string
	Device
	// Instances are the MIG devices in the order of the Snapshot. Each fault concerns one MIG
	// device alone.
	Instances []Instance
	// Unread are MIG devices that the last scan could not read, and that may still exist.
	Unread []Instance
	// Reading is the last reading with an answer of the GPU.
	Reading inventory.Reading

	// preAmpere is true for a chip older than Ampere, and migEnabled in MIG mode.
	preAmpere, migEnabled bool
	// hasReading is true after the first Reading, and answers if the Reading was the last input.
	// session is the time at which the session of the Reading was opened.
	hasReading, answers bool
	session             time.Time
	// lastStall is the start of the last call that hung for longStall.
	lastStall time.Time
	// recentXIDs are the XIDs of the last seconds with their origins.
	recentXIDs recentXIDs
	// lastReset is the time of the latest evidence of a reset, or of a reload of the driver.
	lastReset time.Time
}

// hasAction reports whether the recovery action NONE means a good GPU. The action must be readable,
// and the chip at least Ampere, because NVIDIA documents nothing for older chips. Before the first
// reading, the action is assumed to be readable.
func (g GPU) hasAction() bool {
	return !g.preAmpere && (!g.hasReading || g.Reading.RecoveryAction.Known)
}

// actionDecides reports whether this driver's recovery action decides about the GPU.
func (g GPU) actionDecides(facts Facts) bool {
	return g.hasAction() && facts.Branch >= inventory.RecoveryActionBranch
}

// beforeAmpere are the architectures without NVIDIA's XID catalog and recovery action.
var beforeAmpere = []string{"kepler", "maxwell", "pascal", "volta", "turing"}

// WithScan returns g with the result of a scan. Known MIG devices keep their faults; a new one is
// Healthy. unread is true if some MIG devices could not be read. Missing MIG devices then move to
// Unread until they are read or known to be gone.
func (g GPU) WithScan(found inventory.GPU, unread bool, now time.Time) GPU {
	g.preAmpere, g.migEnabled = slices.Contains(beforeAmpere, found.Architecture), found.MIG == inventory.MIGEnabled
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

// Suspect reports whether the GPU or one of its MIG devices waits for the driver's recovery action.
func (g GPU) Suspect() bool { return g.any(func(f Fault) bool { return f.State == inventory.Suspect }) }

// any reports whether the GPU or one of its MIG devices has a matching open fault.
func (g GPU) any(is func(Fault) bool) bool {
	return slices.ContainsFunc(g.Faults, is) ||
		slices.ContainsFunc(g.Instances, func(i Instance) bool { return slices.ContainsFunc(i.Faults, is) })
}

// WantsSession reports whether only a new NVML session can find the GPU good, and since when. Since
// this session was opened, the GPU was lost, answered that it needs a reset, or its calls failed.
func (p Policy) WantsSession(g GPU, facts Facts) (since time.Time, wants bool) {
	g.any(func(f Fault) bool {
		lost := f.Source == SourceLost && !g.answers
		if (p.conditionFor(g, f, facts) == bySession || f.Source == SourceContact || lost) &&
			!facts.Opened.After(f.LastSeen) {
			since, wants = f.Since, true
		}
		return wants
	})
	return since, wants
}

// LastReset returns the time of the latest evidence of a reset, or of a reload of the driver; zero
// without evidence.
func (g GPU) LastReset() time.Time { return g.lastReset }

// Answers reports whether the GPU answered the last reading.
func (g GPU) Answers() bool { return g.answers }

// Whole reports whether the GPU has no MIG devices.
func (g GPU) Whole() bool { return len(g.Instances) == 0 }

// Limit returns when FoldTime will next change something; zero for never.
func (g GPU) Limit() time.Time {
	var limit time.Time
	for _, f := range g.Faults {
		limit = order.Earliest(limit, f.limit)
	}
	for _, i := range g.Instances {
		for _, f := range i.Faults {
			limit = order.Earliest(limit, f.limit)
		}
	}
	return limit
}

// mapDevices returns g with fold applied to all its devices: the physical GPU and its MIG devices.
func (g GPU) mapDevices(fold func(Device) Device) GPU {
	g.Device = fold(g.Device)
	g.Instances = slices.Clone(g.Instances)
	for i := range g.Instances {
		g.Instances[i].Device = fold(g.Instances[i].Device)
	}
	return g
}

// mapTargets returns g with fold applied to the devices of an event: the physical GPU, or the MIG
// devices of a GI or CI. It returns false without such a MIG device.
func (g GPU) mapTargets(e inventory.Event, fold func(Device) Device) (GPU, bool) {
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
