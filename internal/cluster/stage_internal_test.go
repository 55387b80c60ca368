package cluster

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/quiet"
)

const nodeName = "node-1"

// A stage is a node at a stand-in API server. Its time goes a hundred times as fast while something is waited for.
type stage struct {
	t      *testing.T
	server *apiserver.Server
	clock  *clocktesting.FakeClock
	// fraction is that of the reporters, if it is not 0.
	fraction float64
	// stateDir is that of the daemons; empty for none.
	stateDir string
	// lock is how the daemons take their lock, if it is not nil.
	lock func(string) (func(), error)
}

// A staged is what reporters are told of one.
type staged struct {
	daemon.View
	stop func()

	mu      sync.Mutex
	status  status.Status
	dropped map[string]int
}

func newStage(t *testing.T) *stage {
	t.Helper()
	t.Parallel()
	server, err := apiserver.Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	s := &stage{t: t, server: server, clock: clocktesting.NewFakeClock(time.Now())}
	s.change(func(n *corev1.Node) {
		n.Spec.Taints = []corev1.Taint{{Key: "theirs", Effect: corev1.TaintEffectNoSchedule}}
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	})
	return s
}

func (s *stage) change(with func(*corev1.Node)) {
	s.t.Helper()
	if err := s.server.ChangeNode(nodeName, with); err != nil {
		s.t.Fatal(err)
	}
}

var everything = config.Features{
	Events: true, Condition: true, Taint: true,
}

// start starts a daemon with these GPUs. It is stopped at the end of the test, or by its stop.
func (s *stage) start(f config.Features, gpus ...status.Device) *staged {
	s.t.Helper()
	return s.startAs(f, status.Status{Version: "v1", Driver: "580", GPUs: gpus})
}

// startAs starts a daemon with this status. It has looked at the GPUs just now, unless it does not know the driver's version.
func (s *stage) startAs(f config.Features, first status.Status) *staged {
	s.t.Helper()
	d := &staged{dropped: map[string]int{}, View: daemon.View{
		Config: config.Config{StateDir: s.stateDir}, Configs: feed.New(config.Config{Features: f}), ConfigErrors: feed.New[error](nil),
		Snapshots: feed.New(inventory.Snapshot{}), Offered: feed.New(resource.Plan{}),
		APIRequested: func(string, string, int) {},
	}}
	d.Status = func(context.Context) (status.Status, error) {
		d.mu.Lock()
		defer d.mu.Unlock()
		now := d.status
		if now.Driver != "" {
			now.Looked = s.clock.Now()
		}
		return now, nil
	}
	d.EventDropped = func(cause string) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.dropped[cause]++
	}
	d.set(first)
	client := kubeapi.New(kubeapi.Options{Kubeconfig: s.server.Kubeconfig(), Node: nodeName, Version: "v1"})
	ctx, cancel := context.WithCancel(context.Background())
	var tasks sync.WaitGroup
	tasks.Go(func() { client.Watch(ctx, clock.RealClock{}) })
	r := newReporter(d.View, client, client.Nodes(), s.clock, &spread{})
	if s.fraction != 0 {
		r.fraction = s.fraction
	}
	if s.lock != nil {
		r.lock, r.lockShared = s.lock, s.lock
	}
	tasks.Go(func() {
		if err := r.Run(ctx); err != nil {
			s.t.Error(err)
		}
	})
	d.stop = sync.OnceFunc(func() { cancel(); tasks.Wait() })
	s.t.Cleanup(d.stop)
	return d
}

// set changes what the daemon knows.
func (d *staged) set(now status.Status) {
	d.mu.Lock()
	d.status = now
	d.mu.Unlock()
	d.Snapshots.Publish(inventory.Snapshot{})
}

func (d *staged) gpus(gpus ...status.Device) {
	d.mu.Lock()
	now := d.status
	d.mu.Unlock()
	now.GPUs = gpus
	d.set(now)
}

func (d *staged) drops(cause string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.dropped[cause]
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

// until waits until something is so. Time goes on meanwhile.
func (s *stage) until(what string, is func() bool) {
	s.t.Helper()
	for deadline := time.Now().Add(patience); !is(); {
		if time.Now().After(deadline) {
			s.t.Fatalf("never: %s; condition %q, taints %v, Events %v", what, s.condition(), s.taints(), s.events())
		}
		s.pass(500*time.Millisecond, 500*time.Millisecond)
	}
}

// pass has so much time go by, in steps. Before each, what goroutines have begun comes to its end, or to something that they wait for.
func (s *stage) pass(d, step time.Duration) {
	for ; d > 0; d -= step {
		quiet.Wait(time.Second)
		s.clock.Step(step)
	}
}

// condition is the condition in one line, without times; empty if there is none.
func (s *stage) condition() string {
	n, err := s.server.Node(nodeName)
	if err != nil {
		return err.Error()
	}
	for _, c := range n.Status.Conditions {
		if c.Type == "GPUHealthy" {
			return fmt.Sprintf("%s %s: %s", c.Status, c.Reason, c.Message)
		}
	}
	return ""
}

func (s *stage) hasCondition(prefix string) func() bool {
	return func() bool { return strings.HasPrefix(s.condition(), prefix) }
}

func (s *stage) taints() []string {
	n, err := s.server.Node(nodeName)
	if err != nil {
		return []string{err.Error()}
	}
	var keys []string
	for _, taint := range n.Spec.Taints {
		keys = append(keys, taint.Key)
	}
	return keys
}

func (s *stage) tainted() bool { return slices.Contains(s.taints(), taintKey) }

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

func (s *stage) hasEvents(want map[string]int) func() bool {
	return func() bool { return cmp.Equal(want, s.events()) }
}

const statusPatch = "nodes/status"

func (s *stage) conditionWrites() int {
	return s.server.Requests()[apiserver.Request{Verb: "patch", Resource: statusPatch}]
}
