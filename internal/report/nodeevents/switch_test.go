package nodeevents_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodeevents"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// TestNVSwitches: each fatal error has one Event, and many simultaneous errors share one. The
// condition still only reflects the GPUs.
func TestNVSwitches(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)
	s := status.Status{Version: "v1", Looked: now, GPUs: []status.Device{{Index: "0", UUID: "GPU-0", State: "Healthy"}}}
	var h nodeevents.History
	told := func(failed ...string) (notes []string) {
		s.NVSwitches = failed
		now = now.Add(time.Hour)
		s.Looked = now
		for _, e := range h.Next(s, now, 10).Events {
			notes = append(notes, string(e.Reason)+": "+e.Note)
		}
		return notes
	}
	const a, b = "NVSwitch 0000:c4:00.0: SXid 20034", "NVSwitch 0000:c4:00.0: SXid 12028"
	const rest = ", a fatal error: NVLinks of the node's GPUs have failed. Drain the node and restart it"
	for _, step := range []struct{ failed, want []string }{
		{nil, nil},
		{[]string{a}, []string{"NVSwitchFailed: " + a + rest}},
		{[]string{a}, nil},
		{[]string{a, b}, []string{"NVSwitchFailed: " + b + rest}},
		{[]string{a, b, "1", "2", "3", "4", "5"}, []string{"NVSwitchFailed: 5 similar Events. The first: 1" + rest +
			". All: 1; 2; 3; 4; 5"}},
	} {
		if diff := cmp.Diff(step.want, told(step.failed...)); diff != "" {
			t.Errorf("%q (-want +got):\n%s", step.failed, diff)
		}
	}
	if c, _ := nodeevents.Judge(s, now, true); c.Status != nodeevents.True {
		t.Errorf("the condition: %+v", c)
	}
}
