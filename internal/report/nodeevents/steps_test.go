package nodeevents_test

import (
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodeevents"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// TestStepEvents: each reached step is reported once, in order. An unreached step is reported after
// a minute, also in the condition.
func TestStepEvents(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	s := status.Status{Version: "v", Looked: start, GPUs: []status.Device{{Index: "0", UUID: "GPU-0", State: "Healthy"}}}
	set := func(reached int, since time.Time) {
		s.Steps = nil
		for i, name := range []string{status.StepDriver, status.StepNodes, status.StepCUDA} {
			s.Steps = append(s.Steps, status.ReadyStep{Name: name, Reached: i < reached, Since: since, Seconds: float64(i + 1),
				Text: "text", Remedy: "remedy"})
		}
	}
	var h nodeevents.History
	for _, now := range []struct {
		after   time.Duration
		reached int
		since   time.Duration
		want    string // Events
		reason  nodeevents.Reason
	}{
		{0, 0, 0, "", nodeevents.AllHealthy},
		{time.Second, 2, 0, "Step 1 of 3, driver, 1.0 s|Step 2 of 3, device nodes, 2.0 s", nodeevents.AllHealthy},
		{2 * time.Second, 2, 0, "", nodeevents.AllHealthy},
		{time.Minute, 2, 0, "Pods get no GPU: CUDA, not reached since 2026-11-26T12:00:00Z: text; remedy",
			nodeevents.GPUNotReady},
		{2 * time.Minute, 2, 0, "", nodeevents.GPUNotReady},
		{3 * time.Minute, 3, 0, "Step 3 of 3, CUDA", nodeevents.AllHealthy},
		{4 * time.Minute, 0, 4 * time.Minute, "", nodeevents.AllHealthy},
		{5 * time.Minute, 3, 5 * time.Minute, "", nodeevents.AllHealthy},
		{6 * time.Minute, 0, 6 * time.Minute, "", nodeevents.AllHealthy},
		{7 * time.Minute, 0, 6 * time.Minute, "Pods get no GPU: driver, not", nodeevents.GPUNotReady},
		{8 * time.Minute, 3, 8 * time.Minute, "Step 1 of 3, driver, again", nodeevents.AllHealthy},
	} {
		at := start.Add(now.after)
		s.Looked = at
		set(now.reached, start.Add(now.since))
		var notes []string
		batch := h.Next(s, at, 100)
		for _, e := range batch.Events {
			notes = append(notes, e.Note)
		}
		want := strings.Split(now.want, "|")
		if len(notes) != len(want) && (now.want != "" || len(notes) > 0) {
			t.Errorf("after %v: %q", now.after, notes)
			continue
		}
		for i, note := range notes {
			if !strings.HasPrefix(note, want[i]) {
				t.Errorf("after %v: %q, want %q", now.after, note, want[i])
			}
		}
		if waits := now.reached < 3 && now.since+time.Minute > now.after; waits == batch.Again.IsZero() && now.reached < 3 &&
			now.want == "" && waits {
			t.Errorf("after %v: nothing is told later", now.after)
		}
		if c, ok := nodeevents.Judge(s, at, true); !ok || c.Reason != now.reason {
			t.Errorf("after %v: condition %+v, want %s", now.after, c, now.reason)
		}
	}
}
