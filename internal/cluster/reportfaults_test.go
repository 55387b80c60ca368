package cluster_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// A condition of which nobody takes care any more tells nothing of what was told.
func TestOldCondition(t *testing.T) {
	onStage(t, func(s *stage) {
		s.change(func(n *corev1.Node) {
			n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{
				Type: conditionType, Status: corev1.ConditionFalse, Reason: "GPUUnhealthy",
				Message: "GPU-0 Unhealthy: hang, remedy: reset",
			})
		})
		s.reporter(config.Features{Events: true}, gpu(0, good), gpu(1, bad))
		s.pass(2 * time.Minute)
		if want := map[string]int{"GPUUnhealthy GPU-1": 1}; !cmp.Equal(want, s.events()) {
			s.Errorf("Events %v", s.events())
		}
	})
}

// A node starts for the first time while the API server is away: until it tells of the node, the
// label that chooses the configuration is not known. That is over when an Event can be written, and
// none tells of it.
func TestNoEventOfUncertainConfiguration(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.new(config.Config{Live: config.Live{Features: everything}})
		read := p.Status
		p.Status = func(ctx context.Context) (status.Status, error) {
			now, err := read(ctx)
			if !strings.Contains(p.requests(), "WATCH nodes 200") {
				now.ConfigError = "the label is not known"
			}
			return now, err
		}
		s.server.Stop()
		p.gpus(gpu(0, bad))
		p.start()
		s.pass(time.Minute)
		if err := s.server.Resume(); err != nil {
			s.Fatal(err)
		}
		s.untilEvents(map[string]int{"GPUUnhealthy GPU-0": 1})
		if s.pass(time.Minute); len(s.events()) > 1 {
			s.Errorf("Events %v", s.events())
		}
	})
}

// The taint is turned off together with the right to remove it: the log says how a person does it.
func TestUnremovableTaint(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.reporter(everything, gpu(0, bad))
		s.until("tainted", s.tainted)
		s.server.SetFault(apiserver.Fault{Status: 403, Only: apiserver.Request.IsWrite})
		p.configure(func(c *config.Config) { c.Features = config.Features{} })
		s.until("the command", func() bool { return p.logged("kubectl taint node "+nodeName+" "+ourTaint+"-") > 0 })
	})
}

// Whatever the API server does while a GPU is lost: afterwards there is one Event, the condition
// and the taint; and back.
func TestReportsThroughFaults(t *testing.T) {
	throughFaults(t, func(s *stage, fault apiserver.NamedFault) {
		p := s.reporter(everything, gpu(0, good))
		s.untilCondition("True")
		s.during(fault, func() { p.gpus(gpu(0, gone)) })
		s.untilCondition("False GPULost")
		s.until("tainted", s.tainted)
		s.untilEvents(map[string]int{"GPULost GPU-0": 1})
		s.during(fault, func() { p.gpus(gpu(0, good)) })
		s.untilCondition("True")
		s.until("not tainted", func() bool { return !s.tainted() })
		want := map[string]int{"GPULost GPU-0": 1, "GPURecovered GPU-0": 1}
		s.untilEvents(want)
		if s.pass(10 * time.Minute); !cmp.Equal(want, s.events()) {
			s.Errorf("Events %v", s.events())
		}
	})
}

