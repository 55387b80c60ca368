package nodeevents_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodeevents"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// TestNotesNameDevices: a note says whether a device is a MIG device or a GPU.
func TestNotesNameDevices(t *testing.T) {
	g := gpu(0, "Healthy")
	for want, d := range map[string]status.Device{
		"GPU 1 (GPU-1)": gpu(1, "Unhealthy hang reset"), "MIG device 0:3 (MIG-0-3)": mig(g, 3, "Unhealthy hang reset"),
	} {
		var h nodeevents.History
		events := h.Next(node(g, d), start, plenty).Events
		if len(events) != 1 || !strings.Contains(events[0].Note, want) {
			t.Errorf("%+v, want %q in the note", events, want)
		}
	}
}

// TestLastCause: a recovered GPU names its last cause, even one without an Event.
func TestLastCause(t *testing.T) {
	var h nodeevents.History
	h.Next(node(gpu(0, "Unhealthy hang reset")), start, plenty)
	h.Next(node(gpu(0, "Unhealthy contact reset")), start, plenty)
	if got := h.Next(node(gpu(0, "Healthy")), start, plenty).Events; len(got) != 1 || got[0].Cause != "contact,reset" {
		t.Errorf("%+v", got)
	}
}

// TestFirstCause: of two faults that fit the verdict, the first is the cause.
func TestFirstCause(t *testing.T) {
	var h nodeevents.History
	d := gpu(0, "Unhealthy hang reset")
	d.Faults = append(d.Faults, status.Fault{Source: "contact", Remedy: "reset"})
	if got := h.Next(node(d), start, plenty).Events; len(got) != 1 || got[0].Cause != "hang,reset" {
		t.Errorf("%+v", got)
	}
}

// TestNothingIsRemovedUnseen: a GPU is removed when a scan does not find it, and never without a
// scan.
func TestNothingIsRemovedUnseen(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*status.Status)
		want   []string
	}{
		"seen":     {func(*status.Status) {}, []string{"GPURemoved GPU-1"}},
		"stale":    {func(s *status.Status) { s.Stale = "no driver" }, []string{"DriverNotReady"}},
		"released": {func(s *status.Status) { s.Quiet, s.Stale = true, "" }, []string{"DriverReleased"}},
	} {
		var h nodeevents.History
		h.Next(node(gpu(0, "Healthy"), gpu(1, "Healthy")), start, plenty)
		if diff := cmp.Diff(tt.want, reasonsOf(h.Next(with(node(gpu(0, "Healthy")), tt.change), start, plenty))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestLeftOutBesideABadGPU: left-out devices of a good GPU are reported beside a bad GPU with its
// own Event.
func TestLeftOutBesideABadGPU(t *testing.T) {
	var h nodeevents.History
	s := with(node(gpu(0, "Healthy"), gpu(1, "Lost lost reconnect")), func(s *status.Status) {
		s.LeftOut = []string{"GPU 0: display", "GPU 1: no UUID"}
	})
	events := h.Next(s, start, plenty).Events
	var notes []string
	for _, e := range events {
		if e.Reason == nodeevents.ResourceLeftOut {
			notes = append(notes, e.Note)
		}
	}
	if diff := cmp.Diff([]string{"Not offered: GPU 0: display"}, notes); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestReleasedBeforeTheFirstScan: before the first scan a daemon only reports that the driver was
// released.
func TestReleasedBeforeTheFirstScan(t *testing.T) {
	var h nodeevents.History
	h.Recall(nodeevents.Condition{}, true)
	s := with(node(gpu(0, "Healthy")), func(s *status.Status) { s.Looked = time.Time{} })
	if got := reasonsOf(h.Next(s, start, plenty)); got != nil {
		t.Errorf("told %v", got)
	}
	s.Quiet = true
	if got := reasonsOf(h.Next(s, start, plenty)); !cmp.Equal(got, []string{"DriverReleased"}) {
		t.Errorf("released: told %v", got)
	}
}

// TestNoRoom: an Event without room is reported once there is room, if it is still true.
func TestNoRoom(t *testing.T) {
	var h nodeevents.History
	h.Next(node(gpu(0, "Healthy"), gpu(1, "Healthy")), start, plenty)
	bad := node(gpu(0, "Unhealthy hang reset"), gpu(1, "Unhealthy hang reset"))
	b := h.Next(bad, start, 1)
	if len(b.Events) != 1 || !cmp.Equal(b.Dropped, []string{nodeevents.DropQueue}) {
		t.Errorf("%v, dropped %v", reasonsOf(b), b.Dropped)
	}
	if b = h.Next(bad, start, 0); len(b.Events)+len(b.Dropped) != 0 {
		t.Errorf("still no room: %v, dropped again %v", reasonsOf(b), b.Dropped)
	}
	if got := reasonsOf(h.Next(bad, start, 1)); !cmp.Equal(got, []string{"GPUUnhealthy GPU-1"}) {
		t.Errorf("with room: %v", got)
	}
}

// TestNoRoomBesideARate: an Event that waits for a rate is reported when the rate allows it, even
// if another Event found no room meanwhile.
func TestNoRoomBesideARate(t *testing.T) {
	var h nodeevents.History
	one := func(state, other string) status.Status { return node(gpu(0, state), gpu(1, other)) }
	h.Next(one("Healthy", "Healthy"), start, plenty)
	state := "Healthy"
	for range 20 {
		if state = "Unhealthy hang reset"; len(h.Next(one(state, "Healthy"), start, plenty).Events) == 0 {
			break
		}
		if state = "Healthy"; len(h.Next(one(state, "Healthy"), start, plenty).Events) == 0 {
			break
		}
	}
	want := h.Next(one(state, "Healthy"), start, plenty).Again
	s := with(one(state, "Healthy"), func(s *status.Status) { s.ConfigError = "line 3" })
	s.GPUs = append(s.GPUs, gpu(2, "Unhealthy xid 79 reboot"))
	if b := h.Next(s, start, 1); len(b.Events) != 1 || !b.Again.Equal(want) || want.IsZero() {
		t.Errorf("again at %v, want %v: %v, dropped %v", b.Again, want, reasonsOf(b), b.Dropped)
	}
}
