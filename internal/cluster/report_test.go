package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

const conditionType = "GPUHealthy"

// everything has all be told of the GPUs.
var everything = config.Features{
	Events: true, Condition: true, Taint: true,
}

// reporter starts a process that tells this of its GPUs.
func (s *stage) reporter(f config.Features, gpus ...status.Device) *process {
	s.Helper()
	p := s.new(config.Config{Features: f})
	p.gpus(gpus...)
	return p.start()
}

// gpu is a device: "Healthy", or "Lost lost reconnect" with the source and the cure.
func gpu(index int, state string) status.Device {
	words := strings.Fields(state)
	d := status.Device{Index: fmt.Sprint(index), UUID: fmt.Sprintf("GPU-%d", index), State: words[0]}
	if len(words) > 1 {
		d.Faults, d.Cure, d.Reason = []status.Fault{{Source: words[1], Cure: words[2]}}, words[2], "found by "+words[1]
	}
	return d
}

const (
	good = "Healthy"
	bad  = "Unhealthy hang reset"
	gone = "Lost lost reconnect"
)

// told is the condition; the zero value if there is none.
func (s *stage) told() corev1.NodeCondition {
	for _, c := range s.node().Status.Conditions {
		if c.Type == conditionType {
			return c
		}
	}
	return corev1.NodeCondition{}
}

// condition is the condition in one line, without times; empty if there is none.
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

// events counts the Events: reason and device → how often it is said to have happened.
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

// One GPU that is lost and comes back: condition, Event and taint, there and back; taints and conditions of others stay.
func TestReporter(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.reporter(everything, gpu(0, good))
		s.untilCondition("True AllHealthy")
		p.gpus(gpu(0, gone))
		s.untilCondition("False GPULost: GPU-0 Lost: lost, cure: reconnect")
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

// A second fault keeps the time at which the condition became False. In steady state there is one write an hour.
func TestWritesInSteadyState(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.reporter(everything, gpu(0, bad), gpu(1, good))
		s.untilCondition("False GPUUnhealthy: GPU-0")
		since := s.told().LastTransitionTime
		s.pass(10 * time.Second)
		p.gpus(gpu(0, bad), gpu(1, gone))
		s.untilCondition("False GPULost: GPU-0 Unhealthy: hang, cure: reset; GPU-1")
		if now := s.told().LastTransitionTime; !now.Equal(&since) {
			s.Errorf("the transition was at %v, want %v", now, since)
		}
		s.pass(10 * time.Second)
		if n := s.writes(func() { s.pass(6 * time.Hour) }); n < 5 || n > 7 {
			s.Errorf("%d writes in 6 hours, want one an hour", n)
		}
	})
}

// Of a node without GPUs and without a driver nothing is told, but that it lost its taint when nobody wants one.
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

// The taint stays as it is while it is not known whether a GPU is healthy, and goes when it is not wanted.
func TestTaintWhenItIsKnown(t *testing.T) {
	for name, tt := range map[string]struct {
		off, before bool
		gpus        []status.Device
		unknown     bool // the driver does not answer
		want        bool
	}{
		"one of two is bad":        {gpus: []status.Device{gpu(0, bad), gpu(1, good)}},
		"all are bad":              {gpus: []status.Device{gpu(0, bad), gpu(1, gone)}, want: true},
		"not known, and tainted":   {before: true, unknown: true, want: true},
		"not known":                {unknown: true},
		"healthy":                  {before: true, gpus: []status.Device{gpu(0, good)}},
		"bad, and no taint wanted": {off: true, before: true, gpus: []status.Device{gpu(0, bad)}},
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				if tt.before {
					s.change(func(n *corev1.Node) {
						n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: ourTaint, Effect: corev1.TaintEffectNoSchedule})
					})
				}
				p := s.new(config.Config{Features: config.Features{Taint: !tt.off, Events: true}})
				if !tt.unknown {
					p.gpus(tt.gpus...)
				}
				p.start()
				if s.pass(5 * time.Minute); s.tainted() != tt.want {
					s.Errorf("tainted: %v", s.tainted())
				}
			})
		})
	}
}

// A process that starts again says nothing twice. What changed while there was none is said. The first one may be killed while the API
// server is away. Without a condition, the Event's name says what was said.
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

// served is a resource of this one that another server has, as the status has it.
func served(by string) func(*status.Status) {
	return func(s *status.Status) { s.Resources = []status.Resource{{Name: "nvidia.com/gpu", Server: by}} }
}

