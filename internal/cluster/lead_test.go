package cluster_test

import (
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig/choice"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// writer starts a process that writes everything, with this number of GPUs, the first one in this
// state.
func (s *stage) writer(leads bool, count, state string) *process {
	s.Helper()
	p := s.new(config.Config{Features: everything, MIG: config.MIG{Enabled: true, Label: true, PauseClients: true}})
	p.configure(func(c *config.Config) { c.Features.Labels = config.LabelsNode })
	p.MIGChoice = choice.New(s.Context(), p.Configs, s.TempDir(), func() error { return nil }, undivided,
		clock.RealClock{})
	p.MIG = feed.New(mig.Status{Resume: true})
	p.leads.Publish(leads)
	p.label(map[string]string{countLabel: count})
	p.gpus(gpu(0, state))
	return p.start()
}

// Only the leader of two processes writes. A new leader writes its own state. A second term starts
// again, and reports nothing twice.
func TestWritesByLeader(t *testing.T) {
	onStage(t, func(s *stage) {
		s.layoutLabel("all-balanced")
		first, second := s.writer(true, "1", good), s.writer(false, "2", bad)
		shows := func(count, condition string, tainted bool) func() bool {
			return func() bool {
				return s.node().Labels[countLabel] == count && strings.HasPrefix(s.condition(), condition) && s.tainted() == tainted
			}
		}
		s.until("what the first one knows", shows("1", "True", false))
		s.untilSays(notYet)
		if n := s.writes(func() {
			s.pass(10 * time.Minute)
			second.gpus(gpu(0, gone))
			second.label(map[string]string{countLabel: "3"})
			s.pass(10 * time.Minute)
		}); n != 0 || second.reads() > 0 {
			s.Errorf("%d writes, and %d readings of the status, of a process that does not lead", n, second.reads())
		}
		first.leads.Publish(false)
		second.leads.Publish(true)
		s.until("what the second one knows", shows("3", "False GPULost", true))
		if n := s.writes(func() {
			first.gpus(gpu(0, bad))
			first.label(map[string]string{countLabel: "4"})
			s.pass(10 * time.Minute)
		}); n != 0 {
			s.Errorf("%d writes by a process that led before", n)
		}
		events := s.events()
		for range 3 {
			second.leads.Publish(false)
			s.pass(time.Minute)
			if n := s.writes(func() { second.leads.Publish(true); s.pass(10 * time.Minute) }); n != 0 ||
				!maps.Equal(events, s.events()) {
				s.Errorf("%d writes in another term; Events %v, before %v", n, s.events(), events)
			}
		}
	})
}

// A stopped process that does not know about its successor writes nothing.
func TestStoppedProcess(t *testing.T) {
	onStage(t, func(s *stage) {
		s.layoutLabel("all-balanced")
		s.deploy(map[string]string{"dcgm": paused})
		p := s.new(config.Config{Namespace: namespace, Features: everything,
			MIG: config.MIG{Enabled: true, Label: true, PauseClients: true}})
		p.MIGChoice = choice.New(s.Context(), p.Configs, s.TempDir(), func() error { return nil }, undivided,
			clock.RealClock{})
		p.MIG = feed.New(mig.Status{Resume: true})
		p.Lead = lead.New(lead.Options{Dir: s.TempDir()}) // it has none of the folder's
		p.label(map[string]string{countLabel: "8"})
		p.gpus(gpu(0, bad))
		p.start()
		for _, way := range []config.LabelsOutput{config.LabelsNode, config.LabelsNodeFeature} {
			p.configure(func(c *config.Config) { c.Features.Labels = way })
			s.pass(10 * time.Minute)
		}
		if err := p.cluster.Evict(s.Context(), mig.Pod{Namespace: "ns", Name: "p", UID: "u"}); err == nil {
			s.Error("a pod was evicted")
		}
		if n := s.server.Writes(); n != 0 {
			s.Errorf("%d writes: %v", n, s.server.Requests())
		}
	})
}

// A late write of the previous leader is rejected, because the Node has a newer version. The same
// applies to a write after a change by any program; it is repeated.
func TestLateWrite(t *testing.T) {
	for name, request := range map[string]apiserver.Request{
		"condition": {Verb: "patch", Resource: "nodes/status"}, "labels": {Verb: "apply",
			Resource: "nodes"}, "taint": {Verb: "patch", Resource: "nodes"},
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				p := s.new(config.Config{Features: everything})
				p.configure(func(c *config.Config) { c.Features.Labels = config.LabelsNode })
				p.label(map[string]string{countLabel: "1"})
				p.gpus(gpu(0, good))
				p.start()
				s.untilCondition("True")
				s.until("labelled", func() bool { return s.node().Labels[countLabel] == "1" })
				s.pass(10 * time.Minute)
				s.server.SetFault(apiserver.Fault{Delay: 20 * time.Second,
					Only: func(r apiserver.Request) bool { return r == request }})
				before := s.server.Requests()[request]
				p.label(map[string]string{countLabel: "2"})
				p.gpus(gpu(0, bad))
				s.until("the write is under way", func() bool { return s.server.Requests()[request] > before })
				s.change(func(n *corev1.Node) { n.Annotations = map[string]string{"changed": "since"} })
				s.pass(21 * time.Second)
				is := map[string]bool{
					"condition": strings.HasPrefix(s.condition(), "False"), "labels": s.node().Labels[countLabel] == "2",
					"taint": s.tainted(),
				}
				if is[name] {
					s.Errorf("the late write was taken: %v", is)
				}
				s.server.SetFault(apiserver.Fault{})
				s.untilCondition("False")
				s.until("all is written", func() bool { return s.tainted() && s.node().Labels[countLabel] == "2" })
				if d := cmp.Diff(map[string]string{"changed": "since"}, s.node().Annotations); d != "" {
					s.Errorf("(-want +got):\n%s", d)
				}
			})
		})
	}
}
