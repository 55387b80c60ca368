package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// One GPU that is lost and comes back: condition, Event and taint, there and back; taints and conditions of others stay.
func TestReporter(t *testing.T) {
	s := newStage(t)
	d := s.start(everything, gpu(0, good))
	s.until("healthy", s.hasCondition("True AllHealthy"))
	d.gpus(gpu(0, gone))
	s.until("lost", s.hasCondition("False GPULost: GPU-0 Lost: lost, cure: reconnect"))
	s.until("an Event", s.hasEvents(map[string]int{"GPULost GPU-0": 1}))
	s.until("tainted", s.tainted)
	since := s.transition()
	s.pass(2*time.Minute, time.Second)
	d.gpus(gpu(0, good))
	s.until("healthy again", s.hasCondition("True AllHealthy"))
	s.until("both Events", s.hasEvents(map[string]int{"GPULost GPU-0": 1, "GPURecovered GPU-0": 1}))
	s.until("not tainted", func() bool { return !s.tainted() })
	if !s.transition().After(since) {
		t.Errorf("the transition was at %v, before it was %v", s.transition(), since)
	}
	if diff := cmp.Diff([]string{"theirs"}, s.taints()); diff != "" {
		t.Errorf("taints (-want +got):\n%s", diff)
	}
	n, _ := s.server.Node(nodeName)
	if len(n.Status.Conditions) != 2 {
		t.Errorf("conditions %v", n.Status.Conditions)
	}
}

func (s *stage) transition() time.Time {
	n, _ := s.server.Node(nodeName)
	for _, c := range n.Status.Conditions {
		if c.Type == "GPUHealthy" {
			return c.LastTransitionTime.Time
		}
	}
	return time.Time{}
}

// A second fault keeps the time at which the condition became False. In steady state there is less than one write an hour, with the slow
// repeat, and none without it.
func TestWritesInSteadyState(t *testing.T) {
	s := newStage(t)
	d := s.start(everything, gpu(0, bad), gpu(1, good))
	s.until("one bad", s.hasCondition("False GPUUnhealthy: GPU-0"))
	since := s.transition()
	s.pass(10*time.Second, time.Second)
	d.gpus(gpu(0, bad), gpu(1, gone))
	s.until("two bad", s.hasCondition("False GPULost: GPU-0 Unhealthy: hang, cure: reset; GPU-1"))
	if !s.transition().Equal(since) {
		t.Errorf("the transition was at %v, want %v", s.transition(), since)
	}
	s.until("Events and taint", func() bool { return len(s.server.Events()) == 2 && s.tainted() })
	s.pass(10*time.Second, time.Second)
	writes := s.server.Writes()
	s.pass(6*time.Hour, 10*time.Second)
	if n := s.server.Writes() - writes; n < 4 || n > 8 {
		t.Errorf("%d writes in 6 hours, want one an hour", n)
	}
}

// A node without GPUs and without a driver gets nothing.
func TestNodeWithoutGPUs(t *testing.T) {
	s := newStage(t)
	d := s.start(everything)
	s.pass(5*time.Minute, time.Second)
	d.set(status.Status{Version: "v1", Stale: "no driver"})
	s.pass(5*time.Minute, time.Second)
	if n := s.server.Writes(); n != 0 {
		t.Errorf("%d writes", n)
	}
}

