package cluster_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

const conditionType = "GPUHealthy"

// everything enables all reports about GPUs.
var everything = config.Features{
	Events: true, Condition: true, Taint: true,
}

// reporter starts a process with these GPUs.
func (s *stage) reporter(f config.Features, gpus ...status.Device) *process {
	s.Helper()
	p := s.new(config.Config{Live: config.Live{Features: f}})
	p.gpus(gpus...)
	return p.start()
}

// gpu returns a device: "Healthy", or "Lost lost reconnect" with the source and the remedy.
func gpu(index int, state string) status.Device {
	words := strings.Fields(state)
	d := status.Device{Index: fmt.Sprint(index), UUID: fmt.Sprintf("GPU-%d", index), State: words[0]}
	if len(words) > 1 {
		d.Faults, d.Remedy, d.Reason = []status.Fault{{Source: words[1], Remedy: words[2]}}, words[2], "found by "+words[1]
	}
	return d
}

const (
	good = "Healthy"
	bad  = "Unhealthy hang reset"
	gone = "Lost lost reconnect"
)

// told returns the condition; the zero value if there is none.
func (s *stage) told() corev1.NodeCondition {
	for _, c := range s.node().Status.Conditions {
		if c.Type == conditionType {
			return c
		}
	}
	return corev1.NodeCondition{}
}

// condition returns the condition on one line, without times; empty if there is none.
func (s *stage) condition() string {
	c := s.told()
	return strings.Trim(fmt.Sprintf("%s %s: %s", c.Status, c.Reason, c.Message), ": ")
}

func (s *stage) untilCondition(prefix string) {
	s.Helper()
	s.until("the condition is "+prefix, func() bool { return strings.HasPrefix(s.condition(), prefix) })
}

func (s *stage) taints() (keys []string) {
	for _, taint := range s.node().Spec.Taints {
		keys = append(keys, taint.Key)
	}
	return keys
}

func (s *stage) tainted() bool { return slices.Contains(s.taints(), ourTaint) }

// events counts the Events by reason and device.
func (s *stage) events() map[string]int {
	all := map[string]int{}
	for _, e := range s.server.Events() {
		_, device, _ := strings.Cut(e.Note, "(")
		device, _, _ = strings.Cut(device, ")")
		n := 1
		if e.Series != nil {
			n = int(e.Series.Count)
		}
		all[strings.TrimSpace(e.Reason+" "+device)] += n
	}
	return all
}

func (s *stage) untilEvents(want map[string]int) {
	s.Helper()
	s.until(fmt.Sprint("Events ", want), func() bool { return cmp.Equal(want, s.events()) })
}

// A GPU is lost and comes back: the condition, the Event and the taint follow. Other taints and
// conditions stay.
func TestReporter(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.reporter(everything, gpu(0, good))
		s.untilCondition("True AllHealthy")
		p.gpus(gpu(0, gone))
		s.untilCondition("False GPULost: GPU-0 Lost: lost, remedy: reconnect")
		s.untilEvents(map[string]int{"GPULost GPU-0": 1})
		s.until("tainted", s.tainted)
		since := s.told().LastTransitionTime
		s.pass(2 * time.Minute)
		p.gpus(gpu(0, good))
		s.untilCondition("True AllHealthy")
		s.untilEvents(map[string]int{"GPULost GPU-0": 1, "GPURecovered GPU-0": 1})
		s.until("not tainted", func() bool { return !s.tainted() })
		if now := s.told().LastTransitionTime; !now.After(since.Time) {
			s.Errorf("the transition was at %v, before it was %v", now, since)
		}
		if d := cmp.Diff([]string{theirTaint}, s.taints()); d != "" || len(s.node().Status.Conditions) != 2 {
			s.Errorf("conditions %v; taints (-want +got):\n%s", s.node().Status.Conditions, d)
		}
	})
}

