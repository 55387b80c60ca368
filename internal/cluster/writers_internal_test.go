package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// writing is a reporter with a pen. It is for a bubble of synctest.
func writing(f config.Features, node kubeapi.Node, s status.Status) (*reporter, *pen) {
	p := &pen{}
	d := daemon.View{Configs: feed.New(config.Config{Features: f}), EventDropped: func(string) {}}
	r := newReporter(d, p, feed.New(node), clock.RealClock{}, &spread{})
	r.fraction = 0
	if !s.Looked.IsZero() {
		s.Looked = time.Now()
	}
	r.statuses.Publish(s)
	return r, p
}

// runs runs a loop until the returned function is called.
func runs(t *testing.T, loop func(context.Context)) (end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { loop(ctx) })
	return func() { cancel(); running.Wait() }
}

// told is the status of a daemon that has looked at these GPUs now.
func told(gpus ...status.Device) status.Status {
	return status.Status{Version: "v1", Driver: "580", Looked: time.Now(), GPUs: gpus}
}

// replaced is the status of a daemon whose resource a later one serves.
func replaced(s status.Status) status.Status {
	s.Resources = []status.Resource{{Name: "nvidia.com/gpu", Server: "silent: another server has registered"}}
	return s
}

// TestTaintWhenItIsKnown: nothing is written of a node that is not known, by a status that does not tell, or by a process that yields.
func TestTaintWhenItIsKnown(t *testing.T) {
	t.Parallel()
	tainted := kubeapi.Node{UID: "u", Taints: []kubeapi.Taint{{Key: taintKey, Effect: taintEffect}}}
	clean := kubeapi.Node{UID: "u"}
	synctest.Test(t, func(t *testing.T) {
		for name, tt := range map[string]struct {
			off    bool
			node   kubeapi.Node
			status status.Status
			want   []bool
		}{
			"bad":                            {node: clean, status: told(gpu(0, bad)), want: []bool{true}},
			"bad, and the node is not known": {status: told(gpu(0, bad))},
			"bad, and tainted":               {node: tainted, status: told(gpu(0, bad))},
			"one of two is bad":              {node: clean, status: told(gpu(0, bad), gpu(1, good))},
			"healthy":                        {node: tainted, status: told(gpu(0, good)), want: []bool{false}},
			"healthy, and not tainted":       {node: clean, status: told(gpu(0, good))},
			"nothing is told":                {node: tainted, status: status.Status{}},
			"not looked at":                  {node: clean, status: status.Status{Version: "v1", GPUs: []status.Device{gpu(0, bad)}}},
			"off":                            {off: true, node: tainted, status: told(gpu(0, bad)), want: []bool{false}},
			"off, and nothing is told":       {off: true, node: tainted, want: []bool{false}},
			"yields":                         {node: clean, status: replaced(told(gpu(0, bad)))},
			"yields, and is off":             {off: true, node: tainted, status: replaced(told(gpu(0, bad)))},
		} {
			r, p := writing(config.Features{Taint: !tt.off}, tt.node, tt.status)
			end := runs(t, r.keepTaint)
			time.Sleep(2 * time.Minute) // a node that is written is not seen to be so, and is written again after a while
			synctest.Wait()
			end()
			if got := slices.Compact(p.taints); !slices.Equal(got, tt.want) {
				t.Errorf("%s: wrote %v, want %v", name, got, tt.want)
			}
		}
	})
}