// Two processes on one node say what happens once, and do not write in turn. One that no longer serves kubelet is silent, whatever it knows.
func TestTwoReporters(t *testing.T) {
	onStage(t, func(s *stage) {
		earlier := s.reporter(everything, gpu(0, good))
		s.untilCondition("True")
		later := s.reporter(everything, gpu(0, good))
		s.pass(time.Minute)
		if n := s.writes(func() {
			earlier.gpus(gpu(0, bad))
			later.gpus(gpu(0, bad))
			s.pass(30 * time.Minute)
		}); n > 8 || !strings.HasPrefix(s.condition(), "False") || !cmp.Equal(map[string]int{"GPUUnhealthy GPU-0": 1}, s.events()) {
			s.Errorf("%d writes of one fault; %s, Events %v", n, s.condition(), s.events())
		}
		earlier.set(served("silent: another server has registered"))
		earlier.gpus(gpu(0, good))
		if n := s.writes(func() { s.pass(30 * time.Minute) }); n > 1 || !strings.HasPrefix(s.condition(), "False") {
			s.Errorf("%d writes by processes of which one is silent; %s", n, s.condition())
		}
	})
}

// Another program serves a resource of ours. It tells nothing of GPUs, so this one goes on.
func TestAnotherProgramSilencesNothing(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.reporter(everything, gpu(0, good))
		s.untilCondition("True")
		p.set(served("silent: another program has registered"))
		p.gpus(gpu(0, bad))
		s.untilCondition("False")
		s.until("tainted", s.tainted)
		s.untilEvents(map[string]int{"GPUUnhealthy GPU-0": 1})
	})
}

// A process that never reached the driver, such as the new pod of a roll-out, leaves what another one of the node reports alone, also while that
// one is started again. When that one has ended for good, it says that nobody knows.
func TestReporterThatHasSeenNoGPU(t *testing.T) {
	onStage(t, func(s *stage) {
		state := s.TempDir()
		knows := func(gpus ...status.Device) *process {
			p := s.new(config.Config{Features: everything, StateDir: state})
			p.gpus(gpus...)
			return p.start()
		}
		first := knows(gpu(0, good))
		s.untilCondition("True")
		s.pass(time.Minute)
		blind := s.new(config.Config{Features: everything, StateDir: state})
		blind.set(func(now *status.Status) { now.Stale = "no driver" })
		if n := s.writes(func() { blind.start(); s.pass(10 * time.Minute) }); n != 0 {
			s.Errorf("%d writes: %s, Events %v", n, s.condition(), s.events())
		}
		first.gpus(gpu(0, bad))
		s.untilEvents(map[string]int{"GPUUnhealthy GPU-0": 1})
		s.until("tainted", s.tainted)
		if n := s.writes(func() {
			first.stop()
			s.pass(15 * time.Second)
			first = knows(gpu(0, bad))
			s.pass(10 * time.Minute)
		}); n != 0 {
			s.Errorf("%d writes: %s, Events %v", n, s.condition(), s.events())
		}
		first.stop()
		s.untilCondition("Unknown DriverNotReady: no driver")
		blind.gpus(gpu(0, good))
		s.untilCondition("True")
		s.until("not tainted", func() bool { return !s.tainted() })
	})
}

// The same without a state directory: the condition is that of the process that knows the GPUs, as long as that one is there.
func TestStuckRollOut(t *testing.T) {
	onStage(t, func(s *stage) {
		earlier := s.reporter(everything, gpu(0, good))
		s.untilCondition("True")
		s.pass(time.Minute)
		blind := s.new(config.Config{Features: everything})
		blind.set(func(now *status.Status) { now.Stale = "no driver" })
		blind.start()
		s.untilCondition("Unknown DriverNotReady: no driver") // the old condition is of a pod that may be gone
		s.untilCondition("True")
		if n := s.writes(func() { s.pass(3*time.Hour + 20*time.Minute) }); n > 6 || !strings.HasPrefix(s.condition(), "True") {
			s.Errorf("%d writes in 3 hours, want one an hour; %s", n, s.condition())
		}
		earlier.stop()
		if s.pass(2*time.Hour + time.Minute); s.condition() != "Unknown DriverNotReady: no driver" {
			s.Errorf("2 hours after the old pod has ended: %s", s.condition())
		}
	})
}