// A second fault keeps the time at which the condition became False. In steady state there is one
// write an hour.
func TestWritesInSteadyState(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.reporter(everything, gpu(0, bad), gpu(1, good))
		s.untilCondition("False GPUUnhealthy: GPU-0")
		since := s.told().LastTransitionTime
		s.pass(10 * time.Second)
		p.gpus(gpu(0, bad), gpu(1, gone))
		s.untilCondition("False GPULost: GPU-0 Unhealthy: hang, remedy: reset; GPU-1")
		if now := s.told().LastTransitionTime; !now.Equal(&since) {
			s.Errorf("the transition was at %v, want %v", now, since)
		}
		s.pass(10 * time.Second)
		if n := s.writes(func() { s.pass(6 * time.Hour) }); n < 5 || n > 7 {
			s.Errorf("%d writes in 6 hours, want one an hour", n)
		}
	})
}

// A node without GPUs and without a driver reports nothing, and loses its taint if the taint is not
// wanted.
func TestNodeWithoutGPUs(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.reporter(everything)
		s.pass(5 * time.Minute)
		p.set(func(now *status.Status) { now.Driver, now.Stale = "", "no driver" })
		s.pass(5 * time.Minute)
		if n := s.server.Writes(); n != 0 {
			s.Errorf("%d writes", n)
		}
	})
}

// A restarted process reports nothing twice, and reports changes since the last process, even if
// that was killed while the API server was unavailable. Without a condition, the name of the Event
// prevents repetitions.
func TestRestart(t *testing.T) {
	onStage(t, func(s *stage) {
		first := s.reporter(everything, gpu(0, good), gpu(1, gone))
		s.untilCondition("False")
		s.untilEvents(map[string]int{"GPULost GPU-1": 1})
		first.stop()
		var second *process
		if n := s.writes(func() { second = s.reporter(everything, gpu(0, good), gpu(1, gone)); s.pass(10 * time.Minute) }); n != 0 {
			s.Errorf("%d writes after a restart with the same state", n)
		}
		s.server.Stop()
		second.gpus(gpu(0, bad), gpu(1, gone))
		s.pass(time.Minute)
		second.stop()
		if err := s.server.Resume(); err != nil {
			s.Fatal(err)
		}
		third := s.reporter(everything, gpu(0, bad), gpu(1, good))
		want := map[string]int{"GPULost GPU-1": 1, "GPUUnhealthy GPU-0": 1, "GPURecovered GPU-1": 1}
		s.untilEvents(want)
		s.untilCondition("False GPUUnhealthy: GPU-0")
		third.stop()
		s.change(func(n *corev1.Node) { n.Status.Conditions = n.Status.Conditions[:0] })
		s.reporter(config.Features{Events: true}, gpu(0, bad), gpu(1, good))
		if s.pass(5 * time.Minute); !cmp.Equal(want, s.events()) {
			s.Errorf("after a start without the condition: %v", s.events())
		}
	})
}

// Another plugin serves a resource of this program. It does not report GPUs, so this program
// continues.
func TestReportsBesideAnotherPlugin(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.reporter(everything, gpu(0, good))
		s.untilCondition("True")
		p.set(func(now *status.Status) {
			now.Resources = []status.Resource{{Name: "nvidia.com/gpu", Server: "standing by: another program has registered"}}
		})
		p.gpus(gpu(0, bad))
		s.untilCondition("False")
		s.until("tainted", s.tainted)
		s.untilEvents(map[string]int{"GPUUnhealthy GPU-0": 1})
	})
}

// An unusable state directory does not prevent reports.
func TestReportsWithoutAStateDirectory(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.new(config.Config{
			Startup: config.Startup{StateDir: "/dev/null/state"},
			Live:    config.Live{Features: everything},
		})
		p.gpus(gpu(0, bad))
		p.start()
		s.untilCondition("False GPUUnhealthy")
	})
}

// Features are enabled and disabled at run time. The taint is removed when it is no longer wanted.
func TestFeaturesAtRunTime(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.reporter(config.Features{}, gpu(0, bad))
		s.pass(time.Minute)
		if n := s.requests(); n != 0 || p.reads() != 0 {
			s.Errorf("%d requests and %d statuses with all off", n, p.reads())
		}
		p.configure(func(c *config.Config) { c.Features = everything })
		s.untilCondition("False")
		s.until("tainted", s.tainted)
		s.untilEvents(map[string]int{"GPUUnhealthy GPU-0": 1})
		p.configure(func(c *config.Config) { c.Features.Taint = false })
		s.until("not tainted", func() bool { return !s.tainted() })
	})
}