// TestConditionThatIsThere: what of it a new one keeps.
func TestConditionThatIsThere(t *testing.T) {
	t.Parallel()
	f := config.Features{Condition: true}
	synctest.Test(t, func(t *testing.T) {
		long := time.Now().Add(-time.Hour)
		healthy := kubeapi.Condition{Type: "GPUHealthy", Status: "True", Reason: "AllHealthy", Message: "all GPUs are healthy", LastTransitionTime: long, LastHeartbeatTime: time.Now()}
		ill := kubeapi.Condition{Type: "GPUHealthy", Status: "False", Reason: "GPULost", Message: "GPU-0 lost", LastTransitionTime: long}
		timeless, other := ill, healthy
		timeless.LastTransitionTime, other.Type = time.Time{}, "Other"
		for name, tt := range map[string]struct {
			f      config.Features
			there  []kubeapi.Condition
			node   string
			status status.Status
			want   string // status and "now" or "before" for the transition; empty for no write
		}{
			"the first":                   {f, nil, "u", told(gpu(0, good)), "True now"},
			"the first of a bad GPU":      {f, []kubeapi.Condition{other}, "u", told(gpu(0, bad)), "False now"},
			"the node is not known":       {f, nil, "", told(gpu(0, bad)), ""},
			"off":                         {config.Features{}, nil, "u", told(gpu(0, bad)), ""},
			"yields":                      {f, nil, "u", replaced(told(gpu(0, bad))), ""},
			"nothing is told":             {f, nil, "u", status.Status{}, ""},
			"the same":                    {f, []kubeapi.Condition{healthy}, "u", told(gpu(0, good)), ""},
			"worse":                       {f, []kubeapi.Condition{other, healthy}, "u", told(gpu(0, bad)), "False now"},
			"as bad, for another reason":  {f, []kubeapi.Condition{ill}, "u", told(gpu(0, bad)), "False before"},
			"as bad, since nobody knows":  {f, []kubeapi.Condition{timeless}, "u", told(gpu(0, bad)), "False now"},
			"without a look, and at odds": {f, []kubeapi.Condition{healthy}, "u", status.Status{Version: "v1", Stale: "no driver"}, "Unknown now"},
		} {
			r, p := writing(tt.f, kubeapi.Node{UID: tt.node, Conditions: tt.there}, tt.status)
			end := runs(t, r.keepCondition)
			began := time.Now()
			time.Sleep(time.Minute)
			end()
			got := ""
			if len(p.condition) > 0 {
				c := p.condition[0]
				got = c.Status + map[bool]string{true: " before", false: " now"}[c.LastTransitionTime.Equal(long)]
				if c.Type != "GPUHealthy" || c.LastHeartbeatTime.Before(began) || got[len(got)-3:] == "now" && !c.LastTransitionTime.Equal(c.LastHeartbeatTime) {
					t.Errorf("%s: %+v", name, c)
				}
			}
			if got != tt.want {
				t.Errorf("%s: wrote %q, want %q", name, got, tt.want)
			}
		}
	})
}

// TestEventsWait: for the node, and while the API server is away; then each is written once. Pods are told if that is on.
func TestEventsWait(t *testing.T) {
	t.Parallel()
	for _, podEvents := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r, p := writing(config.Features{Events: true, PodEvents: podEvents}, kubeapi.Node{}, told(gpu(0, bad)))
			asked := 0
			r.daemon.Held = func(context.Context) ([]kubelet.HeldDevice, error) {
				asked++
				return nil, errors.New("no answer")
			}
			r.daemon.Checkpoint = func() (kubelet.Checkpoint, error) { return kubelet.Checkpoint{}, nil }
			event := func(cause string) report.NodeEvent {
				return report.NodeEvent{Reason: report.GPULost, Cause: cause, Devices: []string{"GPU-0"}, At: time.Now()}
			}
			end := runs(t, r.sendEvents)
			defer end()
			steps := func(what string, want int, do func()) {
				t.Helper()
				p.events = nil
				do()
				time.Sleep(10 * time.Minute)
				synctest.Wait()
				if len(p.events) != want {
					t.Errorf("%s: %d writes, want %d", what, len(p.events), want)
				}
			}
			steps("the node is not known", 0, func() { r.queue.push([]report.NodeEvent{event("a")}) })
			steps("it is known", 1, func() { r.nodes.Publish(kubeapi.Node{UID: "u"}) })
			if r.queue.room() != maxQueue {
				t.Errorf("%d Events are left", maxQueue-r.queue.room())
			}
			p.err = &kubeapi.Refused{Code: http.StatusUnprocessableEntity}
			steps("two that are never taken", 2, func() { r.queue.push([]report.NodeEvent{event("b"), event("c")}) })
			p.err = nil
			nodeless := event("d")
			nodeless.Devices = nil
			steps("one about no device", 1, func() { r.queue.push([]report.NodeEvent{nodeless}) })
			if want := map[bool]int{true: 3}[podEvents]; asked != want {
				t.Errorf("kubelet was asked for pods %d times, want %d", asked, want)
			}
		})
	}
}

