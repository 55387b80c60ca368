package keeper_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/keeper"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// The tests of this file show the Keeper's protocol with parts that want one value each.

// A valuePart wants a value on the Node.
type valuePart struct {
	wanted  *feed.Feed[string] // empty for nothing
	patch   func(value string) kubeapi.NodePatch
	valueOf func(kubeapi.Node) string
	action  func() // for the value "act"; nil for none

	crowd bool
	value string
	acted bool
	looks atomic.Int64
}

func (p *valuePart) Inputs() []<-chan struct{} {
	_, changed := p.wanted.Latest()
	return []<-chan struct{}{changed}
}

func (p *valuePart) Look(context.Context, kubeapi.Node) {
	p.looks.Add(1)
	p.value = p.wanted.Value()
}

func (p *valuePart) Want(node kubeapi.Node, _ time.Time) keeper.Decision {
	switch {
	case p.value == "act" && !p.acted:
		return keeper.Decision{Act: func(context.Context) error { p.action(); return nil },
			Done: func(context.Context, kubeapi.Node, error, time.Time) bool { p.acted = true; return true }}
	case node.UID == "" || p.value == "" || p.valueOf(node) == p.value:
		return keeper.Decision{}
	}
	return keeper.Decision{Patch: p.patch(p.value), Crowd: p.crowd}
}

// The parts of the tests, and the requests of their patches.
var (
	taintRequest     = apiserver.Request{Verb: "patch", Resource: "nodes"}
	conditionRequest = apiserver.Request{Verb: "patch", Resource: "nodes/status"}
	stateRequest     = apiserver.Request{Verb: "apply", Resource: "nodes"}
)

// A trio has one part of each kind: a taint, a condition, and labels by server-side apply.
type trio struct{ taint, condition, state *valuePart }

func newTrio(value string) trio {
	return trio{
		taint: &valuePart{wanted: feed.New(value), patch: func(string) kubeapi.NodePatch {
			return kubeapi.TaintPatch{Taint: kubeapi.FewerDevices, Wanted: true, Now: time.Now()}
		}, valueOf: func(n kubeapi.Node) string {
			if kubeapi.FewerDevices.IsOn(n) {
				return value
			}
			return ""
		}},
		condition: &valuePart{wanted: feed.New(value), patch: func(value string) kubeapi.NodePatch {
			return kubeapi.ConditionPatch{Type: "Test", Status: "True", Message: value}
		}, valueOf: func(n kubeapi.Node) string {
			if len(n.Conditions) == 0 {
				return ""
			}
			return n.Conditions[0].Message
		}},
		state: &valuePart{wanted: feed.New(value), patch: func(value string) kubeapi.NodePatch {
			return kubeapi.MIGStatePatch{Labels: map[string]string{"state": value}}
		}, valueOf: func(n kubeapi.Node) string { return n.Labels["state"] }},
	}
}

func (p trio) parts() []*keeper.Slot {
	return []*keeper.Slot{keeper.NewSlot("taint", p.taint), keeper.NewSlot("condition", p.condition), keeper.NewSlot("state", p.state)}
}

// A scene is a Node at a stand-in API server, in a bubble of testing/synctest.
type scene struct {
	*testing.T
	server *apiserver.Server
	turn   func(context.Context) error // of the Keepers; nil never waits
}

func onScene(t *testing.T, test func(*scene)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server, err := apiserver.StartInMemory(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(server.Stop)
		s := &scene{T: t, server: server}
		s.change(func(*corev1.Node) {})
		test(s)
	})
}

func (s *scene) change(with func(*corev1.Node)) {
	if err := s.server.ChangeNode("node", with); err != nil {
		s.Error(err)
	}
}

// keep runs a Keeper with a watch of the Node until stop is called. fence may be nil.
func (s *scene) keep(fence func() error, p trio) (stop func()) {
	client := kubeapi.New(kubeapi.Options{Kubeconfig: s.server.Kubeconfig(), Node: "node", Dial: s.server.Dial})
	client.Fence(fence)
	k := keeper.New(client, s.turn)
	ctx, cancel := context.WithCancel(s.Context())
	var running sync.WaitGroup
	running.Go(func() { client.Watch(ctx, clock.RealClock{}) })
	running.Go(func() { k.Run(ctx, p.parts()...) })
	stop = sync.OnceFunc(func() { cancel(); running.Wait() })
	s.Cleanup(stop)
	return stop
}

// values returns the values on the Node, of the taint, the condition and the labels.
func (s *scene) values() string {
	n, err := s.server.Node("node")
	if err != nil {
		return err.Error()
	}
	message := ""
	for _, c := range n.Status.Conditions {
		message = c.Message
	}
	return fmt.Sprint(len(n.Spec.Taints), " ", message, " ", n.Labels["state"])
}

