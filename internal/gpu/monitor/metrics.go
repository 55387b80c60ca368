package monitor

import (
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Metrics counts events of GPUs. Its methods do not block.
type Metrics interface {
	// XID counts an XID of a GPU, or of a MIG device on it.
	XID(gpu string, xid uint64, at time.Time)
	// Recovered counts a change from Unhealthy or Lost to Healthy, of a GPU or a MIG device on it.
	// The remedy belongs to the earlier state.
	Recovered(gpu string, remedy inventory.Remedy)
}

// noMetrics counts nothing.
type noMetrics struct{}

func (noMetrics) XID(string, uint64, time.Time)      {}
func (noMetrics) Recovered(string, inventory.Remedy) {}

// countXID counts the XID of an event folded into the state of a GPU, except for a duplicate: some
// XIDs arrive both as an event and in the kernel log.
func countXID(m Metrics, before, after health.GPU, e inventory.Event, now time.Time) {
	if e.Kind == inventory.EventXID && xidCount(before, e.XID) != xidCount(after, e.XID) {
		m.XID(after.UUID, e.XID, now)
	}
}

// xidCount returns how often an XID was counted on a GPU and its MIG devices.
func xidCount(g health.GPU, xid uint64) int {
	n := 0
	count := func(d health.Device) {
		for _, c := range d.Counts {
			if c.Kind == inventory.EventXID && c.XID == xid {
				n += c.N
			}
		}
	}
	count(g.Device)
	for _, i := range g.Instances {
		count(i.Device)
	}
	return n
}

// countRecoveries counts the GPUs and MIG devices that became Healthy.
func countRecoveries(m Metrics, before, after inventory.Snapshot) {
	recovered := func(gpu string, was, is inventory.Health) {
		if is.State == inventory.Healthy && (was.State == inventory.Unhealthy || was.State == inventory.Lost) {
			m.Recovered(gpu, was.Remedy)
		}
	}
	for _, g := range after.GPUs {
		was, known := before.GPU(g.UUID)
		if !known {
			continue
		}
		recovered(g.UUID, was.Health, g.Health)
		for _, d := range g.MIGDevices {
			recovered(g.UUID, migHealth(was.MIGDevices, d.UUID), d.Health)
		}
	}
}