// While rights are missing or the API server wants less, few requests are made; nothing is said
// twice, and all is written afterwards. Of an Event that it calls wrong, nothing is tried again.
func TestFewRequestsWhileRefused(t *testing.T) {
	for name, tt := range map[string]struct {
		fault apiserver.Fault
		most  int // of each writer, in an hour
	}{
		"forbidden":         {apiserver.Fault{Status: 403, Only: apiserver.Request.IsWrite}, 60},
		"too many requests": {apiserver.Fault{Status: 429, RetryAfter: 5 * time.Minute, Only: apiserver.Request.IsWrite}, 12},
		"internal error":    {apiserver.Fault{Status: 500, Only: apiserver.Request.IsWrite}, 60},
		"wrong Events": {apiserver.Fault{Status: 422,
			Only: func(r apiserver.Request) bool { return r.Resource == "events" }}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				p := s.reporter(everything, gpu(0, good), gpu(1, good))
				s.untilCondition("True")
				s.server.SetFault(tt.fault)
				p.gpus(gpu(0, gone), gpu(1, bad))
				if n := s.writes(func() { s.pass(time.Hour) }); n < 3 || n > 3*tt.most {
					s.Errorf("%d requests in an hour, want at most %d", n, 3*tt.most)
				}
				s.server.SetFault(apiserver.Fault{})
				s.until("tainted", s.tainted)
				s.untilCondition("False")
				want := map[string]int{"GPULost GPU-0": 1, "GPUUnhealthy GPU-1": 1}
				if name == "wrong Events" {
					want = map[string]int{}
					if n := p.drops("refused"); n != 2 {
						s.Errorf("%d Events are counted as dropped", n)
					}
				}
				s.untilEvents(want)
			})
		})
	}
}

// GPUs that flap for hours while the API server is away: the queue is bounded, drops are counted,
// and the last state is written. What the rate keeps back is said later, although nothing changes
// then.
func TestLongOutage(t *testing.T) {
	onStage(t, func(s *stage) {
		state := func(round int) []status.Device {
			var all []status.Device
			for i := range 6 {
				all = append(all, gpu(i, map[bool]string{true: bad, false: good}[round >= 0 && (i+round)%3 == 0]))
			}
			return all
		}
		p := s.reporter(everything, state(1)...)
		s.untilCondition("False")
		s.server.Stop()
		for round := range 360 {
			p.gpus(state(round)...)
			s.pass(20 * time.Second)
		}
		p.gpus(state(-1)...)
		if p.drops("queue") == 0 {
			s.Errorf("drops %v", p.dropped)
		}
		if err := s.server.Resume(); err != nil {
			s.Fatal(err)
		}
		s.untilCondition("True")
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
	})
}

// While the watch fails and writes work, what was written is not written again.
func TestWritesWithoutTheWatch(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.reporter(everything, gpu(0, good))
		s.untilCondition("True")
		s.server.SetFault(apiserver.Fault{Status: 503, RetryAfter: time.Minute, Only: func(r apiserver.Request) bool {
			return r.Verb == "watch" || r.Verb == "list"
		}})
		s.server.DropWatches()
		if n := s.writes(func() {
			p.gpus(gpu(0, gone))
			s.untilCondition("False")
			s.until("tainted", s.tainted)
			s.pass(5 * time.Minute)
		}); n > 10 || s.server.Requests()[apiserver.Request{Verb: "patch", Resource: "nodes/status"}] > 3 { // one is refused where the taint is first
			s.Errorf("%d writes of one change; %v", n, s.server.Requests())
		}
	})
}

// A condition, labels and a taint that a restore of the cluster took away are there again soon,
// however sure their writers were that they had just written them.
func TestRestoreFromABackup(t *testing.T) {
	onStage(t, func(s *stage) {
		for i := range 20 { // the cluster is older than its backup
			s.change(func(n *corev1.Node) { n.Annotations = map[string]string{"at": fmt.Sprint(i)} })
		}
		set := map[string]string{"nvidia.com/gpu.count": "8"}
		p := s.new(config.Config{Live: config.Live{Features: everything}})
		p.configure(func(c *config.Config) { c.Features.Labels = config.LabelsNode })
		p.Labels.Publish(set)
		p.gpus(gpu(0, bad))
		p.start()
		all := func() bool {
			return strings.HasPrefix(s.condition(), "False") && s.tainted() && cmp.Equal(set, s.node().Labels)
		}
		s.until("all is told", all)
		s.pass(time.Minute)
		if err := s.server.Restore(); err != nil {
			s.Fatal(err)
		}
		s.change(func(n *corev1.Node) { n.Status.Conditions, n.Spec.Taints, n.Labels = nil, nil, nil })
		began := time.Now()
		s.until("all is told again", all)
		if took := time.Since(began); took > 6*time.Minute {
			s.Errorf("after %v, want it soon", took)
		}
	})
}