// A daemon that starts again says nothing twice. What changed while there was none is said. The first one may be killed while the API
// server is away.
func TestRestart(t *testing.T) {
	s := newStage(t)
	first := s.start(everything, gpu(0, good), gpu(1, gone))
	s.until("one is lost", func() bool { return s.hasCondition("False")() && len(s.server.Events()) == 1 })
	first.stop()
	writes := s.server.Writes()
	second := s.start(everything, gpu(0, good), gpu(1, gone))
	s.pass(10*time.Minute, time.Second)
	if n := s.server.Writes() - writes; n != 0 {
		t.Errorf("%d writes after a restart with the same state", n)
	}
	s.server.Stop()
	second.gpus(gpu(0, bad), gpu(1, gone))
	s.pass(time.Minute, time.Second)
	second.stop()
	if err := s.server.Resume(); err != nil {
		t.Fatal(err)
	}
	third := s.start(everything, gpu(0, bad), gpu(1, good))
	want := map[string]int{"GPULost GPU-1": 1, "GPUUnhealthy GPU-0": 1, "GPURecovered GPU-1": 1}
	s.until("what changed", func() bool { return s.hasEvents(want)() && s.hasCondition("False GPUUnhealthy: GPU-0")() })
	third.stop()

	// Without a condition, the Event's name says what was said.
	only := config.Features{Events: true}
	s.change(func(n *corev1.Node) { n.Status.Conditions = n.Status.Conditions[:0] })
	s.start(only, gpu(0, bad), gpu(1, good))
	s.pass(5*time.Minute, time.Second)
	if !s.hasEvents(want)() {
		t.Errorf("after a start without the condition: %v", s.events())
	}
}

// Two daemons on one node say what happens once, and do not write in turn. One that no longer serves kubelet is silent, whatever it knows.
func TestTwoDaemons(t *testing.T) {
	s := newStage(t)
	earlier := s.start(everything, gpu(0, good))
	s.until("healthy", s.hasCondition("True"))
	later := s.start(everything, gpu(0, good))
	s.pass(time.Minute, time.Second)
	writes := s.conditionWrites()
	for _, d := range []*staged{earlier, later} {
		d.gpus(gpu(0, bad))
	}
	s.until("bad", func() bool {
		return s.hasCondition("False")() && s.hasEvents(map[string]int{"GPUUnhealthy GPU-0": 1})()
	})
	s.pass(10*time.Minute, time.Second)
	if n := s.conditionWrites() - writes; n > 2 {
		t.Errorf("%d writes of the condition for one fault", n)
	}
	earlier.mu.Lock()
	silent := earlier.status
	earlier.mu.Unlock()
	silent.Resources = []status.Resource{{Name: "nvidia.com/gpu", Server: "silent: another server has registered"}}
	silent.GPUs = []status.Device{gpu(0, good)}
	earlier.set(silent)
	writes = s.server.Writes()
	s.pass(30*time.Minute, time.Second)
	if n := s.server.Writes() - writes; n > 1 || !s.hasCondition("False")() {
		t.Errorf("%d writes by daemons of which one is silent; %s", n, s.condition())
	}
	if !s.hasEvents(map[string]int{"GPUUnhealthy GPU-0": 1})() {
		t.Errorf("Events %v", s.events())
	}
}

// Another program serves a resource of ours. It tells nothing of GPUs, so this one goes on.
func TestAnotherProgramSilencesNothing(t *testing.T) {
	s := newStage(t)
	d := s.start(everything, gpu(0, good))
	s.until("healthy", s.hasCondition("True"))
	d.set(status.Status{
		Version: "v1", Driver: "580", GPUs: []status.Device{gpu(0, bad)},
		Resources: []status.Resource{{Name: "nvidia.com/gpu", Server: "silent: another program has registered"}},
	})
	s.until("bad", func() bool {
		return s.hasCondition("False")() && s.tainted() && s.hasEvents(map[string]int{"GPUUnhealthy GPU-0": 1})()
	})
}

