package report_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/report"
)

func TestFewer(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	at := now.Add
	for _, tt := range []struct {
		name string
		is   report.Fewer
		want report.FewerStep
	}{
		{"nothing", report.Fewer{Shown: true}, report.FewerStep{}},
		{"the status is not shown yet, and the node has no taint", report.Fewer{}, report.FewerStep{}},
		{"a change comes", report.Fewer{Number: 1}, report.FewerStep{Taint: true}},
		{"a change after one that was given up", report.Fewer{Number: 2, GivenUp: 1}, report.FewerStep{Taint: true}},
		{"the scheduler may not know of the taint", report.Fewer{Number: 1, Tainted: ago(time.Second)}, report.FewerStep{Taint: true, At: at(time.Second)}},
		{"it knows", report.Fewer{Number: 1, Tainted: ago(2 * time.Second)}, report.FewerStep{Taint: true, Look: true, At: at(500 * time.Millisecond)}},
		{"a pod is not admitted for long", report.Fewer{Number: 1, Tainted: ago(59800 * time.Millisecond)},
			report.FewerStep{Taint: true, Look: true, At: at(200 * time.Millisecond)}},
		{"nor for a minute", report.Fewer{Number: 1, Tainted: ago(time.Minute)}, report.FewerStep{Proceed: true, GiveUp: true}},
		{"given up", report.Fewer{Number: 1, GivenUp: 1}, report.FewerStep{Proceed: true}},
		{"given up, and the taint is there still", report.Fewer{Number: 1, GivenUp: 1, Tainted: ago(time.Second)}, report.FewerStep{Proceed: true}},
		{"all are admitted", report.Fewer{Number: 1, Tainted: ago(2 * time.Second), Admitted: true},
			report.FewerStep{Taint: true, Proceed: true, At: at(58 * time.Second)}},
		{"another change comes before the status", report.Fewer{Number: 2, Tainted: ago(5 * time.Second), Admitted: true},
			report.FewerStep{Taint: true, Proceed: true, At: at(55 * time.Second)}},
		{"the devices are gone", report.Fewer{Tainted: ago(3 * time.Second), Admitted: true}, report.FewerStep{Taint: true, At: at(57 * time.Second)}},
		{"the status shows it", report.Fewer{Tainted: ago(3 * time.Second), Admitted: true, Shown: true}, report.FewerStep{}},
		{"it never does", report.Fewer{Tainted: ago(time.Minute), Admitted: true}, report.FewerStep{}},
		{"a taint that an earlier process left", report.Fewer{Tainted: now, Shown: true}, report.FewerStep{}},
		{"another process led when the devices went", report.Fewer{Leads: ago(time.Second)}, report.FewerStep{Taint: true}},
		{"the status shows it since", report.Fewer{Leads: ago(time.Second), Shown: true}, report.FewerStep{}},
		{"it did so long ago", report.Fewer{Leads: ago(time.Minute)}, report.FewerStep{}},
		{"that one was killed", report.Fewer{Leads: ago(2 * time.Second), Tainted: ago(time.Second)}, report.FewerStep{Taint: true, At: at(59 * time.Second)}},
		{"the same, and a change waits", report.Fewer{Number: 1, Tainted: now, Shown: true}, report.FewerStep{Taint: true, At: at(2 * time.Second)}},
	} {
		if diff := cmp.Diff(tt.want, tt.is.Next(now)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}