// The status is read shortly after a change, once for several changes, and every few seconds. A
// failed read keeps the last report.
func TestStatusAfterChange(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.new(config.Config{Live: config.Live{Features: everything}})
		p.MIG = feed.New(mig.Status{})
		p.gpus(gpu(0, good))
		p.start()
		s.untilCondition("True")
		s.pass(10 * time.Second)
		reads := func(what string, within time.Duration, want int, do func()) {
			s.Helper()
			before := p.reads()
			do()
			if s.pass(within); p.reads()-before < want || p.reads()-before > want+1 { // one may be due
				s.Errorf("%s: the status is read %d times, want %d", what, p.reads()-before, want)
			}
		}
		for what, change := range map[string]func(){
			"GPUs":           func() { p.Snapshots.Publish(inventory.Snapshot{}) },
			"devices":        func() { p.Offered.Publish(resource.Plan{}) },
			"a refused file": func() { p.ConfigErrors.Publish(nil) }, "a layout": func() { p.MIG.Publish(mig.Status{}) },
			"three changes": func() {
				p.Snapshots.Publish(inventory.Snapshot{})
				p.Offered.Publish(resource.Plan{})
				p.configure(func(*config.Config) {})
			},
		} {
			reads(what, time.Second, 1, change)
		}
		reads("a quiet minute", time.Minute, 11, func() {})
		p.stop()
		p.Status = func(ctx context.Context) (status.Status, error) { // the daemon hangs
			<-ctx.Done()
			return status.Status{}, ctx.Err()
		}
		before := s.condition()
		if n := s.writes(func() { p.start(); s.pass(10 * time.Minute) }); n != 0 || s.condition() != before {
			s.Errorf("%d writes without a status: %s", n, s.condition())
		}
	})
}

// The first condition of a healthy node is written at once in a small cluster, and delayed in a
// large one. An unhealthy node does not wait.
func TestFirstCondition(t *testing.T) {
	onStage(t, func(s *stage) {
		longest := func(nodes int, state string) (last time.Duration) {
			for range 15 {
				s.change(func(n *corev1.Node) { n.Status.Conditions = nil })
				p := s.new(config.Config{
					Startup: config.Startup{StateDir: s.stateDir(nodes, "boot")},
					Live:    config.Live{Features: everything},
				})
				p.gpus(gpu(0, state))
				began := time.Now()
				p.start()
				s.until("a condition", func() bool { return s.condition() != "" })
				last = max(last, time.Since(began))
				p.stop()
			}
			return last
		}
		const rest = 4 * time.Second // until the status is read, and more
		for _, tt := range []struct {
			nodes       int
			state       string
			least, most time.Duration
		}{{1, good, 0, rest}, {1000, good, 10 * time.Second, 20*time.Second + rest}, {1000, bad, 0, rest}} {
			if took := longest(tt.nodes, tt.state); took < tt.least || took > tt.most {
				s.Errorf("of %d nodes the last one's first condition of a GPU that is %s comes after %v", tt.nodes, tt.state, took)
			}
		}
	})
}

// A process without a driver, for example of another DaemonSet, becomes the leader while the
// previous leader restarts. It reports nothing about GPUs for a minute. Without a previous leader
// it reports at once.
func TestLeaderWithoutDriver(t *testing.T) {
	for standby, want := range map[bool]corev1.ConditionStatus{true: corev1.ConditionTrue,
		false: corev1.ConditionUnknown} {
		t.Run(fmt.Sprint("standby ", standby), func(t *testing.T) { findsNoDriver(t, standby, want) })
	}
}

func findsNoDriver(t *testing.T, standby bool, want corev1.ConditionStatus) {
	t.Helper()
	onStage(t, func(s *stage) {
		p := s.reporter(everything, gpu(0, good))
		s.pass(time.Minute)
		p.stop()
		next := s.new(config.Config{Live: config.Live{Features: everything}})
		if standby {
			next.Lead.Received().Publish([]byte("{}"))
		}
		next.set(func(now *status.Status) { now.Stale = "no driver" })
		next.start()
		s.pass(50 * time.Second)
		if got := s.told().Status; got != want {
			s.Errorf("the condition is %s, want %s", got, want)
		}
		s.pass(2 * time.Minute)
		if got := s.told().Status; got != corev1.ConditionUnknown {
			s.Errorf("after a minute the condition is %s", got)
		}
	})
}
