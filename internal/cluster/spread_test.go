package cluster_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// headStart is how long after the start of the process nothing is asked of the API server: GPUs are
// registered first.
const headStart = 500 * time.Millisecond

// firsts returns when the last of some processes, each the first of its node, made its first
// request and its first write, since the head start.
func (s *stage) firsts(fault func() apiserver.Fault, dir func() string) (request, write time.Duration) {
	s.Helper()
	for range 15 {
		if fault != nil {
			s.server.SetFault(fault())
		}
		s.change(func(n *corev1.Node) { n.Labels = nil })
		p := s.new(config.Config{
			Startup: config.Startup{StateDir: dir()},
			Live:    config.Live{Features: config.Features{Labels: config.LabelsNode}},
		})
		p.label(map[string]string{countLabel: "8"})
		began := time.Now().Add(headStart)
		var asked, wrote time.Duration
		var mu sync.Mutex // guards both
		p.requested = func(verb, _ string, _ int) {
			mu.Lock()
			defer mu.Unlock()
			if since := time.Since(began); asked == 0 {
				asked = since + 1 // one that is made at once counts, too
			} else if verb == "PATCH" && wrote == 0 {
				wrote = since
			}
		}
		p.start()
		s.until("the node is labelled", func() bool { return s.node().Labels[countLabel] == "8" })
		p.stop()
		if asked <= 0 {
			s.Errorf("a request %v after the start", headStart+asked)
		}
		request, write = max(request, asked), max(write, wrote)
	}
	return request, write
}

// fails has the first so many requests be answered by this.
func fails(times int, f apiserver.Fault) func() apiserver.Fault {
	return func() apiserver.Fault {
		var mu sync.Mutex // guards left
		left := times
		f.Only = func(apiserver.Request) bool {
			mu.Lock()
			defer mu.Unlock()
			left--
			return left >= 0
		}
		return f
	}
}

// Where all nodes may have been started together, the first request of a process waits, and its
// first write does not wait again. Where the process alone was started again, its first write
// waits. 50 nodes do it in a second.
func TestSpreadOfStarts(t *testing.T) {
	for name, tt := range map[string]struct {
		file    string // cluster.json; none if it is empty
		nodes   int    // of the cluster; one if it is 0
		fault   func() apiserver.Fault
		request time.Duration // the last of all has made its first request by then
		write   time.Duration // and its first write
	}{
		"the node was restarted": {file: `{"version":1,"nodes":1000,"boot":"b"}`, request: 20 * time.Second,
			write: 20 * time.Second},
		"the process was restarted": {file: `{"version":1,"nodes":1000,"boot":"boot"}`, write: 20 * time.Second},
		"no boot ID": {file: `{"version":1,"nodes":1000,"boot":""}`, request: 20 * time.Second,
			write: 20 * time.Second},
		"very many nodes": {file: `{"version":1,"nodes":1000000,"boot":"b"}`, request: 5 * time.Minute,
			write: 5 * time.Minute},
		"one node":                 {},
		"300 nodes":                {nodes: 300, write: 6 * time.Second},
		"no state of this version": {file: `{"version":2,"nodes":100000}`, nodes: 300, write: 6 * time.Second},
		"nonsense":                 {file: `{"version":1,"nodes":-5}`, nodes: 300, write: 6 * time.Second},
		"nodes may not be counted": {fault: fails(1, apiserver.Fault{Status: 403}), write: 20 * time.Second},
		"the API server starts": {nodes: 300, fault: fails(1, apiserver.Fault{Status: 503}),
			write: 8 * time.Second},
		"the API server has too much to do": {nodes: 300, fault: fails(2,
			apiserver.Fault{Status: 429, RetryAfter: time.Second}), write: 11 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				for i := range tt.nodes - 1 {
					if err := s.server.ChangeNode(fmt.Sprint("other-", i), func(*corev1.Node) {}); err != nil {
						s.Fatal(err)
					}
				}
				request, write := s.firsts(tt.fault, func() string {
					dir := s.TempDir()
					if tt.file != "" {
						if err := os.WriteFile(filepath.Join(dir, "cluster.json"), []byte(tt.file), 0o600); err != nil {
							s.Fatal(err)
						}
					}
					return dir
				})
				const slack = time.Second
				if request > tt.request+slack || request < tt.request/2 || write > tt.write+slack || write < tt.write/3 {
					s.Errorf("the last of 15 makes its first request after %v, and its first write after %v", request, write)
				}
			})
		})
	}
}

// What the next process will know of the cluster is the number of nodes as it was about a day ago
// at most.
func TestSizeOfTheCluster(t *testing.T) {
	onStage(t, func(s *stage) {
		dir := s.TempDir()
		saved := func(nodes int, boot string) {
			s.Helper()
			text, err := os.ReadFile(filepath.Join(dir, "cluster.json"))
			if got := strings.Join(strings.Fields(string(text)), ""); err != nil ||
				got != fmt.Sprintf(`{"version":1,"nodes":%d,"boot":%q}`, nodes, boot) {
				s.Errorf("saved is %s (%v), want %d nodes and boot ID %s", got, err, nodes, boot)
			}
		}
		s.server.SetFault(fails(2, apiserver.Fault{Status: 500})())
		p := s.new(config.Config{
			Startup: config.Startup{StateDir: dir},
			Live:    config.Live{DRA: config.DRA{Mode: config.DRAAll}},
		}) // which does not watch the node
		p.observes = true
		p.startOn("b")
		s.pass(time.Minute)
		saved(1, "b")
		for i := range 9 {
			if err := s.server.ChangeNode(fmt.Sprint("other-", i), func(*corev1.Node) {}); err != nil {
				s.Fatal(err)
			}
		}
		s.pass(36 * time.Hour)
		saved(10, "b")
		before := s.requests()
		s.pass(240 * time.Hour)
		if n := s.requests() - before; n < 6 || n > 20 {
			s.Errorf("the nodes were counted %d times in 10 days", n)
		}
		p.stop()
		before = s.requests()
		p.startOn("c")
		s.pass(time.Minute)
		saved(10, "c")
		if n := s.requests() - before; n != 0 {
			s.Errorf("%d requests at a start that knows the size", n)
		}
	})
}

