package nodeevents_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodeevents"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// A note names MIG devices and GPUs as such, so that people find them.
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

// The last cause is the one that a GPU recovered from, also where it was no news.
func TestLastCause(t *testing.T) {
	var h nodeevents.History
	h.Next(node(gpu(0, "Unhealthy hang reset")), start, plenty)
	h.Next(node(gpu(0, "Unhealthy contact reset")), start, plenty)
	if got := h.Next(node(gpu(0, "Healthy")), start, plenty).Events; len(got) != 1 || got[0].Cause != "contact,reset" {
		t.Errorf("%+v", got)
	}
}

// Of two faults that fit the verdict, the first is its cause.
func TestFirstCause(t *testing.T) {
	var h nodeevents.History
	d := gpu(0, "Unhealthy hang reset")
	d.Faults = append(d.Faults, status.Fault{Source: "contact", Remedy: "reset"})
	if got := h.Next(node(d), start, plenty).Events; len(got) != 1 || got[0].Cause != "hang,reset" {
		t.Errorf("%+v", got)
	}
}

// A GPU is removed when a look does not find it, and not when nobody looks.
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
		if diff := cmp.Diff(tt.want, said(h.Next(with(node(gpu(0, "Healthy")), tt.change), start, plenty))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// What is left out of a good GPU is told beside a bad one, whose own Event tells of it.
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

// Before its first look, a daemon tells that the driver was released, and of nothing else.
func TestReleasedBeforeTheFirstLook(t *testing.T) {
	var h nodeevents.History
	h.Recall(nodeevents.Condition{}, true)
	s := with(node(gpu(0, "Healthy")), func(s *status.Status) { s.Looked = time.Time{} })
	if got := said(h.Next(s, start, plenty)); got != nil {
		t.Errorf("told %v", got)
	}
	s.Quiet = true
	if got := said(h.Next(s, start, plenty)); !cmp.Equal(got, []string{"DriverReleased"}) {
		t.Errorf("released: told %v", got)
	}
}

// What finds no room is told when there is room, if it is still so.
func TestNoRoom(t *testing.T) {
	var h nodeevents.History
	h.Next(node(gpu(0, "Healthy"), gpu(1, "Healthy")), start, plenty)
	bad := node(gpu(0, "Unhealthy hang reset"), gpu(1, "Unhealthy hang reset"))
	b := h.Next(bad, start, 1)
	if len(b.Events) != 1 || !cmp.Equal(b.Dropped, []string{nodeevents.DropQueue}) {
		t.Errorf("%v, dropped %v", said(b), b.Dropped)
	}
	if b = h.Next(bad, start, 0); len(b.Events)+len(b.Dropped) != 0 {
		t.Errorf("still no room: %v, dropped again %v", said(b), b.Dropped)
	}
	if got := said(h.Next(bad, start, 1)); !cmp.Equal(got, []string{"GPUUnhealthy GPU-1"}) {
		t.Errorf("with room: %v", got)
	}
}

// What waits for a rate is told when the rate allows it, also where something else found no room
// meanwhile.
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
		t.Errorf("again at %v, want %v: %v, dropped %v", b.Again, want, said(b), b.Dropped)
	}
}