// TestOwnersAreFoundOnce: who owns the pod is read once, also where that is not allowed; what fails is tried again.
func TestOwnersAreFoundOnce(t *testing.T) {
	s := newStage(t)
	client := kubeapi.New(kubeapi.Options{Kubeconfig: s.server.Kubeconfig(), Node: nodeName, Version: "v1"})
	l := &featureLabeler{labeler: labeler{client: client, daemon: daemon.View{Config: config.Config{PodName: "p"}}}}
	reads := func() int { return s.server.Requests()[apiserver.Request{Verb: "get", Resource: "pods"}] }
	s.server.SetFault(apiserver.Fault{Status: 500})
	if err := l.findOwners(t.Context(), "gpu"); err == nil || l.owned {
		t.Errorf("an API server that fails: %v, known %v", err, l.owned)
	}
	s.server.SetFault(apiserver.Fault{Status: 403})
	before := reads()
	for range 2 {
		if err := l.findOwners(t.Context(), "gpu"); err != nil || !l.owned || len(l.owners) > 0 {
			t.Errorf("without the right: %v, known %v, %v", err, l.owned, l.owners)
		}
	}
	if n := reads() - before; n != 1 {
		t.Errorf("the pod is read %d times", n)
	}
}

// TestObjectThatCannotBeRead: it is not written either, and that is told.
func TestObjectThatCannotBeRead(t *testing.T) {
	t.Parallel()
	r := newLabelRig(t, config.LabelsOff, nil)
	r.server.SetFault(apiserver.Fault{Status: http.StatusForbidden, Only: func(q apiserver.Request) bool {
		return q.Verb == "get" && q.Resource == "nodefeatures"
	}})
	r.daemon.Configs.Publish(config.Config{
		Namespace: "gpu", Features: config.Features{Labels: config.LabelsNodeFeature}, Discovery: config.Discovery{On: true},
	})
	r.daemon.Labels.Publish(map[string]string{"nvidia.com/gpu.count": "8"})
	r.until("the problem is told", func() bool { return r.daemon.Unlabeled.Value() != nil })
	if n := r.server.Writes(); n != 0 {
		t.Errorf("%d writes", n)
	}
	r.server.SetFault(apiserver.Fault{})
	r.until("the object", func() bool { return r.feature("nvidia-features-for-n")["nvidia.com/gpu.count"] == "8" })
}

// TestLabelsLeftToOthers: as long as they have the value that the other program gave them.
func TestLabelsLeftToOthers(t *testing.T) {
	t.Parallel()
	wanted := map[string]string{"a": "1", "b": "1"}
	for name, tt := range map[string]struct {
		now        map[string]string
		ours, left map[string]string
	}{
		"theirs":  {map[string]string{"a": "x"}, map[string]string{"b": "1"}, map[string]string{"a": "x"}},
		"changed": {map[string]string{"a": "y"}, wanted, map[string]string{}},
		"gone":    {nil, wanted, map[string]string{}},
	} {
		l := &nodeLabeler{left: map[string]string{"a": "x"}, sighting: sighting{node: kubeapi.Node{Labels: tt.now}}}
		if d := cmp.Diff(tt.ours, l.ours(wanted)); d != "" || !cmp.Equal(tt.left, l.left) || len(wanted) != 2 {
			t.Errorf("%s: left are %v; ours (-want +got):\n%s", name, l.left, d)
		}
	}
}