// Of two daemons on a node, only one has ever seen its GPUs: the other cannot reach the driver, as the new pod of a roll-out or that of a second
// DaemonSet, or sees none. Neither registers a resource of the other, so neither yields. What the one that knows reports is left alone, from the
// start of the other on and as long as it is there.
func TestADaemonThatHasSeenNoGPU(t *testing.T) {
	s := newStage(t)
	s.stateDir = t.TempDir()
	knows := s.start(everything, gpu(0, good))
	s.until("healthy", s.hasCondition("True"))
	s.pass(time.Minute, time.Second)
	writes := s.server.Writes()
	blind := s.startAs(everything, status.Status{Version: "v1", Stale: "no driver"})
	empty := s.start(everything)
	s.pass(10*time.Minute, time.Second)
	if n := s.server.Writes() - writes; n != 0 || !s.hasCondition("True")() {
		t.Errorf("%d writes for a healthy node: %s, Events %v", n, s.condition(), s.events())
	}
	knows.gpus(gpu(0, bad))
	s.until("bad", func() bool { return s.hasCondition("False GPUUnhealthy")() && s.tainted() && len(s.events()) == 1 })
	writes = s.server.Writes()
	s.pass(10*time.Minute, time.Second)
	if n := s.server.Writes() - writes; n != 0 || !s.tainted() {
		t.Errorf("%d writes for a bad GPU: %s, Events %v, taints %v", n, s.condition(), s.events(), s.taints())
	}

	// A restart of the one that knows hands nothing over, and its end does.
	knows.stop()
	s.pass(absence/4, time.Second)
	knows = s.start(everything, gpu(0, bad))
	s.pass(absence/2, 50*time.Millisecond) // slow enough for it to take its share
	s.pass(10*time.Minute, time.Second)
	if n := s.server.Writes() - writes; n != 0 {
		t.Errorf("%d writes after a restart: %s, Events %v", n, s.condition(), s.events())
	}
	empty.stop()
	knows.stop()
	s.until("nobody knows", s.hasCondition("Unknown DriverNotReady: no driver"))
	blind.set(status.Status{Version: "v1", Driver: "580", GPUs: []status.Device{gpu(0, good)}})
	s.until("known again", func() bool { return s.hasCondition("True")() && !s.tainted() })
}

// A state directory of which the disk hangs or that cannot be written keeps nobody from reporting.
func TestReportsWithoutTheLock(t *testing.T) {
	released := make(chan struct{})
	t.Cleanup(func() { close(released) })
	for name, lock := range map[string]func(string) (func(), error){
		"hangs":             func(string) (func(), error) { <-released; return nil, errors.New("released") },
		"cannot be written": func(string) (func(), error) { return nil, syscall.EROFS },
	} {
		t.Run(name, func(t *testing.T) {
			s := newStage(t)
			s.stateDir, s.lock = t.TempDir(), lock
			s.change(func(n *corev1.Node) {
				n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: "GPUHealthy", Status: corev1.ConditionTrue})
			})
			d := s.startAs(everything, status.Status{Version: "v1", Stale: "no driver"})
			s.until("the driver is not there", s.hasCondition("Unknown DriverNotReady"))
			d.set(status.Status{Version: "v1", Driver: "580", GPUs: []status.Device{gpu(0, bad)}})
			s.until("a bad GPU", s.hasCondition("False GPUUnhealthy"))
		})
	}
}

// The new pod of a roll-out cannot reach the driver, and there is no state directory. It registers nothing, so neither pod yields: the
// condition is that of the pod that knows the GPUs, as long as that one is there.
func TestStuckRollOut(t *testing.T) {
	s := newStage(t)
	earlier := s.start(everything, gpu(0, good))
	s.until("healthy", s.hasCondition("True"))
	s.pass(time.Minute, time.Second)
	s.startAs(everything, status.Status{Version: "v1", Stale: "no driver"})
	s.until("the old condition is of a pod that may be gone", s.hasCondition("Unknown DriverNotReady: no driver"))
	s.until("it is not gone", s.hasCondition("True"))
	writes := s.conditionWrites()
	s.pass(20*time.Minute, time.Second)
	s.pass(4*time.Hour, 10*time.Second)
	if n := s.conditionWrites() - writes; n > 5 || !s.hasCondition("True")() {
		t.Errorf("%d writes of the condition in 4 hours, want one an hour; %s", n, s.condition())
	}
	earlier.stop()
	s.pass(2*time.Hour+time.Minute, 10*time.Second)
	if !s.hasCondition("Unknown DriverNotReady: no driver")() {
		t.Errorf("2 hours after the old pod has ended: %s", s.condition())
	}
}

