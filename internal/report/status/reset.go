package status

import (
	"strings"
	"time"
)

// A Reset is a reset of GPUs, requested by the command reset or by a repair.
type Reset struct {
	// GPUs are the UUIDs.
	GPUs []string `json:"gpus"`
	// Phase is waiting, resetting, hangs, done, failed or interrupted.
	Phase string `json:"phase"`
	// Since is when the reset was requested.
	Since time.Time `json:"since"`
	// Reason is the awaited condition, or why the GPUs were not reset.
	Reason string `json:"reason,omitempty"`
}

// Line describes the progress of the reset with the indexes of the GPUs, for people; empty for nil.
func (r *Reset) Line(gpus []Device) string {
	if r == nil {
		return ""
	}
	text := indexes(r.GPUs, gpus) + ", requested at " + Stamp(r.Since) + ", " + r.Phase
	if r.Reason != "" {
		text += ": " + r.Reason
	}
	return text
}

// indexes names GPUs by their indexes; a GPU that is not there any more by its UUID.
func indexes(uuids []string, gpus []Device) string {
	names := make([]string, len(uuids))
	for i, uuid := range uuids {
		names[i] = uuid
		for _, d := range gpus {
			if d.UUID == uuid {
				names[i] = d.Index
			}
		}
	}
	return "GPU " + strings.Join(names, ", ")
}