// A state directory that cannot be used keeps nobody from reporting.
func TestReportsWithoutAStateDirectory(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.new(config.Config{Features: everything, StateDir: "/dev/null/state"})
		p.gpus(gpu(0, bad))
		p.start()
		s.untilCondition("False GPUUnhealthy")
	})
}

// Features are switched on and off while the process runs. The taint goes when it is no longer wanted.
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

// The status is read soon after a change of what it tells of, and every few seconds; several changes at once are one. One that cannot be read
// leaves what was told.
func TestStatusIsReadSoonAfterAChange(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.new(config.Config{Features: everything})
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
			"GPUs": func() { p.Snapshots.Publish(inventory.Snapshot{}) }, "devices": func() { p.Offered.Publish(resource.Plan{}) },
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

// The first condition of a healthy node comes at once in a small cluster, and is spread in a large one. That of a bad one does not wait.
func TestFirstCondition(t *testing.T) {
	onStage(t, func(s *stage) {
		longest := func(nodes int, state string) (last time.Duration) {
			for range 15 {
				s.change(func(n *corev1.Node) { n.Status.Conditions = nil })
				p := s.new(config.Config{Features: everything, StateDir: s.stateDir(nodes, "boot")})
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

// held is a device that a pod holds.
func held(id, pod string) kubelet.HeldDevice {
	return kubelet.HeldDevice{Resource: "nvidia.com/gpu", ID: id, Pod: pod}
}

// about says what Events are about, sorted.
func (s *stage) about() []string {
	var all []string
	for _, e := range s.server.Events() {
		all = append(all, fmt.Sprintf("%s %s/%s", e.Regarding.Kind, e.Regarding.Namespace, e.Regarding.Name))
	}
	slices.Sort(all)
	return all
}

func (s *stage) untilAbout(want ...string) {
	s.Helper()
	s.until(fmt.Sprint("Events about ", want), func() bool { return cmp.Equal(want, s.about()) })
}

// The pods that hold the device, or a part of it, get the Event too; one whose namespace refuses it keeps nothing from being written.
func TestPodEvents(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.new(config.Config{Features: everything})
		p.configure(func(c *config.Config) { c.Features.PodEvents = true })
		p.Held = func(context.Context) ([]kubelet.HeldDevice, error) {
			return []kubelet.HeldDevice{held("GPU-0::1", "a/one"), held("MIG-0", "b/two"), held("GPU-1", "c/three")}, nil
		}
		p.Checkpoint = func() (kubelet.Checkpoint, error) {
			return kubelet.Checkpoint{Held: []kubelet.HeldDevice{
				held("GPU-0::1", "with UID 1"), held("MIG-0", "with UID 2"), held("GPU-1", "with UID 3"), held("GPU-1", "with UID 4"),
			}}, nil
		}
		part := gpu(0, good)
		part.UUID, part.GPU = "MIG-0", "GPU-0"
		p.gpus(gpu(0, good), part, gpu(1, good))
		p.start()
		s.untilCondition("True")
		p.gpus(gpu(0, bad), part, gpu(1, bad))
		s.untilAbout("Node /node-1", "Node /node-1", "Pod a/one", "Pod b/two") // whose UID is 3 or 4 cannot be told

		// fails has creations of Events fail from the second one on, which is of the first pod, for some times.
		fails := func(times int64) {
			var creations atomic.Int64
			s.server.SetFault(apiserver.Fault{Status: 503, Only: func(r apiserver.Request) bool {
				n := creations.Load()
				if r.Verb == "create" && r.Resource == "events" {
					n = creations.Add(1)
				}
				return n > 1 && n <= 1+times
			}})
		}
		// The API server goes away between the Event of the node and those of its pods, and comes back.
		fails(9)
		p.gpus(gpu(0, good), part, gpu(1, bad))
		s.untilAbout("Node /node-1", "Node /node-1", "Node /node-1", "Pod a/one", "Pod a/one", "Pod b/two", "Pod b/two")

		// One namespace does not answer: the other one gets its Event.
		fails(10)
		p.gpus(gpu(0, gone), part, gpu(1, bad))
		s.untilAbout("Node /node-1", "Node /node-1", "Node /node-1", "Node /node-1", "Pod a/one", "Pod a/one", "Pod b/two", "Pod b/two", "Pod b/two")
		s.until("the one that is not written is counted", func() bool { return p.drops("refused") == 1 })
	})
}

// A device that is shared by very many pods: a few of them are told. None is while one of kubelet's accounts is missing.
func TestPodEventsOfASharedDevice(t *testing.T) {
	for name, tt := range map[string]struct {
		named, recorded error
		want            int
	}{"both accounts": {want: 16}, "no PodResources": {named: errors.New("away")}, "no checkpoint": {recorded: errors.New("away")}} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				var names, records []kubelet.HeldDevice
				for i := range 40 {
					id := fmt.Sprint("GPU-0::", i)
					names = append(names, held(id, fmt.Sprint("ns/pod-", i/2))) // each has two
					records = append(records, held(id, fmt.Sprint("with UID ", i/2)), held(id, fmt.Sprint("with UID ", i/2)))
				}
				p := s.new(config.Config{Features: config.Features{Events: true, PodEvents: true}})
				p.Held = func(context.Context) ([]kubelet.HeldDevice, error) { return names, tt.named }
				p.Checkpoint = func() (kubelet.Checkpoint, error) { return kubelet.Checkpoint{Held: records}, tt.recorded }
				p.gpus(gpu(0, bad))
				p.start()
				s.pass(time.Minute)
				if got := s.about(); len(got) != 1+tt.want || got[0] != "Node /node-1" {
					s.Errorf("Events about %v", got)
				}
			})
		})
	}
}

