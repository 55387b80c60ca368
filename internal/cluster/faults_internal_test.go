package cluster

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// Whatever the API server does while a GPU is lost: afterwards there is one Event, the condition and the taint; and back.
func TestFaultsOfTheAPIServer(t *testing.T) {
	for _, fault := range apiserver.Faults() {
		t.Run(fault.Name, func(t *testing.T) {
			s := newStage(t)
			d := s.start(everything, gpu(0, good))
			s.until("healthy", s.hasCondition("True"))
			during := func(what func()) {
				t.Helper()
				if err := fault.Begin(s.server); err != nil {
					t.Fatal(err)
				}
				what()
				s.pass(time.Minute, time.Second)
				if err := fault.End(s.server); err != nil {
					t.Fatal(err)
				}
			}
			during(func() { d.gpus(gpu(0, gone)) })
			s.until("lost", s.hasCondition("False GPULost"))
			s.until("tainted", s.tainted)
			s.until("one Event", s.hasEvents(map[string]int{"GPULost GPU-0": 1}))
			during(func() { d.gpus(gpu(0, good)) })
			s.until("healthy again", s.hasCondition("True"))
			s.until("not tainted", func() bool { return !s.tainted() })
			s.until("two Events", s.hasEvents(map[string]int{"GPULost GPU-0": 1, "GPURecovered GPU-0": 1}))
			s.pass(10*time.Minute, 5*time.Second)
			if !s.hasEvents(map[string]int{"GPULost GPU-0": 1, "GPURecovered GPU-0": 1})() {
				t.Errorf("Events %v", s.events())
			}
		})
	}
}

// While rights are missing or the API server wants less, few requests are made; nothing is said twice, and all is written afterwards.
func TestFewRequestsWhileRefused(t *testing.T) {
	for name, tt := range map[string]struct {
		fault apiserver.Fault
		most  int // of each writer, in an hour
	}{
		"forbidden":         {apiserver.Fault{Status: 403, Only: apiserver.Request.IsWrite}, 60},
		"too many requests": {apiserver.Fault{Status: 429, RetryAfter: 5 * time.Minute, Only: apiserver.Request.IsWrite}, 12},
		"internal error":    {apiserver.Fault{Status: 500, Only: apiserver.Request.IsWrite}, 60},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStage(t)
			d := s.start(everything, gpu(0, good), gpu(1, good))
			s.until("healthy", s.hasCondition("True"))
			s.server.SetFault(tt.fault)
			before := s.server.Writes()
			d.gpus(gpu(0, gone), gpu(1, bad))
			s.pass(time.Hour, 2*time.Second)
			if n := s.server.Writes() - before; n < 3 || n > 3*tt.most {
				t.Errorf("%d requests in an hour, want at most %d", n, 3*tt.most)
			}
			s.server.SetFault(apiserver.Fault{})
			s.until("all written", func() bool {
				return s.tainted() && s.hasCondition("False")() && s.hasEvents(map[string]int{"GPULost GPU-0": 1, "GPUUnhealthy GPU-1": 1})()
			})
		})
	}
}

// GPUs that flap for hours while the API server is away: the queue is bounded, drops are counted, and the last state is written.
func TestLongOutage(t *testing.T) {
	s := newStage(t)
	state := func(round int) []status.Device {
		var all []status.Device
		for i := range 6 {
			which := good
			if (i+round)%3 == 0 {
				which = bad
			}
			all = append(all, gpu(i, which))
		}
		return all
	}
	d := s.start(everything, state(1)...)
	s.until("a first state", s.hasCondition("False"))
	s.server.Stop()
	for round := range 360 {
		d.gpus(state(round)...)
		s.pass(20*time.Second, 10*time.Second)
	}
	var last []status.Device
	for i := range 6 {
		last = append(last, gpu(i, good))
	}
	d.gpus(last...)
	if d.drops("queue") == 0 {
		t.Errorf("drops %v", d.dropped)
	}
	if err := s.server.Resume(); err != nil {
		t.Fatal(err)
	}
	s.until("all healthy", s.hasCondition("True"))
	s.until("the last state of each", func() bool {
		said, recovered := map[string]time.Time{}, map[string]bool{}
		for _, e := range s.server.Events() {
			at := e.EventTime.Time
			if e.Series != nil {
				at = e.Series.LastObservedTime.Time
			}
			_, device, _ := strings.Cut(e.Note, "(")
			device, _, _ = strings.Cut(device, ")")
			if at.After(said[device]) {
				said[device], recovered[device] = at, e.Reason == "GPURecovered"
			}
		}
		return len(recovered) == 6 && !slices.Contains(slices.Collect(maps.Values(recovered)), false)
	})
}

// While the watch fails and writes work, what was written is not written again.
func TestWritesWithoutTheWatch(t *testing.T) {
	s := newStage(t)
	d := s.start(everything, gpu(0, good))
	s.until("healthy", s.hasCondition("True"))
	s.server.SetFault(apiserver.Fault{Status: 503, RetryAfter: time.Minute, Only: func(r apiserver.Request) bool {
		return r.Verb == "watch" || r.Verb == "list"
	}})
	s.server.DropWatches()
	writes := s.conditionWrites()
	d.gpus(gpu(0, gone))
	s.until("lost", func() bool { return s.hasCondition("False")() && s.tainted() })
	s.pass(5*time.Minute, time.Second)
	if n := s.conditionWrites() - writes; n != 1 {
		t.Errorf("%d writes of one change", n)
	}
}
