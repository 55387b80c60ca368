package nodeevents_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodeevents"
)

func TestFewer(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	at := now.Add
	for _, tt := range []struct {
		name string
		is   nodeevents.Fewer
		want nodeevents.FewerStep
	}{
		{"nothing", nodeevents.Fewer{Shown: true}, nodeevents.FewerStep{}},
		{"the status is not shown yet, and the node has no taint", nodeevents.Fewer{}, nodeevents.FewerStep{}},
		{"a change comes", nodeevents.Fewer{Number: 1}, nodeevents.FewerStep{Taint: true}},
		{"a change after one that was given up", nodeevents.Fewer{Number: 2, GivenUp: 1}, nodeevents.FewerStep{Taint: true}},
		{"the scheduler may not know of the taint", nodeevents.Fewer{Number: 1, Tainted: ago(time.Second)},
			nodeevents.FewerStep{Taint: true, At: at(time.Second)}},
		{"it knows", nodeevents.Fewer{Number: 1, Tainted: ago(2 * time.Second)},
			nodeevents.FewerStep{Taint: true, Look: true, At: at(500 * time.Millisecond)}},
		{"a pod is not admitted for long", nodeevents.Fewer{Number: 1, Tainted: ago(59800 * time.Millisecond)},
			nodeevents.FewerStep{Taint: true, Look: true, At: at(200 * time.Millisecond)}},
		{"nor for a minute", nodeevents.Fewer{Number: 1, Tainted: ago(time.Minute)},
			nodeevents.FewerStep{Proceed: true, GiveUp: true}},
		{"given up", nodeevents.Fewer{Number: 1, GivenUp: 1}, nodeevents.FewerStep{Proceed: true}},
		{"given up, and the taint is there still", nodeevents.Fewer{Number: 1, GivenUp: 1, Tainted: ago(time.Second)},
			nodeevents.FewerStep{Proceed: true}},
		{"all are admitted", nodeevents.Fewer{Number: 1, Tainted: ago(2 * time.Second), Admitted: true},
			nodeevents.FewerStep{Taint: true, Proceed: true, At: at(58 * time.Second)}},
		{"another change comes before the status", nodeevents.Fewer{Number: 2, Tainted: ago(5 * time.Second), Admitted: true},
			nodeevents.FewerStep{Taint: true, Proceed: true, At: at(55 * time.Second)}},
		{"the devices are gone", nodeevents.Fewer{Tainted: ago(3 * time.Second), Admitted: true},
			nodeevents.FewerStep{Taint: true, At: at(57 * time.Second)}},
		{"the status shows it", nodeevents.Fewer{Tainted: ago(3 * time.Second), Admitted: true, Shown: true},
			nodeevents.FewerStep{}},
		{"it never does", nodeevents.Fewer{Tainted: ago(time.Minute), Admitted: true}, nodeevents.FewerStep{}},
		{"a taint that an earlier process left", nodeevents.Fewer{Tainted: now, Shown: true}, nodeevents.FewerStep{}},
		{"another process led when the devices went", nodeevents.Fewer{Leads: ago(time.Second)},
			nodeevents.FewerStep{Taint: true}},
		{"the status shows it since", nodeevents.Fewer{Leads: ago(time.Second), Shown: true}, nodeevents.FewerStep{}},
		{"it did so long ago", nodeevents.Fewer{Leads: ago(time.Minute)}, nodeevents.FewerStep{}},
		{"that one was killed", nodeevents.Fewer{Leads: ago(2 * time.Second), Tainted: ago(time.Second)},
			nodeevents.FewerStep{Taint: true, At: at(59 * time.Second)}},
		{"the same, and a change waits", nodeevents.Fewer{Number: 1, Tainted: now, Shown: true},
			nodeevents.FewerStep{Taint: true, At: at(2 * time.Second)}},
	} {
		if diff := cmp.Diff(tt.want, tt.is.Next(now)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}
