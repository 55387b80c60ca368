package cluster_test

import (
	"context"
	"errors"
	"maps"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

const (
	pluginLabel = deployLabels + "device-plugin"
	clientLabel = deployLabels + "client"
	forDriver   = "paused-for-driver-upgrade"
	forMIG      = "paused-for-mig-change"
)

// paused sets both labels of the Node by which the tools of NVIDIA's operator pause clients.
func (s *stage) paused(value string) {
	s.Helper()
	s.relabel(map[string]string{pluginLabel: value, clientLabel: value})
}

// relabel sets labels of the Node, and no others.
func (s *stage) relabel(labels map[string]string) {
	s.Helper()
	s.change(func(n *corev1.Node) { n.Labels = maps.Clone(labels) })
}

// What each value of the labels means. The driver is released for as long as a label says so, and
// the answer names the label.
func TestReleaseByLabel(t *testing.T) {
	for name, tt := range map[string]struct {
		labels        map[string]string
		pausesClients bool   // by this program itself, for a MIG layout
		by            string // empty: the driver stays in use
	}{
		"no label": {},
		"in use":   {labels: map[string]string{pluginLabel: "true", clientLabel: "true"}},
		"by driver-manager": {labels: map[string]string{pluginLabel: forDriver, clientLabel: forDriver},
			by: pluginLabel + "=" + forDriver},
		"by mig-manager": {labels: map[string]string{pluginLabel: forMIG, clientLabel: forMIG},
			by: pluginLabel + "=" + forMIG},
		"an operator before 26.7": {labels: map[string]string{pluginLabel: forDriver}, by: pluginLabel + "=" + forDriver},
		"the plugin alone": {labels: map[string]string{pluginLabel: forDriver, clientLabel: "true"},
			by: pluginLabel + "=" + forDriver},
		"the clients alone": {labels: map[string]string{pluginLabel: "true", clientLabel: forDriver},
			by: clientLabel + "=" + forDriver},
		"the plugin kept away, and the clients paused": {
			labels: map[string]string{pluginLabel: "false", clientLabel: forDriver}, by: clientLabel + "=" + forDriver},
		"two reasons": {labels: map[string]string{pluginLabel: forMIG, clientLabel: forDriver},
			by: pluginLabel + "=" + forMIG},
		"by driver-manager during a pause by mig-manager": {
			labels: map[string]string{pluginLabel: forMIG + "_" + forDriver}, by: pluginLabel + "=" + forMIG + "_" + forDriver},
		"behind a value of the cluster's own": {labels: map[string]string{clientLabel: "gpu_" + forDriver},
			by: clientLabel + "=gpu_" + forDriver},
		"a reason of another tool": {labels: map[string]string{pluginLabel: "paused-for-gpu-reset"},
			by: pluginLabel + "=paused-for-gpu-reset"},
		"empty, which driver-manager writes where there is none": {
			labels: map[string]string{pluginLabel: "", clientLabel: ""}},
		"NVIDIA's plugin is kept away for good": {
			labels: map[string]string{pluginLabel: "false", clientLabel: "false"}},
		"unknown": {
			labels: map[string]string{pluginLabel: "maybe", clientLabel: "paused"}},
		"another operand": {
			labels: map[string]string{deployLabels + "dcgm": forDriver, pluginLabel: "true"}},
		"this program's own pause": {
			labels: map[string]string{pluginLabel: forMIG, clientLabel: forMIG}, pausesClients: true},
		"driver-manager's, beside this program's own": {
			labels: map[string]string{pluginLabel: forDriver, clientLabel: forMIG}, pausesClients: true,
			by: pluginLabel + "=" + forDriver},
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				p := s.releaser(false)
				p.configure(func(c *config.Config) { c.MIG.PauseClients = tt.pausesClients })
				p.start()
				s.relabel(tt.labels)
				if tt.by == "" {
					if s.pass(time.Minute); p.quiet() || s.node().Annotations[quiesceKey+"state"] != "" {
						s.Errorf("released: %v, %v", p.quiet(), s.node().Annotations)
					}
					return
				}
				if answer := s.answered("done"); !p.quiet() || !strings.Contains(answer, `"by":"`+tt.by+`"`) ||
					strings.Contains(answer, `"until"`) {
					s.Errorf("released: %v, %s", p.quiet(), answer)
				}
				if n := s.writes(func() { s.pass(48 * time.Hour) }); n > 0 || !p.quiet() {
					s.Errorf("%d writes in two days, and the driver is released: %v", n, p.quiet())
				}
				s.paused("true")
				s.until("the answer goes with the pause", func() bool { return s.node().Annotations[quiesceKey+"state"] == "" })
				p.becomes(false)
			})
		})
	}
	t.Run("without the option", func(t *testing.T) {
		onStage(t, func(s *stage) {
			p := s.releaser(false)
			p.configure(func(c *config.Config) { c.Features = config.Features{Condition: true} })
			p.start()
			s.paused(forDriver)
			if s.pass(10 * time.Minute); p.quiet() || s.node().Annotations[quiesceKey+"state"] != "" {
				s.Errorf("released: %v, %v", p.quiet(), s.node().Annotations)
			}
		})
	})
}

