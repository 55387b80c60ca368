package nodeevents

import (
	"fmt"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// A layoutReport is the content of the last Event about a MIG layout.
type layoutReport struct{ layout, state, reason string }

// layoutEvents returns Events about the progress of the wanted MIG layout. Pending layouts are
// reported only if they wait for somebody.
func (h *History) layoutEvents(s status.Status) []candidate {
	m := s.MIG
	if m == nil || m.Layout == "" {
		h.layout = layoutReport{}
		return nil
	}
	is := layoutReport{layout: m.Layout, state: m.State}
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
		c.Reason, c.Note = MIGLayoutFailed, about+" cannot be applied: "+m.Reason
	case "rebooting":
		c.Reason, c.Note = MIGLayoutReset, about+" needs a reset of GPUs or a restart of the node: "+m.Reason
	case "success":
		c.Reason, c.Note = MIGLayoutMade, about+" is applied"
	default:
		return nil
	}
	if is == h.layout || !h.hasBegun && m.State == "success" { // applied by an earlier process
		h.layout = is
		return nil
	}
	c.Cause = is.layout + "," + is.reason
	c.record = func() { h.layout = is }
	return []candidate{c}
}
