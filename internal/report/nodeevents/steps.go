package nodeevents

import (
	"fmt"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// stepPatience is how long a step must be unreached before the cluster is notified.
const stepPatience = time.Minute

// late returns the step for which pods have waited unusually long.
func late(s status.Status, now time.Time) (status.ReadyStep, bool) {
	step, waits := s.Waits()
	return step, waits && now.Sub(step.Since) >= stepPatience
}

// waitsFor describes an unreached step, its age and its remedy.
func waitsFor(s status.ReadyStep) string {
	text := fmt.Sprintf("%s, not reached since %s: %s", s.Name, status.Stamp(s.Since), s.Text)
	if s.Remedy != "" {
		text += "; " + s.Remedy
	}
	return text
}

// stepEvents returns an Event for each newly reached step, and for a step that is late. It also
// returns when the next step will be late; zero for never.
func (h *History) stepEvents(s status.Status, now time.Time) (events []candidate, due time.Time) {
	for i, step := range s.Steps {
		wasReached, known := h.steps[step.Name]
		c := candidate{subject: "step " + step.Name, limited: "steps",
			record: func() { h.steps[step.Name] = step.Reached }}
		switch {
		case step.Reached && !wasReached:
			c.NodeEvent = NodeEvent{
				Reason: GPUStepReached, Cause: step.Name,
				Note: fmt.Sprintf("Step %d of %d, %s, %.1f s after the start of the daemon: %s", i+1, len(s.Steps),
					step.Name, step.Seconds, step.Text),
			}
			if known { // reached before, then lost
				c.Note = fmt.Sprintf("Step %d of %d, %s, again: %s", i+1, len(s.Steps), step.Name, step.Text)
			}
			events = append(events, c)
		case !step.Reached && (wasReached || !known):
			if at := step.Since.Add(stepPatience); at.After(now) {
				return events, at
			}
			c.NodeEvent = NodeEvent{Reason: GPUStepMissing, Cause: step.Name + ": " + step.Text,
				Note: "Pods get no GPU: " + waitsFor(step)}
			return append(events, c), time.Time{}
		case !step.Reached:
			return events, time.Time{}
		}
	}
	return events, time.Time{}
}
