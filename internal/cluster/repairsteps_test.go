package cluster_test

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/slots"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// A fuse ends a process at one of its steps: a write of a record, a write to the API server, the
// withdrawal or return of a GPU, an eviction, or the begin or end of nvidia-smi. From then on no step of
// this process has an effect or returns before over.
type fuse struct {
	server *apiserver.Server
	last   int  // the number of the last step
	done   bool // whether the last step has its effect
	burnt  chan struct{}
	over   chan struct{}

	mu    sync.Mutex // guards the following field
	steps []string
}

// errKilled is the result of the steps of a dead process.
var errKilled = errors.New("the process was killed")

// next counts a step, and returns whether it has an effect and whether it returns.
func (f *fuse) next(what string) (acts, returns bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.steps) > f.last {
		return false, false
	}
	f.steps = append(f.steps, what)
	if len(f.steps) <= f.last {
		return true, true
	}
	close(f.burnt)
	return f.done, false
}

// step takes a step of the process; without a fuse, it only acts.
func (f *fuse) step(what string, act func() error) (err error) {
	if f == nil {
		return act()
	}
	acts, returns := f.next(what)
	if acts {
		err = act()
	}
	if returns {
		return err
	}
	<-f.over
	return errKilled
}

// request takes the step of a request to the API server, and reports whether the client gets no answer.
func (f *fuse) request(r apiserver.Request) bool {
	if !r.IsWrite() {
		return false
	}
	acts, returns := f.next(r.Verb + " " + r.Resource)
	if !returns { // the requests that follow have no effect, whatever this one has
		f.server.SetFault(apiserver.Fault{Status: http.StatusServiceUnavailable, Only: apiserver.Request.IsWrite})
	}
	return !acts || !returns
}

// String returns the last step.
func (f *fuse) String() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return fmt.Sprintf("step %d, %s, done: %v", len(f.steps), f.steps[len(f.steps)-1], f.done)
}

// TestEndAtEachStep kills the process of a repair, or restarts its node, before and after each of its
// steps. The next process finishes the repair within the budget, or asks for an operator; it never resets
// a GPU that a pod has, and keeps no other GPU from pods.
func TestEndAtEachStep(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		mode repair.Mode
		does effect
	}{
		{"a pod is evicted, and the reset works", repair.Evict, resetWorks},
		{"resets fail", repair.Idle, resetFails},
	} {
		var all []string
		for last, burns := 0, true; burns; last++ {
			for _, done := range []bool{false, true} {
				for _, restarts := range []bool{false, true} {
					if restarts && testing.Short() {
						continue
					}
					onNewStage(t, func(s *stage) {
						f := &fuse{server: s.server, last: last, done: done, burnt: make(chan struct{}), over: make(chan struct{})}
						if burns = s.endAt(f, tt.mode, tt.does, restarts); t.Failed() {
							t.Fatalf("%s; %v; the node restarts: %v", tt.name, f, restarts)
						}
						all = f.steps
					})
				}
			}
		}
		t.Logf("%s: %d steps: %s", tt.name, len(all), strings.Join(all, ", "))
		for _, kind := range []string{"leases", "write repairs.json", "write reset.json", "withdraw", "nvidia-smi ends"} {
			if !slices.ContainsFunc(all, func(step string) bool { return strings.Contains(step, kind) }) {
				t.Errorf("%s: no step is %s", tt.name, kind)
			}
		}
	}
}

// endAt repairs a GPU of a node whose first process has a fuse, and reports whether that burns before the
// repair has ended.
func (s *stage) endAt(f *fuse, mode repair.Mode, does effect, restarts bool) (burns bool) {
	const sick, other = 1, 2
	w := s.ward(1, 1, mode)
	p := w.nodes[0]
	p.kill()
	p.fuse = f
	s.server.SetFault(apiserver.Fault{Status: http.StatusServiceUnavailable, Late: f.done, Only: f.request})
	p.start()
	p.hold(other, true)
	p.hold(sick, mode == repair.Evict)
	p.fail(sick, does)
	hasEnded := func() bool {
		p.hold(sick, true) // a pod takes the GPU as soon as it can
		p.mu.Lock()
		isBack := !p.withdrawn["GPU-1"]
		p.mu.Unlock()
		return isBack && (p.isHealthy(sick) || strings.HasPrefix(p.reason(), string(repair.Manual))) &&
			!slices.ContainsFunc(s.server.Leases(leaseSpace), func(l *coordinationv1.Lease) bool {
				return strings.HasPrefix(l.Name, slots.Prefix) && l.Spec.HolderIdentity != nil && *l.Spec.HolderIdentity != ""
			})
	}
	s.until("the repair has ended, or the process", func() bool {
		select {
		case <-f.burnt:
			burns = true
		default:
		}
		return burns || hasEnded()
	})
	defer func() { // what the dead process still does, it does after the story
		close(f.over)
		s.pass(time.Minute)
	}()
	if burns {
		p.end()
		p.stop()
		s.server.SetFault(apiserver.Fault{})
		if restarts {
			p.restartNode()
			s.pass(2 * time.Minute)
		}
		p.fuse = nil
		p.start()
		s.until("the repair has ended", hasEnded)
	}
	if p.isHealthy(sick) == (does == resetFails) {
		s.Errorf("the GPU is Healthy: %v; %s", p.isHealthy(sick), p.reason())
	}
	p.mu.Lock()
	if n := len(p.resets["GPU-1"]); n > repair.Budget {
		s.Errorf("%d resets", n)
	}
	p.mu.Unlock()
	if p.hold(other, true); !p.holders[fmt.Sprintf("GPU-%d", other)] {
		s.Error("the other GPU cannot be used")
	}
	w.check()
	return burns
}
