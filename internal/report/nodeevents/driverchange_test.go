package nodeevents_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodeevents"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// TestEventsOfDriverChanges: a change is reported once each when it begins, waits for a restart,
// fails, cannot begin and is done, but not if an earlier process did it. A change that only waits has
// no Event.
func TestEventsOfDriverChanges(t *testing.T) {
	t.Parallel()
	change := func(state driverchange.State, reason string) *driverchange.Status {
		return &driverchange.Status{Wanted: "580.1", Loaded: "570.1", State: state, Reason: reason}
	}
	var h nodeevents.History
	now := start
	for i, step := range []struct {
		is   *driverchange.Status
		want []string
		note string
	}{
		{change(driverchange.Done, ""), nil, ""},
		{change(driverchange.Waiting, "all slots are in use"), nil, ""},
		{change(driverchange.Changing, "copied"), []string{"DriverChangeStarted"}, "Driver 580.1 is being loaded in place of 570.1"},
		{change(driverchange.Waiting, "pods"), nil, ""},
		{change(driverchange.Changing, "modules"), nil, ""},
		{change(driverchange.AwaitsBoot, "in use: service x"), []string{"DriverChangeNeedsRestart"}, "at the next boot: in use: service x"},
		{change(driverchange.AwaitsBoot, "in use: service y"), nil, ""},
		{change(driverchange.Changing, ""), []string{"DriverChangeStarted"}, ""},
		{change(driverchange.Failed, "no GPU"), []string{"DriverChangeFailed"}, "keeps its slot: no GPU"},
		{change(driverchange.Failed, "no GPU"), nil, ""},
		{change(driverchange.Blocked, "no folder"), []string{"DriverChangeBlocked"}, "cannot be loaded: no folder"},
		{change("dancing", ""), nil, ""},
		{change(driverchange.Done, ""), []string{"DriverChanged"}, "Driver 580.1 is loaded and works"},
		{nil, nil, ""},
	} {
		now = now.Add(time.Hour) // beyond any rate
		batch := h.Next(with(node(gpu(0, "Healthy")), func(s *status.Status) { s.DriverChange = step.is }), now, plenty)
		if diff := cmp.Diff(step.want, reasonsOf(batch)); diff != "" {
			t.Errorf("step %d (-want +got):\n%s", i, diff)
		} else if step.note != "" && !strings.Contains(batch.Events[0].Note, step.note) {
			t.Errorf("step %d: note %q, want %q", i, batch.Events[0].Note, step.note)
		}
	}
}

// TestConditionWhileTheDriverChanges: nobody takes the change for a fault, or for a release by quiesce.
func TestConditionWhileTheDriverChanges(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		change driverchange.Status
		quiet  bool
		want   nodeevents.Reason
	}{
		{driverchange.Status{State: driverchange.Changing, Withholds: true}, true, nodeevents.DriverChanging},
		{driverchange.Status{State: driverchange.Changing, Withholds: true}, false, nodeevents.DriverChanging},
		{driverchange.Status{State: driverchange.Waiting}, true, nodeevents.DriverNotReady},
		{driverchange.Status{State: driverchange.Failed}, false, nodeevents.AllHealthy},
	} {
		s := with(node(gpu(0, "Healthy")), func(s *status.Status) { s.DriverChange, s.Quiet = &test.change, test.quiet })
		if c, _ := nodeevents.Judge(s, s.Looked, true); c.Reason != test.want {
			t.Errorf("%+v: %+v, want %s", test.change, c, test.want)
		}
	}
}