// Whose condition it is, by its heartbeat: an own one, an old one and one in the future do not keep a new process from writing.
func TestOthersCondition(t *testing.T) {
	t.Parallel()
	r := &reporter{started: time.Now()}
	at := func(minutes int) time.Time { return r.started.Add(time.Duration(minutes) * time.Minute) }
	for name, tt := range map[string]struct {
		heartbeat, wrote, now int
		want                  bool
	}{
		"before the start":       {-1, -9, 1, false},
		"after the start":        {1, -9, 2, true},
		"its own":                {1, 1, 2, false},
		"overdue":                {1, -9, 122, false},
		"just overdue":           {1, -9, 121, false},
		"at the start":           {0, -9, 1, false},
		"now":                    {1, -9, 1, true},
		"a clock that went back": {60, -9, 2, false},
	} {
		if got := r.isOthers(kubeapi.Condition{LastHeartbeatTime: at(tt.heartbeat)}, at(tt.wrote), at(tt.now)); got != tt.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// The first condition of a healthy node comes at once in a small cluster, and is spread in a large one.
func TestFirstCondition(t *testing.T) {
	s := newStage(t)
	s.fraction = 0.9
	at := func() time.Duration {
		t.Helper()
		s.change(func(n *corev1.Node) {
			n.Status.Conditions = slices.DeleteFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == "GPUHealthy" })
		})
		began := s.clock.Now()
		d := s.start(everything, gpu(0, good))
		defer d.stop()
		for is := s.hasCondition("True"); !is() && s.clock.Since(began) < patience; {
			s.pass(10*time.Millisecond, 2*time.Millisecond) // about as fast as time goes
		}
		return s.clock.Since(began)
	}
	if took := at(); took > 2600*time.Millisecond { // 2 s on a machine that has nothing else to do
		t.Errorf("in a cluster of one node: after %v, want 2 s", took)
	}
	for i := range 299 {
		if err := s.server.ChangeNode(fmt.Sprint("other-", i), func(*corev1.Node) {}); err != nil {
			t.Fatal(err)
		}
	}
	if took := at(); took < 5400*time.Millisecond || took > 40*time.Second {
		t.Errorf("in a cluster of 300 nodes: after %v, want 5.4 s", took)
	}
}

// Features that are switched on and off while the daemon runs. The taint goes when it is no longer wanted.
func TestFeaturesAtRunTime(t *testing.T) {
	s := newStage(t)
	d := s.start(config.Features{}, gpu(0, bad))
	s.pass(time.Minute, time.Second)
	if n := s.server.Writes(); n != 0 {
		t.Errorf("%d writes with all off", n)
	}
	d.Configs.Publish(config.Config{Features: everything})
	s.until("all on", func() bool { return s.tainted() && s.hasCondition("False")() && len(s.server.Events()) == 1 })
	other := everything
	other.Taint = false
	d.Configs.Publish(config.Config{Features: other})
	s.until("not tainted", func() bool { return !s.tainted() })
}

