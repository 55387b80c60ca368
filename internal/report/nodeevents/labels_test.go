package nodeevents_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodeevents"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// TestLabels: the reason for missing labels is reported after a minute, once for each reason, and
// again after a recurrence.
func TestLabels(t *testing.T) {
	var h nodeevents.History
	now := start
	next := func(reason string, after time.Duration) (reasons []string) {
		now = now.Add(after)
		b := h.Next(with(node(gpu(0, "Healthy")), func(s *status.Status) { s.LabelsError = reason }), now, plenty)
		for _, e := range b.Events {
			reasons = append(reasons, string(e.Reason)+" "+e.Note)
		}
		if !b.Again.IsZero() {
			reasons = append(reasons, "again in "+b.Again.Sub(now).String())
		}
		return reasons
	}
	for i, step := range []struct {
		reason string
		after  time.Duration
		want   []string
	}{
		{"", 0, nil},
		{"the API server is away", time.Second, []string{"again in 1m0s"}},
		{"", time.Second, nil},
		{"theirs", time.Second, []string{"again in 1m0s"}},
		{"theirs", 59 * time.Second, []string{"again in 1s"}},
		{"theirs", time.Second, []string{"LabelsWithheld Labels of the node: theirs"}},
		{"theirs", time.Hour, nil},
		{"others", time.Hour, []string{"again in 1m0s"}},
		{"others", time.Hour, []string{"LabelsWithheld Labels of the node: others"}},
		{"", time.Hour, nil},
		{"others", time.Hour, []string{"again in 1m0s"}},
		{"others", time.Minute, []string{"LabelsWithheld Labels of the node: others"}},
	} {
		if diff := cmp.Diff(step.want, next(step.reason, step.after)); diff != "" {
			t.Errorf("step %d (-want +got):\n%s", i, diff)
		}
	}
}