// TestConflictOfAnotherNode: labels are left to their owners by what the node has now; a conflict about labels that it has not is an error.
func TestConflictOfAnotherNode(t *testing.T) {
	s := newStage(t)
	client := kubeapi.New(kubeapi.Options{Kubeconfig: s.server.Kubeconfig(), Node: nodeName, Version: "v1"})
	node, err := s.server.Node(nodeName)
	if err != nil {
		t.Fatal(err)
	}
	l := &nodeLabeler{labeler: labeler{client: client, clock: s.clock}, uid: "another", left: map[string]string{}}
	conflict := &kubeapi.Conflict{Labels: map[string]string{"gone": "x"}}
	if err := l.leave(t.Context(), conflict); err == nil || errors.Is(err, conflict) {
		t.Errorf("of another node: %v", err)
	}
	s.server.SetFault(apiserver.Fault{Status: 500})
	if err := l.leave(t.Context(), conflict); err == nil || errors.Is(err, conflict) {
		t.Errorf("while the node cannot be read: %v", err)
	}
	s.server.SetFault(apiserver.Fault{})
	l.uid = string(node.UID)
	if err := l.leave(t.Context(), conflict); !errors.Is(err, conflict) || len(l.left) > 0 {
		t.Errorf("a label that is gone: %v, left %v", err, l.left)
	}
}

// TestStatusIsReadSoonAfterAChange: of anything that the status tells of, and every few seconds; several changes at once are one. One that
// cannot be read leaves the last one, and nothing is read while nothing is told to the cluster.
func TestStatusIsReadSoonAfterAChange(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := config.Features{Events: true}
		r, _ := writing(f, kubeapi.Node{}, status.Status{})
		d := &r.daemon
		d.Snapshots, d.Offered, d.ConfigErrors = feed.New(inventory.Snapshot{}), feed.New(resource.Plan{}), feed.New[error](nil)
		d.MIG = feed.New(mig.Status{})
		var reads atomic.Int32
		var fails atomic.Bool
		d.Status = func(ctx context.Context) (status.Status, error) {
			if at, has := ctx.Deadline(); !has || time.Until(at) != statusPatience {
				t.Errorf("it is waited until %v", at)
			}
			n := reads.Add(1)
			if fails.Load() {
				return status.Status{}, errors.New("no answer")
			}
			return status.Status{Version: fmt.Sprint(n)}, nil
		}
		defer runs(t, r.followStatus)()
		after := func(what string, wait time.Duration, want int32) {
			t.Helper()
			before := reads.Load()
			time.Sleep(wait)
			synctest.Wait()
			if n := reads.Load() - before; n != want {
				t.Errorf("%s: the status is read %d times, want %d", what, n, want)
			}
		}
		if synctest.Wait(); reads.Load() != 1 {
			t.Errorf("at the start the status is read %d times", reads.Load())
		}
		after("the start", statusDelay, 0)
		for what, change := range map[string]func(){
			"GPUs":           func() { d.Snapshots.Publish(inventory.Snapshot{}) },
			"devices":        func() { d.Offered.Publish(resource.Plan{}) },
			"a refused file": func() { d.ConfigErrors.Publish(nil) },
			"the node":       func() { r.nodes.Publish(kubeapi.Node{}) },
			"a layout":       func() { d.MIG.Publish(mig.Status{}) },
			"the configuration, and more": func() {
				d.Configs.Publish(config.Config{Features: f})
				d.Snapshots.Publish(inventory.Snapshot{})
			},
		} {
			change()
			after(what, statusDelay, 1)
		}
		after("a quiet time", 2*(statusEvery+statusDelay), 2)
		if r.informed.Value() {
			t.Error("the status was read for a node that is not known")
		}
		fails.Store(true)
		r.nodes.Publish(kubeapi.Node{UID: "u"})
		after("the node is known", statusDelay, 1)
		if s := r.statuses.Value(); s.Version != fmt.Sprint(reads.Load()-1) || r.informed.Value() {
			t.Errorf("after a failure the status is that of read %s, of %d; told %v", s.Version, reads.Load(), r.informed.Value())
		}
		fails.Store(false)
		after("the next one", statusEvery+statusDelay, 1)
		if s := r.statuses.Value(); s.Version != fmt.Sprint(reads.Load()) || !r.informed.Value() {
			t.Errorf("the status is that of read %s, of %d; told %v", s.Version, reads.Load(), r.informed.Value())
		}
		d.Configs.Publish(config.Config{})
		after("all is off", time.Minute, 0)
	})
}