// A condition of which nobody takes care any more tells nothing of what was told.
func TestOldCondition(t *testing.T) {
	onStage(t, func(s *stage) {
		s.change(func(n *corev1.Node) {
			n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{
				Type: conditionType, Status: corev1.ConditionFalse, Reason: "GPUUnhealthy", Message: "GPU-0 Unhealthy: hang, cure: reset",
			})
		})
		s.reporter(config.Features{Events: true}, gpu(0, good), gpu(1, bad))
		s.pass(2 * time.Minute)
		if want := map[string]int{"GPUUnhealthy GPU-1": 1}; !cmp.Equal(want, s.events()) {
			s.Errorf("Events %v", s.events())
		}
	})
}

// A node starts for the first time while the API server is away: until it tells of the node, the label that chooses the configuration is not
// known. That is over when an Event can be written, and none tells of it.
func TestNoEventOfAConfigurationThatWasInDoubt(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.new(config.Config{Features: everything})
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
func TestTaintThatMayNotBeRemoved(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.reporter(everything, gpu(0, bad))
		s.until("tainted", s.tainted)
		s.server.SetFault(apiserver.Fault{Status: 403, Only: apiserver.Request.IsWrite})
		p.configure(func(c *config.Config) { c.Features = config.Features{} })
		s.until("the command", func() bool { return p.logged("kubectl taint node "+nodeName+" "+ourTaint+"-") > 0 })
	})
}

// Whatever the API server does while a GPU is lost: afterwards there is one Event, the condition and the taint; and back.
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

// While rights are missing or the API server wants less, few requests are made; nothing is said twice, and all is written afterwards. Of an
// Event that it calls wrong, nothing is tried again.
func TestFewRequestsWhileRefused(t *testing.T) {
	for name, tt := range map[string]struct {
		fault apiserver.Fault
		most  int // of each writer, in an hour
	}{
		"forbidden":         {apiserver.Fault{Status: 403, Only: apiserver.Request.IsWrite}, 60},
		"too many requests": {apiserver.Fault{Status: 429, RetryAfter: 5 * time.Minute, Only: apiserver.Request.IsWrite}, 12},
		"internal error":    {apiserver.Fault{Status: 500, Only: apiserver.Request.IsWrite}, 60},
		"wrong Events":      {apiserver.Fault{Status: 422, Only: func(r apiserver.Request) bool { return r.Resource == "events" }}, 2},
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

// GPUs that flap for hours while the API server is away: the queue is bounded, drops are counted, and the last state is written. What the rate
// keeps back is said later, although nothing changes then.
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
		}); n > 10 || s.server.Requests()[apiserver.Request{Verb: "patch", Resource: "nodes/status"}] != 2 {
			s.Errorf("%d writes of one change; %v", n, s.server.Requests())
		}
	})
}

// A condition, labels and a taint that a restore of the cluster took away are there again soon, however sure their writers were that they had
// just written them.
func TestRestoreFromABackup(t *testing.T) {
	onStage(t, func(s *stage) {
		for i := range 20 { // the cluster is older than its backup
			s.change(func(n *corev1.Node) { n.Annotations = map[string]string{"at": fmt.Sprint(i)} })
		}
		set := map[string]string{"nvidia.com/gpu.count": "8"}
		p := s.new(config.Config{Features: everything})
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