// within waits until the Node has values, and fails after a time.
func (s *scene) within(limit time.Duration, want string) {
	s.Helper()
	for began := time.Now(); s.values() != want; time.Sleep(50 * time.Millisecond) {
		if time.Since(began) > limit {
			s.Fatalf("after %v the Node has %q, want %q; requests %v", limit, s.values(), want, s.server.Requests())
		}
		synctest.Wait()
	}
}

func (s *scene) pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// TestKeeper: parts write in their order, each of them once, and do not see an older Node after
// their own writes. Nothing is looked at without a change.
func TestKeeper(t *testing.T) {
	onScene(t, func(s *scene) {
		var mu sync.Mutex // guards order
		var order []apiserver.Request
		s.server.SetFault(apiserver.Fault{Only: func(r apiserver.Request) bool {
			mu.Lock()
			defer mu.Unlock()
			if r.IsWrite() {
				order = append(order, r)
			}
			return false
		}})
		p := newTrio("a")
		s.keep(nil, p)
		s.within(time.Second, "1 a a")
		s.pass(time.Minute)
		if want := []apiserver.Request{taintRequest, conditionRequest, stateRequest}; !slices.Equal(order, want) {
			s.Errorf("writes %v, want %v", order, want)
		}
		looks := p.state.looks.Load()
		p.condition.wanted.Publish("b")
		s.within(time.Second, "1 b a")
		if s.pass(time.Hour); s.server.Writes() != 4 || p.state.looks.Load() > looks+2 {
			s.Errorf("%d writes, and another part has looked %d times", s.server.Writes(), p.state.looks.Load()-looks)
		}
	})
}

// TestKeeperTurn: a write that all nodes make at the same time waits for the turn of the node, and is
// then decided again. Other writes do not wait.
func TestKeeperTurn(t *testing.T) {
	onScene(t, func(s *scene) {
		s.turn = func(ctx context.Context) error {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(time.Minute):
				return nil
			}
		}
		p := newTrio("a")
		p.state.crowd = true
		s.keep(nil, p)
		s.within(time.Second, "1 a ")
		if s.pass(59 * time.Second); s.values() != "1 a " {
			s.Error("the write came before the turn")
		}
		p.state.wanted.Publish("b")
		s.within(3*time.Second, "1 a b")
		p.state.wanted.Publish("c")
		s.within(time.Second, "1 a c")
	})
}

// TestKeeperConflicts: a write that comes after another program's is decided again at once, a few
// times, and then after a pause.
func TestKeeperConflicts(t *testing.T) {
	for name, tt := range map[string]struct {
		faster int // writes of another program just before those of the Keeper
		atOnce bool
	}{"three": {3, true}, "many": {10, false}} {
		t.Run(name, func(t *testing.T) {
			onScene(t, func(s *scene) {
				left := tt.faster
				s.server.SetFault(apiserver.Fault{Only: func(r apiserver.Request) bool {
					if r == conditionRequest && left > 0 {
						left--
						s.change(func(n *corev1.Node) { n.Annotations = map[string]string{"faster": fmt.Sprint(left)} })
					}
					return false
				}})
				p := newTrio("")
				s.keep(nil, p)
				s.pass(time.Minute)
				began := time.Now()
				p.condition.wanted.Publish("a")
				s.within(time.Minute, "0 a ")
				if took := time.Since(began); took < 100*time.Millisecond != tt.atOnce {
					s.Errorf("it took %v", took)
				}
			})
		})
	}
}

// TestKeeperRejections: a patch that the API server rejects or answers late delays no other part, is
// tried again ever more rarely, and is written at last.
func TestKeeperRejections(t *testing.T) {
	for name, fault := range map[string]apiserver.Fault{
		"forbidden":         {Status: 403},
		"an internal error": {Status: 500},
		"too many requests": {Status: 429, RetryAfter: 5 * time.Minute},
		"slow":              {Delay: 29 * time.Second},
		"too slow":          {Delay: 10 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			onScene(t, func(s *scene) {
				p := newTrio("")
				s.keep(nil, p)
				s.pass(time.Minute)
				fault.Only = func(r apiserver.Request) bool { return r == taintRequest }
				s.server.SetFault(fault)
				p.taint.wanted.Publish("a")
				s.pass(100 * time.Millisecond)
				for i := range 3 {
					value := fmt.Sprint(i)
					p.condition.wanted.Publish(value)
					p.state.wanted.Publish(value)
					s.within(3*time.Second, "0 "+value+" "+value)
				}
				if name == "slow" {
					s.within(2*time.Minute, "1 2 2")
					s.server.SetFault(apiserver.Fault{})
					return
				}
				before := s.server.Requests()[taintRequest]
				s.pass(time.Hour)
				if n := s.server.Requests()[taintRequest] - before; n > 60 {
					s.Errorf("%d attempts in an hour", n)
				}
				s.server.SetFault(apiserver.Fault{})
				s.within(20*time.Minute, "1 2 2")
			})
		})
	}
}

