package nodeevents

import (
	"fmt"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// repairEvents returns Events about repairs of GPUs. What an earlier process did has no Event.
func (h *History) repairEvents(s status.Status) []candidate {
	before := h.repairs
	h.repairs = map[string]Reason{}
	if s.Repair == nil {
		return nil
	}
	var all []candidate
	add := func(key string, c candidate) {
		if h.repairs[key] = before[key]; before[key] == c.Reason {
			return
		}
		if !h.hasBegun && c.Reason != GPURepairPlanned {
			h.repairs[key] = c.Reason
			return
		}
		c.subject, c.Cause = "repair "+key, key
		c.record = func() { h.repairs[key] = c.Reason }
		all = append(all, c)
	}
	for _, step := range s.Repair.Steps {
		if s.Repair.Mode == repair.Plan && step.State == repair.Ready {
			add(step.UUID, candidate{NodeEvent: NodeEvent{Reason: GPURepairPlanned, Devices: []string{step.UUID},
				Note: fmt.Sprintf("GPU %d would be reset now: %s", step.Index, step.Fault)}})
		}
	}
	for _, a := range s.Repair.Attempts {
		c := candidate{NodeEvent: NodeEvent{Reason: GPURepairStarted, Devices: a.GPUs,
			Note: strings.Join(a.GPUs, ", ") + " " + status.AttemptText(a)}}
		switch {
		case a.Ended.IsZero():
		case a.Repaired:
			c.Reason = GPURepaired
		default:
			c.Reason = GPURepairFailed
		}
		add(a.GPUs[0]+" "+status.Stamp(a.Began), c)
	}
	return all
}