// The pods that hold the device get the Event too; one whose namespace refuses it keeps nothing from being written.
func TestPodEvents(t *testing.T) {
	s := newStage(t)
	f := everything
	f.PodEvents = true
	held := func(id, pod string) kubelet.HeldDevice {
		return kubelet.HeldDevice{Resource: "nvidia.com/gpu", ID: id, Pod: pod}
	}
	d := s.start(f, gpu(0, good), gpu(1, good))
	d.stop()
	d.Held = func(context.Context) ([]kubelet.HeldDevice, error) {
		return []kubelet.HeldDevice{held("GPU-0::1", "a/one"), held("GPU-0::2", "b/two"), held("GPU-1", "c/three")}, nil
	}
	d.Checkpoint = func() (kubelet.Checkpoint, error) {
		return kubelet.Checkpoint{Held: []kubelet.HeldDevice{
			held("GPU-0::1", "with UID 1"), held("GPU-0::2", "with UID 2"), held("GPU-1", "with UID 3"), held("GPU-1", "with UID 4"),
		}}, nil
	}
	client := kubeapi.New(kubeapi.Options{Kubeconfig: s.server.Kubeconfig(), Node: nodeName, Version: "v1"})
	ctx, cancel := context.WithCancel(t.Context())
	var tasks sync.WaitGroup
	tasks.Go(func() { client.Watch(ctx, clock.RealClock{}) })
	tasks.Go(func() { _ = newReporter(d.View, client, client.Nodes(), s.clock, &spread{}).Run(ctx) })
	t.Cleanup(func() { cancel(); tasks.Wait() })
	s.until("healthy", s.hasCondition("True"))
	d.gpus(gpu(0, bad), gpu(1, bad))
	about := func() []string {
		var all []string
		for _, e := range s.server.Events() {
			all = append(all, fmt.Sprintf("%s %s/%s", e.Regarding.Kind, e.Regarding.Namespace, e.Regarding.Name))
		}
		slices.Sort(all)
		return all
	}
	want := []string{"Node /node-1", "Node /node-1", "Pod a/one", "Pod b/two"} // whose UID is 3 or 4 cannot be told
	s.until("Events of pods", func() bool { return cmp.Equal(want, about()) })

	// fails has creations of Events fail from the second one on, which is of the first pod, for some times.
	fails := func(times int) {
		creations := 0
		var mu sync.Mutex // guards creations
		s.server.SetFault(apiserver.Fault{Status: 503, Only: func(r apiserver.Request) bool {
			mu.Lock()
			defer mu.Unlock()
			if r.Verb == "create" && r.Resource == "events" {
				creations++
			}
			return creations > 1 && creations <= 1+times
		}})
	}
	// The API server goes away between the Event of the node and those of its pods, and comes back.
	fails(podTries - 1)
	d.gpus(gpu(0, good), gpu(1, bad))
	want = []string{"Node /node-1", "Node /node-1", "Node /node-1", "Pod a/one", "Pod a/one", "Pod b/two", "Pod b/two"}
	s.until("Events of pods after an outage", func() bool { return cmp.Equal(want, about()) })

	// One namespace does not answer: the other one gets its Event.
	fails(podTries)
	d.gpus(gpu(0, gone), gpu(1, bad))
	want = []string{"Node /node-1", "Node /node-1", "Node /node-1", "Node /node-1", "Pod a/one", "Pod a/one", "Pod b/two", "Pod b/two", "Pod b/two"}
	s.until("the Event of the other pod", func() bool { return cmp.Equal(want, about()) })
	s.until("the one that is not written is counted", func() bool { return d.drops(dropRefused) == 1 })
}