// A node of many that were restarted publishes when its turn has come. What follows does not wait:
// a kubelet that removed the slices, and a fault.
func TestSpreadOfSlices(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.newPublisher(config.Config{Startup: config.Startup{StateDir: s.stateDir(100000, "another")}}, snapshotOf(2)).publish()
		began := time.Now()
		p.registered(1)
		s.until("the first request", func() bool { return s.requests() > 0 })
		if took := time.Since(began); took > 5*time.Minute {
			s.Errorf("after %v", took)
		}
		s.untilPool("1: 0 1")
		if made := p.requests(); made != "GET nodes 200: 1, GET resourceslices 200: 1, POST resourceslices 201: 1, WATCH resourceslices 200: 1" {
			s.Errorf("the first slice took %s", made)
		}
		for i := range 3 {
			s.wipe()
			p.registered(i + 2)
			began := time.Now()
			if s.untilPool("1: 0 1"); time.Since(began) > 3*time.Second {
				s.Errorf("the slice is back after %v", time.Since(began))
			}
		}
		p.fault(1)
		s.untilPool("1: 0 1!xid")
	})
}

// Nothing is asked of the API server while nothing needs it; features can be switched while the
// process runs. What an option has left on the node is watched until it is gone: a taint, and
// DaemonSets that are paused.
func TestNeedOfWatch(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.new(config.Config{}).start()
		watches := func() int { return s.server.Requests()[apiserver.Request{Verb: "watch", Resource: "nodes"}] }
		asks := func(what string, want bool) {
			s.Helper()
			s.pass(time.Minute)
			before := s.requests()
			if s.pass(5 * time.Minute); (s.requests() > before) != want { // a watch that is silent for three is begun again
				s.Errorf("%s: %d requests in five minutes", what, s.requests()-before)
			}
		}
		asks("nothing is switched on", false)
		for name, change := range map[string]func(*config.Config){
			"labels":                func(c *config.Config) { c.Features.Labels = config.LabelsNode },
			"Events":                func(c *config.Config) { c.Features.Events = true },
			"a condition":           func(c *config.Config) { c.Features.Condition = true },
			"a taint":               func(c *config.Config) { c.Features.Taint = true },
			"the label of a layout": func(c *config.Config) { c.MIG = config.MIG{Enabled: true, Label: true} },
		} {
			p.configure(change)
			asks(name, true)
			p.Configs.Publish(config.Config{})
			asks("without "+name, false)
		}
		p.Configs.Publish(config.Config{Live: config.Live{MIG: config.MIG{Label: true, Evict: true, PauseClients: true}}})
		asks("layouts that are not changed", false)

		for what, left := range map[string]func(*corev1.Node){
			"a taint": func(n *corev1.Node) {
				n.Spec.Taints = []corev1.Taint{{Key: ourTaint, Effect: corev1.TaintEffectNoSchedule}}
			},
			"a paused DaemonSet": func(n *corev1.Node) { n.Labels = map[string]string{deployLabels + "dcgm": paused} },
			"another taint": func(n *corev1.Node) {
				n.Spec.Taints = []corev1.Taint{{Key: ourTaint, Effect: corev1.TaintEffectNoExecute}}
			},
			"a paused provider":    func(n *corev1.Node) { n.Labels = map[string]string{deployLabels + "driver": paused} },
			"a paused other":       func(n *corev1.Node) { n.Labels = map[string]string{"zone": paused} },
			"a deployed DaemonSet": func(n *corev1.Node) { n.Labels = map[string]string{deployLabels + "dcgm": deployed} },
		} {
			p.Configs.Publish(config.Config{Live: config.Live{Features: config.Features{Events: true}}})
			s.pass(time.Minute)
			s.server.SetFault(apiserver.Fault{Status: 403, Only: apiserver.Request.IsWrite}) // it is not removed
			s.change(left)
			s.pass(time.Minute)
			p.Configs.Publish(config.Config{})
			asks(what, what == "a taint" || what == "a paused DaemonSet")
			s.change(func(n *corev1.Node) { n.Spec.Taints, n.Labels = nil, nil })
			s.server.SetFault(apiserver.Fault{})
			s.pass(10 * time.Minute)
			asks("it is gone: "+what, false)
		}
		before := watches()
		p.Configs.Publish(config.Config{Live: config.Live{Features: config.Features{Events: true}}})
		p.Configs.Publish(config.Config{Live: config.Live{Features: config.Features{Events: true, Taint: true}}})
		p.Configs.Publish(config.Config{Live: config.Live{Features: config.Features{Condition: true}}})
		if s.pass(time.Minute); watches()-before != 1 || p.cluster.Problem() != nil {
			s.Errorf("%d watches; problem %v", watches()-before, p.cluster.Problem())
		}
	})
}