// A user releases the driver, or uses it, beside a pause: the user's word counts.
func TestPauseBesideUser(t *testing.T) {
	t.Run("quiesce before", func(t *testing.T) {
		onStage(t, func(s *stage) {
			p := s.releasing(true, nil)
			s.paused(forDriver)
			s.answered("done")
			s.paused("true")
			s.until("the answer goes with the pause", func() bool { return s.node().Annotations[quiesceKey+"state"] == "" })
			if s.pass(time.Minute); !p.quiet() {
				s.Error("the driver is in use, although quiesce was said on the node")
			}
		})
	})
	t.Run("resume meanwhile", func(t *testing.T) {
		onStage(t, func(s *stage) {
			p := s.releasing(false, nil)
			s.paused(forDriver)
			s.answered("done")
			p.release(false) // gpu-device-plugin resume
			s.answered("resumed")
			if s.pass(time.Hour); p.quiet() {
				s.Error("it was released again")
			}
			s.paused("true")
			s.pass(time.Minute)
			s.paused(forDriver) // driver-manager begins again
			s.answered("done")
			p.becomes(true)
		})
	})
}

// A label and the annotation: the driver is released until both have ended.
func TestPauseBesideAnnotation(t *testing.T) {
	for name, tt := range map[string]struct {
		during func(*stage, *process) // the pause
		after  string                 // the state when the pause has ended; empty for no request
		quiet  bool
	}{
		"goes on":                {func(*stage, *process) {}, "done", true},
		"is removed meanwhile":   {func(s *stage, _ *process) { s.wish("", "") }, "", false},
		"its time has passed":    {func(s *stage, _ *process) { s.pass(2 * time.Hour) }, "ended", false},
		"is invalid now":         {func(s *stage, _ *process) { s.wish("tomorrow", "a") }, "refused", false},
		"is of another time now": {func(s *stage, _ *process) { s.wish(in(5*time.Hour), "b") }, "done", true},
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				p, used := s.releaser(false), false
				p.Resume = func(context.Context) error { used = true; p.release(false); return nil }
				p.start()
				s.wish(in(time.Hour), "a")
				s.answered("done")
				s.paused(forDriver)
				s.until("the answer is about the label", func() bool {
					return strings.Contains(s.node().Annotations[quiesceKey+"answer"], forDriver)
				})
				tt.during(s, p)
				s.pass(time.Minute)
				if !p.quiet() || used {
					s.Error("the driver was in use during the pause")
				}
				s.paused("true")
				s.until("the pause has ended", func() bool {
					return s.node().Annotations[quiesceKey+"state"] == tt.after &&
						!strings.Contains(s.node().Annotations[quiesceKey+"answer"], forDriver)
				})
				if s.pass(time.Minute); p.quiet() != tt.quiet || used == tt.quiet {
					s.Errorf("released: %v, and the driver was in use: %v", p.quiet(), used)
				}
			})
		})
	}
	t.Run("was ended by resume", func(t *testing.T) {
		onStage(t, func(s *stage) {
			p := s.releasing(false, nil)
			s.wish(in(5*time.Hour), "a")
			s.answered("done")
			p.release(false) // gpu-device-plugin resume
			s.answered("resumed")
			for range 2 { // driver-manager tries twice
				s.paused(forDriver)
				s.answered("done")
				s.paused("true")
				s.answered("resumed")
				p.becomes(false)
			}
			s.wish(in(6*time.Hour), "a") // another time is another wish
			s.answered("done")
			p.becomes(true)
		})
	})
}

// After a kill at any moment the next process goes on with the pause, and ends it if the tool has
// meanwhile.
func TestPauseThroughRestarts(t *testing.T) {
	for name, quiet := range map[string]bool{"the release outlives it": true, "without a state directory": false} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				p := s.releasing(false, func() error { return errors.New("killed") })
				s.paused(forDriver)
				s.answered("pending")
				p.stop()
				next := s.releasing(quiet, nil)
				s.answered("done")
				next.becomes(true)
				next.stop()
				next = s.releasing(quiet, nil)
				if s.pass(time.Hour); !next.quiet() {
					s.Error("the next process does not go on")
				}
				next.stop()
				s.paused("true") // while nobody runs
				last := s.releasing(quiet, nil)
				s.until("the answer goes with the pause", func() bool { return s.node().Annotations[quiesceKey+"state"] == "" })
				last.becomes(false)
			})
		})
	}
}

// Of two processes the leader releases the driver. The other one, which leads next, goes on, and
// both use the driver in the end.
func TestPauseByLeader(t *testing.T) {
	onStage(t, func(s *stage) {
		first, second := s.releasing(false, nil), s.standby(false)
		s.paused(forDriver)
		s.answered("done")
		if s.pass(time.Minute); second.quiet() {
			s.Error("the standby obeys, too")
		}
		second.follows(first)
		second.becomes(true)
		s.paused("true")
		second.becomes(false)
		first.follows(second)
		first.becomes(false)
	})
}
