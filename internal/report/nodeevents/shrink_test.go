package nodeevents_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodeevents"
)

func TestShrink(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	at := now.Add
	for _, tt := range []struct {
		name string
		is   nodeevents.Shrink
		want nodeevents.ShrinkStep
	}{
		{"nothing", nodeevents.Shrink{Shown: true}, nodeevents.ShrinkStep{}},
		{"the status is not shown yet, and the node has no taint", nodeevents.Shrink{}, nodeevents.ShrinkStep{}},
		{"a change comes", nodeevents.Shrink{Number: 1}, nodeevents.ShrinkStep{Taint: true}},
		{"a change after one that was given up", nodeevents.Shrink{Number: 2, GivenUp: 1},
			nodeevents.ShrinkStep{Taint: true}},
		{"the scheduler may not know of the taint", nodeevents.Shrink{Number: 1, Tainted: ago(time.Second)},
			nodeevents.ShrinkStep{Taint: true, At: at(time.Second)}},
		{"it knows", nodeevents.Shrink{Number: 1, Tainted: ago(2 * time.Second)},
			nodeevents.ShrinkStep{Taint: true, Look: true, At: at(500 * time.Millisecond)}},
		{"a pod is not admitted for long", nodeevents.Shrink{Number: 1, Tainted: ago(59800 * time.Millisecond)},
			nodeevents.ShrinkStep{Taint: true, Look: true, At: at(200 * time.Millisecond)}},
		{"nor for a minute", nodeevents.Shrink{Number: 1, Tainted: ago(time.Minute)},
			nodeevents.ShrinkStep{Proceed: true, GiveUp: true}},
		{"given up", nodeevents.Shrink{Number: 1, GivenUp: 1}, nodeevents.ShrinkStep{Proceed: true}},
		{"given up, and the taint is there still", nodeevents.Shrink{Number: 1, GivenUp: 1, Tainted: ago(time.Second)},
			nodeevents.ShrinkStep{Proceed: true}},
		{"all are admitted", nodeevents.Shrink{Number: 1, Tainted: ago(2 * time.Second), Admitted: true},
			nodeevents.ShrinkStep{Taint: true, Proceed: true, At: at(58 * time.Second)}},
		{"another change comes before the status",
			nodeevents.Shrink{Number: 2, Tainted: ago(5 * time.Second), Admitted: true},
			nodeevents.ShrinkStep{Taint: true, Proceed: true, At: at(55 * time.Second)}},
		{"the devices are gone", nodeevents.Shrink{Tainted: ago(3 * time.Second), Admitted: true},
			nodeevents.ShrinkStep{Taint: true, At: at(57 * time.Second)}},
		{"the status shows it", nodeevents.Shrink{Tainted: ago(3 * time.Second), Admitted: true, Shown: true},
			nodeevents.ShrinkStep{}},
		{"it never does", nodeevents.Shrink{Tainted: ago(time.Minute), Admitted: true}, nodeevents.ShrinkStep{}},
		{"a taint that an earlier process left", nodeevents.Shrink{Tainted: now, Shown: true}, nodeevents.ShrinkStep{}},
		{"another process led when the devices went", nodeevents.Shrink{Leads: ago(time.Second)},
			nodeevents.ShrinkStep{Taint: true}},
		{"the status shows it since", nodeevents.Shrink{Leads: ago(time.Second), Shown: true}, nodeevents.ShrinkStep{}},
		{"it did so long ago", nodeevents.Shrink{Leads: ago(time.Minute)}, nodeevents.ShrinkStep{}},
		{"that one was killed", nodeevents.Shrink{Leads: ago(2 * time.Second), Tainted: ago(time.Second)},
			nodeevents.ShrinkStep{Taint: true, At: at(59 * time.Second)}},
		{"the same, and a change waits", nodeevents.Shrink{Number: 1, Tainted: now, Shown: true},
			nodeevents.ShrinkStep{Taint: true, At: at(2 * time.Second)}},
	} {
		if diff := cmp.Diff(tt.want, tt.is.Next(now)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}