// TestKeeperActions: an action does not wait for a rejected write of its part.
func TestKeeperActions(t *testing.T) {
	onScene(t, func(s *scene) {
		s.server.SetFault(apiserver.Fault{Status: 429, RetryAfter: time.Hour, Only: apiserver.Request.IsWrite})
		p, acted := newTrio(""), make(chan struct{})
		p.state.action = func() { close(acted) }
		s.keep(nil, p)
		p.state.wanted.Publish("a")
		s.pass(time.Minute)
		p.state.wanted.Publish("act")
		s.pass(time.Second)
		select {
		case <-acted:
		default:
			s.Error("the action waits")
		}
	})
}

// TestKeeperLooksAfterWork: a part looks at a Node that changed while the part worked.
func TestKeeperLooksAfterWork(t *testing.T) {
	onScene(t, func(s *scene) {
		p := newTrio("")
		p.state.wanted.Publish("act")
		var looks int64
		p.state.action = func() {
			s.change(func(n *corev1.Node) { n.Labels = map[string]string{"other": "program"} })
			looks = p.state.looks.Load()
			time.Sleep(time.Second) // meanwhile the watch has the change
		}
		s.keep(nil, p)
		if s.pass(time.Minute); p.state.looks.Load() != looks+1 {
			s.Errorf("looked %d times after the change, want 1", p.state.looks.Load()-looks)
		}
	})
}

// TestKeeperThroughFaults: whatever the API server does, the Node has the last values afterwards,
// and nothing is written without need.
func TestKeeperThroughFaults(t *testing.T) {
	for _, fault := range apiserver.Faults() {
		t.Run(fault.Name, func(t *testing.T) {
			onScene(t, func(s *scene) {
				p := newTrio("a")
				s.keep(nil, p)
				s.within(time.Minute, "1 a a")
				if err := fault.Begin(s.server); err != nil {
					s.Fatal(err)
				}
				p.condition.wanted.Publish("b")
				p.state.wanted.Publish("b")
				s.pass(time.Minute)
				if err := fault.End(s.server); err != nil {
					s.Fatal(err)
				}
				s.within(20*time.Minute, "1 b b")
				writes := s.server.Writes()
				if s.pass(time.Hour); s.server.Writes() != writes {
					s.Errorf("%d writes afterwards", s.server.Writes()-writes)
				}
			})
		})
	}
}

// errKilled ends all writes of a process.
var errKilled = errors.New("killed")

// TestKeeperKilled: a process is killed between two writes; the next one makes only the second.
func TestKeeperKilled(t *testing.T) {
	onScene(t, func(s *scene) {
		var writes atomic.Int64
		stop := s.keep(func() error {
			if writes.Add(1) > 1 {
				return errKilled
			}
			return nil
		}, newTrio("a"))
		s.within(time.Second, "1  ")
		s.pass(time.Minute)
		stop()
		s.keep(nil, newTrio("a"))
		s.within(time.Minute, "1 a a")
		if s.pass(time.Minute); s.server.Writes() != 3 {
			s.Errorf("%d writes: %v", s.server.Writes(), s.server.Requests())
		}
	})
}

// TestKeeperChangeOfLeader: the lead changes while a write is under way. The late write of the
// process that led before is rejected, and that process writes nothing more.
func TestKeeperChangeOfLeader(t *testing.T) {
	onScene(t, func(s *scene) {
		first, second := newTrio(""), newTrio("")
		var ended atomic.Bool
		s.keep(func() error {
			if ended.Load() {
				return errKilled
			}
			return nil
		}, first)
		s.pass(time.Minute)
		var delayed atomic.Bool
		s.server.SetFault(apiserver.Fault{Delay: 20 * time.Second,
			Only: func(r apiserver.Request) bool { return r == stateRequest && delayed.CompareAndSwap(false, true) }})
		first.state.wanted.Publish("a")
		s.pass(time.Second)
		ended.Store(true)
		s.keep(nil, second)
		second.state.wanted.Publish("b")
		s.within(5*time.Second, "0  b")
		first.condition.wanted.Publish("a")
		if s.pass(time.Hour); s.values() != "0  b" || s.server.Requests()[conditionRequest] > 0 {
			s.Errorf("the Node has %q; requests %v", s.values(), s.server.Requests())
		}
	})
}