// The devices of pods, by ID: shared, MIG devices on a GPU, pods without a UID, and others.
func TestPods(t *testing.T) {
	t.Parallel()
	held := func(resource, id, pod string) kubelet.HeldDevice {
		return kubelet.HeldDevice{Resource: resource, ID: id, Pod: pod}
	}
	named := []kubelet.HeldDevice{held("r", "MIG-1", "a/one"), held("r", "GPU-9", "a/two"), held("x", "GPU-1", "a/three"), held("r", "GPU-1", "no name")}
	recorded := []kubelet.HeldDevice{held("r", "MIG-1", "with UID 1"), held("r", "GPU-9", "with UID 2"), held("r", "GPU-1", "with UID 3")}
	s := status.Status{GPUs: []status.Device{{UUID: "GPU-1"}, {UUID: "MIG-1", GPU: "GPU-1"}, {UUID: "MIG-2", GPU: "GPU-9"}}}
	got := pods(named, recorded, withParts(s, []string{"GPU-1"}))
	if diff := cmp.Diff([]kubeapi.Pod{{Namespace: "a", Name: "one", UID: "1"}}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A condition of which nobody takes care any more tells nothing of what was told.
func TestOldCondition(t *testing.T) {
	s := newStage(t)
	s.change(func(n *corev1.Node) {
		n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{
			Type: "GPUHealthy", Status: corev1.ConditionFalse, Reason: "GPUUnhealthy", Message: "GPU-0 Unhealthy: hang, cure: reset",
		})
	})
	d := s.start(config.Features{Events: true}, gpu(0, good), gpu(1, good))
	d.gpus(gpu(0, good), gpu(1, bad))
	s.until("an Event", s.hasEvents(map[string]int{"GPUUnhealthy GPU-1": 1}))
	s.pass(time.Minute, time.Second)
	if !s.hasEvents(map[string]int{"GPUUnhealthy GPU-1": 1})() {
		t.Errorf("Events %v", s.events())
	}
}

// A node starts for the first time while the API server is away: until it tells of the node, the label that chooses the configuration is not
// known. That is over when an Event can be written, and none tells of it.
func TestNoEventOfAConfigurationThatWasInDoubt(t *testing.T) {
	s := newStage(t)
	d := s.start(everything, gpu(0, good))
	d.stop()
	client := kubeapi.New(kubeapi.Options{Kubeconfig: s.server.Kubeconfig(), Node: nodeName, Version: "v1"})
	d.Status = func(context.Context) (status.Status, error) {
		now := status.Status{Version: "v1", Driver: "580", Looked: s.clock.Now(), GPUs: []status.Device{gpu(0, bad)}}
		if client.Nodes().Value().UID == "" {
			now.ConfigError = "the label is not known"
		}
		return now, nil
	}
	ctx, cancel := context.WithCancel(t.Context())
	var tasks sync.WaitGroup
	tasks.Go(func() { _ = newReporter(d.View, client, client.Nodes(), s.clock, &spread{}).Run(ctx) })
	t.Cleanup(func() { cancel(); tasks.Wait() })
	s.pass(time.Minute, time.Second)
	tasks.Go(func() { client.Watch(ctx, clock.RealClock{}) })
	s.until("the Event of the GPU", s.hasEvents(map[string]int{"GPUUnhealthy GPU-0": 1}))
	s.pass(time.Minute, time.Second)
	if got := s.events(); len(got) > 1 {
		t.Errorf("Events %v", got)
	}
}

// The taint is turned off together with the right to remove it: the log says how a person does it.
func TestTaintThatMayNotBeRemoved(t *testing.T) {
	s := newStage(t)
	d := s.start(everything, gpu(0, good))
	d.stop()
	s.change(func(n *corev1.Node) {
		n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: taintKey, Effect: taintEffect})
	})
	s.server.SetFault(apiserver.Fault{Status: 403, Only: apiserver.Request.IsWrite})
	d.Configs.Publish(config.Config{Features: config.Features{}})
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	log := logger.GetSink().(ktesting.Underlier).GetBuffer()
	client := kubeapi.New(kubeapi.Options{Kubeconfig: s.server.Kubeconfig(), Node: nodeName, Version: "v1"})
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
	var tasks sync.WaitGroup
	tasks.Go(func() { client.Watch(ctx, clock.RealClock{}) })
	tasks.Go(func() { _ = newReporter(d.View, client, client.Nodes(), s.clock, &spread{}).Run(ctx) })
	t.Cleanup(func() { cancel(); tasks.Wait() })
	s.until("the command", func() bool { return strings.Contains(log.String(), "kubectl taint node "+nodeName+" "+taintKey+"-") })
}
