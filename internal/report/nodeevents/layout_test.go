package nodeevents_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodeevents"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// TestEventsOfMIGLayouts: a layout is reported once each when it waits, fails, needs a reset and is
// applied, but not if an earlier process applied it.
func TestEventsOfMIGLayouts(t *testing.T) {
	t.Parallel()
	layout := func(name, state, reason string, waiting ...string) *status.MIGLayout {
		return &status.MIGLayout{Layout: name, From: "label", State: state, Reason: reason, Waiting: waiting}
	}
	var h nodeevents.History
	now := start
	for i, step := range []struct {
		is   *status.MIGLayout
		want []string
		note string
	}{
		{layout("a", "success", ""), nil, ""},
		{layout("a", "success", ""), nil, ""},
		{layout("b", "pending", "GPU 0 is being changed"), nil, ""},
		{layout("b", "another", "GPU 0"), nil, ""},
		{layout("b", "pending", "pod default/p holds GPU 0", "GPU-0"), []string{"MIGLayoutWaiting GPU-0"},
			"layout b (label) waits: pod default/p holds GPU 0"},
		{layout("b", "pending", "pod default/q holds GPU 0", "GPU-0"), nil, ""},
		{layout("b", "success", ""), []string{"MIGLayoutMade"}, "layout b (label) is applied"},
		{layout("c", "failed", "no room"), []string{"MIGLayoutFailed"}, "layout c (label) cannot be applied: no room"},
		{layout("c", "failed", "no room"), nil, ""},
		{layout("c", "failed", "no driver"), []string{"MIGLayoutFailed"}, "no driver"},
		{layout("c", "rebooting", "GPU 3"), []string{"MIGLayoutNeedsReset"}, "a restart of the node: GPU 3"},
		{layout("a", "success", ""), []string{"MIGLayoutMade"}, "layout a"},
		{layout("", "", ""), nil, ""},
		{layout("a", "success", ""), []string{"MIGLayoutMade"}, "layout a"},
		{nil, nil, ""},
		{layout("a", "success", ""), []string{"MIGLayoutMade"}, "layout a"},
	} {
		now = now.Add(time.Hour) // beyond any rate
		batch := h.Next(with(node(gpu(0, "Healthy")), func(s *status.Status) { s.MIG = step.is }), now, plenty)
		if diff := cmp.Diff(step.want, reasonsOf(batch)); diff != "" {
			t.Errorf("step %d (-want +got):\n%s", i, diff)
		} else if step.note != "" && !strings.Contains(batch.Events[0].Note, step.note) {
			t.Errorf("step %d: note %q, want %q", i, batch.Events[0].Note, step.note)
		}
	}
	var failing nodeevents.History
	if got := reasonsOf(failing.Next(with(node(gpu(0, "Healthy")),
		func(s *status.Status) { s.MIG = layout("a", "failed", "x") }), start, plenty)); len(got) != 1 {
		t.Errorf("a layout that fails at the start: %q", got)
	}
}
