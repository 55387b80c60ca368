package cluster_test

import (
	"maps"
	"strings"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig/choice"
)

// writer starts a process that writes everything, with this number of GPUs, the first one in this
// state.
func (s *stage) writer(leads bool, count, state string) *process {
	s.Helper()
	p := s.new(config.Config{Live: config.Live{Features: everything, MIG: config.MIG{Enabled: true, Label: true, PauseClients: true}}})
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
		p := s.new(config.Config{
			Startup: config.Startup{Namespace: namespace},
			Live:    config.Live{Features: everything, MIG: config.MIG{Enabled: true, Label: true, PauseClients: true}},
		})
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
