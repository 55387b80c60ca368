package nodeevents

import (
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// A driverReport is the content of the last Event about a change of the driver.
type driverReport struct {
	wanted string
	state  driverchange.State
	reason string
}

// driverChangeEvents returns Events about the progress of a change of the driver. A change that waits
// has none.
func (h *History) driverChangeEvents(s status.Status) []candidate {
	d := s.DriverChange
	if d == nil {
		h.change = driverReport{}
		return nil
	}
	is := driverReport{wanted: d.Wanted, state: d.State}
	about := "Driver " + d.Wanted
	c := candidate{subject: "change of the driver", limited: "change of the driver"}
	switch d.State {
	case driverchange.Changing:
		c.Reason, c.Note = DriverChangeStarted, about+" is being loaded"
		if d.Loaded != "" {
			c.Note += " in place of " + d.Loaded
		}
	case driverchange.AwaitsBoot:
		c.Reason, c.Note = DriverChangeNeedsRestart, about+" is loaded at the next boot: "+d.Reason
	case driverchange.Failed:
		is.reason = d.Reason
		c.Reason, c.Note = DriverChangeFailed, about+" does not work, and the node keeps its slot: "+d.Reason
	case driverchange.Blocked:
		is.reason = d.Reason
		c.Reason, c.Note = DriverChangeBlocked, about+" cannot be loaded: "+d.Reason
	case driverchange.Done:
		c.Reason, c.Note = DriverChanged, about+" is loaded and works"
	case driverchange.Off, driverchange.Waiting:
		return nil
	default: // of a newer version
		return nil
	}
	if is == h.change || !h.hasBegun && d.State == driverchange.Done { // loaded by an earlier process
		h.change = is
		return nil
	}
	c.Cause = is.wanted + "," + is.reason
	c.record = func() { h.change = is }
	return []candidate{c}
}
