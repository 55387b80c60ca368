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

// The driver is released for as long as a label says so, and the answer names the label. Without the
// option, the label has no effect.
func TestReleaseByLabel(t *testing.T) {
	for name, on := range map[string]bool{"with the option": true, "without the option": false} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				p := s.releaser(false)
				p.configure(func(c *config.Config) { c.Features = config.Features{Condition: true, Quiesce: on} })
				p.start()
				s.paused(forDriver)
				if !on {
					if s.pass(10 * time.Minute); p.quiet() || s.node().Annotations[quiesceKey+"state"] != "" {
						s.Errorf("released: %v, %v", p.quiet(), s.node().Annotations)
					}
					return
				}
				if answer := s.answered("done"); !p.quiet() || strings.Contains(answer, `"until"`) ||
					!strings.Contains(answer, `"by":"`+pluginLabel+"="+forDriver+`"`) {
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

// A pause ends while an attempt to release the driver fails, as in a change of the driver: the
// monitor would release the driver later, and so the driver is used again.
func TestPauseEndsDuringFailingRelease(t *testing.T) {
	onStage(t, func(s *stage) {
		p, ended := s.releaser(false), make(chan struct{})
		p.Quiesce = func(context.Context) error {
			p.release(true)
			<-ended
			return errors.New("nvmlEventSetFree: ERROR_DRIVER_NOT_LOADED")
		}
		p.start()
		s.paused(forDriver)
		p.becomes(true)
		s.paused("true")
		s.pass(time.Second) // the process has the new label
		close(ended)
		p.becomes(false)
		s.until("the answer goes with the pause", func() bool { return s.node().Annotations[quiesceKey+"state"] == "" })
	})
}

// The attempt to use the driver again fails at the end of a pause: it is repeated until the monitor
// has the request, and the answer stays until then. A user who runs quiesce meanwhile is obeyed.
func TestFailingResume(t *testing.T) {
	for name, tt := range map[string]struct {
		resume func(ctx context.Context, p *process, attempt int)
		quiet  bool
		want   int // attempts
	}{
		"is repeated":    {func(_ context.Context, p *process, attempt int) { p.release(attempt < 3) }, false, 3},
		"is carried out": {func(_ context.Context, p *process, _ int) { p.release(false) }, false, 1},
		"quiesce meanwhile": {func(ctx context.Context, p *process, _ int) {
			p.release(false)
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
			p.release(true)
		}, true, 1},
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				p, attempts := s.releaser(false), 0
				p.Resume = func(ctx context.Context) error {
					attempts++
					tt.resume(ctx, p, attempts)
					return errors.New("the monitor does not respond")
				}
				p.start()
				s.paused(forDriver)
				s.answered("done")
				s.pass(time.Second)
				s.paused("true")
				s.until("the answer goes with the pause", func() bool {
					state := s.node().Annotations[quiesceKey+"state"]
					if state == "" && attempts < tt.want {
						s.Error("the answer has gone before the request was carried out")
					}
					return state == ""
				})
				if s.pass(time.Hour); p.quiet() != tt.quiet || attempts != tt.want {
					s.Errorf("released: %v after %d attempts, want %v after %d", p.quiet(), attempts, tt.quiet, tt.want)
				}
			})
		})
	}
}

// A pause begins while the attempt to use the driver again fails at the end of the previous pause:
// the driver is released again, and is used at the end of the second pause.
func TestPauseBeginsDuringFailingResume(t *testing.T) {
	onStage(t, func(s *stage) {
		p, failing, begun := s.releaser(false), make(chan struct{}), make(chan struct{})
		p.Resume = func(context.Context) error {
			p.release(false)
			select {
			case <-begun:
				return nil
			default:
			}
			close(failing)
			<-begun
			return errors.New("nvmlInit: ERROR_DRIVER_NOT_LOADED")
		}
		p.start()
		s.paused(forDriver)
		s.answered("done")
		s.pass(time.Second)
		s.paused("true")
		<-failing
		s.paused(forDriver)
		s.pass(time.Second) // the process has the new label
		close(begun)
		p.becomes(true)
		s.answered("done")
		s.pass(time.Minute)
		s.paused("true")
		p.becomes(false)
		s.until("the answer goes with the pause", func() bool { return s.node().Annotations[quiesceKey+"state"] == "" })
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
		"is removed meanwhile":   {func(s *stage, _ *process) { s.request("", "") }, "", false},
		"its time has passed":    {func(s *stage, _ *process) { s.pass(2 * time.Hour) }, "ended", false},
		"is invalid now":         {func(s *stage, _ *process) { s.request("tomorrow", "a") }, "refused", false},
		"is of another time now": {func(s *stage, _ *process) { s.request(in(5*time.Hour), "b") }, "done", true},
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				p, used := s.releaser(false), false
				p.Resume = func(context.Context) error { used = true; p.release(false); return nil }
				p.start()
				s.request(in(time.Hour), "a")
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
			s.request(in(5*time.Hour), "a")
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
			s.request(in(6*time.Hour), "a") // another time is another request
			s.answered("done")
			p.becomes(true)
		})
	})
}