// TestEventThatARateKeepsBack: it is told when the rate allows it, although nothing changes then.
func TestEventThatARateKeepsBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, _ := writing(config.Features{Events: true}, kubeapi.Node{UID: "u"}, told(gpu(0, good)))
		r.informed.Publish(true)
		r.outranked.Publish(false)
		dropped := 0
		r.daemon.EventDropped = func(string) { dropped++ }
		defer runs(t, r.findEvents)()
		synctest.Wait()
		last := func() report.Reason {
			synctest.Wait()
			r.queue.mu.Lock()
			defer r.queue.mu.Unlock()
			return r.queue.events[len(r.queue.events)-1].Reason
		}
		for i := range 20 { // until a recovery is kept back
			r.statuses.Publish(told(gpu(0, []string{bad, good}[i%2])))
			synctest.Wait()
			if i%2 == 1 && dropped > 0 && last() == report.GPUUnhealthy {
				break
			}
		}
		if last() != report.GPUUnhealthy {
			t.Fatalf("no recovery is kept back; %d Events are", dropped)
		}
		time.Sleep(time.Hour)
		if got := last(); got != report.GPURecovered {
			t.Errorf("an hour after the recovery the last Event is %s", got)
		}
	})
}

// TestFirstConditionWaitsForTheSizeOfTheCluster: that of a healthy node, which others of a large cluster write too. That of a bad one does not.
func TestFirstConditionWaitsForTheSizeOfTheCluster(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for state, writes := range map[string]bool{good: false, bad: true} {
			f := config.Features{Condition: true}
			r, p := writing(f, kubeapi.Node{UID: "u"}, told(gpu(0, state)))
			p.err = &kubeapi.Refused{Code: http.StatusInternalServerError}
			end := runs(t, r.keepCondition)
			time.Sleep(time.Minute)
			end()
			if (len(p.condition) > 0) != writes {
				t.Errorf("%s: %d writes while the nodes cannot be counted", state, len(p.condition))
			}
		}
	})
}

// TestShareIsGivenBack: while nothing is told to the cluster, and at the end. A process that has lost its GPUs has seen them, and keeps its share.
func TestShareIsGivenBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, _ := writing(config.Features{Taint: true}, kubeapi.Node{}, told(gpu(0, good)))
		r.daemon.Config.StateDir = "/state"
		shares := 0
		r.lockShared = func(path string) (func(), error) {
			if path != "/state/"+reporterLock {
				t.Errorf("the lock is that of %s", path)
			}
			shares++
			return func() { shares-- }, nil
		}
		r.lock = func(string) (func(), error) {
			t.Error("a process that has seen GPUs asks whether others have")
			return nil, errors.New("refused")
		}
		end := runs(t, r.followOthers)
		has := func(when string, want int) {
			t.Helper()
			time.Sleep(2 * statusEvery)
			synctest.Wait()
			if shares != want || r.outranked.Value() {
				t.Errorf("%s: %d shares, want %d; outranked %v", when, shares, want, r.outranked.Value())
			}
		}
		has("at the start", 1)
		r.statuses.Publish(told())
		has("without a GPU", 1)
		for range 2 {
			r.daemon.Configs.Publish(config.Config{})
			has("off", 0)
			r.daemon.Configs.Publish(config.Config{Features: config.Features{Condition: true}})
			has("on", 1)
		}
		end()
		has("at the end", 0)
	})
}
