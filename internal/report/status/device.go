package status

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// A Device is the state of one GPU or MIG device.
type Device struct {
	// Index is the GPU's NVML index "i", or the MIG device's "i:j".
	Index string `json:"index"`
	UUID  string `json:"uuid"`
	// Model is the name of the GPU's model, or "MIG " and the profile.
	Model string `json:"model"`
	// PCI is the GPU's PCI address, such as 0000:1b:00.0, and Minor the N of /dev/nvidiaN. A MIG
	// device has neither.
	PCI   string `json:"pci,omitempty"`
	Minor *int   `json:"minor,omitempty"`
	// GPU is the UUID of a MIG device's GPU, and Profile the size of the MIG device. A GPU has
	// neither.
	GPU     string `json:"gpu,omitempty"`
	Profile string `json:"profile,omitempty"`
	// UnitsMiB is the part of the GPU's memory that is offered in units; 0 for other GPUs.
	UnitsMiB int `json:"unitsMiB,omitempty"`
	// State is Unknown, Healthy, Suspect, Unhealthy or Lost. Since is when the state was entered.
	State string    `json:"state"`
	Since time.Time `json:"since,omitzero"`
	// Reason is a sentence without a full stop, empty for a Healthy device. Remedy is what repairs the device.
	Reason string `json:"reason,omitempty"`
	Remedy string `json:"cure,omitempty"`
	// XID is the driver's error number behind State; 0 if there is none.
	XID uint64 `json:"xid,omitempty"`
	// Faults are the open faults of the device itself.
	Faults []Fault `json:"faults,omitempty"`
	// Events are the last events of each kind, with their counts.
	Events []string `json:"events,omitempty"`
	// Signals is the last reading of a GPU; nil for a GPU that was never read, and for a MIG
	// device.
	Signals *Signals `json:"signals,omitempty"`
}

// A Fault is one fault of a device.
type Fault struct {
	// Source is how the fault was found, such as xid, lost or hang.
	Source string `json:"source"`
	// XID is the driver's error number, where Source is xid.
	XID uint64 `json:"xid,omitempty"`
	// Remedy is what repairs the device, and Since when the fault was found.
	Remedy string    `json:"cure,omitempty"`
	Since  time.Time `json:"since,omitzero"`
}

// Devices returns the devices of a Snapshot. Entry i of known belongs to GPU i of the Snapshot.
func Devices(snapshot inventory.Snapshot, known []health.GPU) []Device {
	devices := []Device{}
	for i, g := range snapshot.GPUs {
		whole := device(fmt.Sprint(g.Index), g.UUID, g.Model, g.Fitness(), known[i].Device)
		whole.Signals, whole.PCI, whole.Minor = signals(known[i].Reading), g.BDF, &g.Minor
		devices = append(devices, whole)
		for _, m := range g.MIGDevices {
			var own health.Device
			if at := slices.IndexFunc(known[i].Instances,
				func(i health.Instance) bool { return i.UUID == m.UUID }); at >= 0 {
				own = known[i].Instances[at].Device
			}
			part := device(fmt.Sprintf("%d:%d", g.Index, m.Index), m.UUID, "MIG "+m.Profile,
				inventory.Worst(g.Fitness(), m.Health), own)
			part.GPU, part.Profile = g.UUID, m.Profile
			devices = append(devices, part)
		}
	}
	return devices
}

func device(index, uuid, model string, h inventory.Health, d health.Device) Device {
	s := Device{
		Index: index, UUID: uuid, Model: model,
		State: h.State.String(), Since: Moment(h.Since), Reason: h.Reason, XID: h.XID, Remedy: string(h.Remedy),
	}
	for _, f := range d.Faults {
		s.Faults = append(s.Faults, Fault{Source: string(f.Source), XID: f.XID, Remedy: string(f.Remedy),
			Since: Moment(f.Since)})
	}
	for _, c := range d.Counts {
		what := c.Kind.String()
		if c.Kind == inventory.EventXID {
			what = fmt.Sprintf("XID %d", c.XID)
		}
		s.Events = append(s.Events, fmt.Sprintf("%s × %d, last %s", what, c.N, Stamp(c.Last)))
	}
	return s
}

// LeftOut returns sentences about the GPUs that cannot be read and the devices that are not
// offered, with reasons.
func LeftOut(snapshot inventory.Snapshot, plan resource.Plan) []string {
	var lines []string
	for _, l := range snapshot.LeftOut {
		lines = append(lines, fmt.Sprintf("GPU %d: %s", l.Index, l.Reason))
	}
	for _, l := range plan.LeftOut {
		lines = append(lines, fmt.Sprintf("device %s (%s): %s", l.Index, l.UUID, l.Reason))
	}
	return lines
}
