package nodeevents

import (
	"fmt"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// A layoutTold is what the last Event said of a MIG layout.
type layoutTold struct{ layout, state, reason string }

// layoutEvents tells what becomes of the MIG layout that is asked for. That it is being made is not
// told, only whom it waits for.
func (h *History) layoutEvents(s status.Status) []candidate {
	m := s.MIG
	if m == nil || m.Layout == "" {
		h.layout = layoutTold{}
		return nil
	}
	is := layoutTold{layout: m.Layout, state: m.State}
	about := fmt.Sprintf("MIG layout %s (%s)", m.Layout, m.From)
	c := candidate{subject: "MIG layout", limited: "MIG layout"}
	switch m.State {
	case "pending":
		if len(m.Waiting) == 0 {
			return nil
		}
		c.Reason, c.Note, c.Devices = MIGLayoutWaiting, about+" waits: "+m.Reason, m.Waiting
	case "failed":
		is.reason = m.Reason
		c.Reason, c.Note = MIGLayoutFailed, about+" cannot be made: "+m.Reason
	case "rebooting":
		c.Reason, c.Note = MIGLayoutReset, about+" needs a reset of GPUs or a restart of the node: "+m.Reason
	case "success":
		c.Reason, c.Note = MIGLayoutMade, about+" is made"
	default:
		return nil
	}
	if is == h.layout || !h.begun && m.State == "success" { // an earlier process made it
		h.layout = is
		return nil
	}
	c.Cause = is.layout + "," + is.reason
	c.told = func() { h.layout = is }
	return []candidate{c}
}
