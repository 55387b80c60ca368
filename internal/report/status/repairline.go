package status

import (
	"fmt"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
)

// RepairSentences describes the repairs of GPUs, for people: each GPU that needs a reset, and each
// repair of the last 24 hours; none for nil.
func RepairSentences(r *repair.Status, gpus []Device) []string {
	if r == nil {
		return nil
	}
	var all []string
	if r.Problem != "" {
		all = append(all, r.Problem)
	}
	for _, s := range r.Steps {
		all = append(all, fmt.Sprintf("GPU %d %s: %s", s.Index, s.State, s.Reason))
	}
	for _, a := range r.Attempts {
		all = append(all, indexes(a.GPUs, gpus)+" "+AttemptText(a))
	}
	return all
}

// AttemptText describes a repair, with the states of the GPUs before and after it.
func AttemptText(a repair.Attempt) string {
	result := "not repaired"
	switch {
	case a.Ended.IsZero():
		return "being reset since " + Stamp(a.Began) + "; before: " + a.Before
	case a.Repaired:
		result = "repaired"
	}
	return fmt.Sprintf("%s by a reset at %s in %v; before: %s; after: %s", result, Stamp(a.Began),
		a.Ended.Sub(a.Began).Round(time.Second), a.Before, a.After)
}
