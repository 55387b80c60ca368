package cluster_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

const quiesceKey = "gpu-device-plugin.github.io/quiesce."

// request sets the annotations of the Node that request the release of the driver; an empty time
// removes them.
func (s *stage) request(until, by string) {
	s.Helper()
	s.change(func(n *corev1.Node) {
		if n.Annotations == nil {
			n.Annotations = map[string]string{}
		}
		n.Annotations[quiesceKey+"until"], n.Annotations[quiesceKey+"by"] = until, by
		if until == "" {
			delete(n.Annotations, quiesceKey+"until")
			delete(n.Annotations, quiesceKey+"by")
		}
	})
}

// in returns the time after d in the format of the annotation.
func in(d time.Duration) string { return time.Now().Add(d).UTC().Format(time.RFC3339) }

// answered waits until the Node has this state, and returns the answer.
func (s *stage) answered(state string) string {
	s.Helper()
	s.until("the answer is "+state, func() bool { return s.node().Annotations[quiesceKey+"state"] == state })
	return s.node().Annotations[quiesceKey+"answer"]
}

// releaser returns a process that follows the annotation and does nothing yet. The test plays the
// monitor; quiet says whether the driver is released at first.
func (s *stage) releaser(quiet bool) *process {
	p := s.new(config.Config{Live: config.Live{Features: config.Features{Quiesce: true}}})
	p.status.Quiet = quiet
	p.Quiesce = func(context.Context) error { p.release(true); return nil }
	p.Resume = func(context.Context) error { p.release(false); return nil }
	return p
}

// releasing starts such a process. fails returns why the driver cannot be released; nil for a
// driver that always can.
func (s *stage) releasing(quiet bool, fails func() error) *process {
	s.Helper()
	p := s.releaser(quiet)
	if fails != nil {
		p.Quiesce = func(context.Context) error { p.release(true); return fails() }
	}
	return p.start()
}

// standby starts a process that does not lead.
func (s *stage) standby(quiet bool) *process {
	s.Helper()
	p := s.releaser(quiet)
	p.leads.Publish(false)
	return p.start()
}

// release does what the commands quiesce and resume do.
func (p *process) release(quiet bool) {
	p.set(func(s *status.Status) {
		switch s.Quiet = quiet; {
		case !quiet:
			s.Quiesced = nil
		case s.Quiesced == nil:
			s.Quiesced = &status.Quiesced{Since: time.Now()}
		}
	})
}

// follows makes a process the leader after another one.
func (p *process) follows(before *process) {
	before.leads.Publish(false)
	p.s.pass(time.Second)
	p.leads.Publish(true)
}

// unseen sets the annotations, and has the process that leads answer them with done. No process
// sees that answer of another one.
func (s *stage) unseen(until, by string) {
	s.Helper()
	s.server.SetFault(apiserver.Fault{Status: http.StatusServiceUnavailable,
		Only: func(r apiserver.Request) bool { return r.Verb == "apply" }})
	s.request(until, by)
	s.pass(time.Second)
	s.server.SetFault(apiserver.Fault{Status: http.StatusServiceUnavailable,
		Only: func(r apiserver.Request) bool { return r.Verb == "list" || r.Verb == "watch" }})
	s.server.DropWatches()
	s.answered("done")
}

func (p *process) quiet() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.status.Quiet
}

func (p *process) becomes(quiet bool) {
	p.s.Helper()
	p.s.until("the driver is released or not", func() bool { return p.quiet() == quiet })
}

// A request is carried out and answered. It ends when it is removed, and at its time.
func TestReleaseRequest(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.releasing(false, nil)
		s.pass(time.Minute)
		if p.quiet() || s.node().Annotations[quiesceKey+"state"] != "" {
			s.Errorf("without a request: %v", s.node().Annotations)
		}
		until := in(time.Hour)
		s.request(until, "kured")
		if answer := s.answered("done"); !p.quiet() || !strings.Contains(answer, `"by":"kured"`) ||
			!strings.Contains(answer, `"until":"`+until+`"`) || !strings.Contains(answer, `"since":`) {
			s.Errorf("done: %v, %s", p.quiet(), answer)
		}
		s.request("", "")
		s.until("the answer goes with the request", func() bool { return s.node().Annotations[quiesceKey+"state"] == "" })
		p.becomes(false)
		s.request(in(10*time.Minute), "script")
		s.answered("done")
		s.pass(9 * time.Minute)
		if !p.quiet() {
			s.Error("it ended early")
		}
		s.pass(2 * time.Minute)
		if s.answered("ended"); p.quiet() {
			s.Error("the time has passed, and the driver is released")
		}
		if n := s.writes(func() { s.pass(3 * time.Hour) }); n > 0 {
			s.Errorf("%d writes while nothing changes", n)
		}
		s.request(in(time.Hour), "script") // another time is another request
		s.answered("done")
		s.request(in(2*time.Hour), "script") // and so is a longer one
		s.until("it is longer", func() bool {
			return strings.Contains(s.node().Annotations[quiesceKey+"answer"], in(2 * time.Hour)[:13])
		})
		s.pass(90 * time.Minute)
		if !p.quiet() {
			s.Error("the first time counts still")
		}
		p.configure(func(c *config.Config) { c.Features.Quiesce = false })
		p.becomes(false)
	})
}

// An invalid request is refused with a reason. The last valid request stays in force until its
// time.
func TestInvalidReleaseRequest(t *testing.T) {
	t.Run("garbage", func(t *testing.T) {
		onStage(t, func(s *stage) {
			const until, want = "tomorrow \x01\n", "is not a time such as"
			p := s.releasing(false, nil)
			s.request(until, strings.Repeat("x", 5000))
			if answer := s.answered("refused"); !strings.Contains(answer, want) || len(answer) > 1000 || p.quiet() {
				s.Errorf("refused: %s", answer)
			}
			s.request(in(time.Hour), "a")
			s.answered("done")
			s.request(until, "a")
			s.until("the sentence", func() bool { return strings.Contains(s.node().Annotations[quiesceKey+"answer"], want) })
			if s.answered("done"); !p.quiet() {
				s.Error("a mistake has ended the request in force")
			}
			s.pass(2 * time.Hour)
			if s.answered("refused"); p.quiet() {
				s.Error("it never ends")
			}
		})
	})
	t.Run("past", func(t *testing.T) {
		onStage(t, func(s *stage) {
			p := s.releasing(false, nil)
			s.request(in(-time.Second), "a")
			if answer := s.answered("ended"); !strings.Contains(answer, "had passed") || p.quiet() {
				s.Errorf("ended: %s", answer)
			}
		})
	})
}

// A failing release is retried, and the Node has the reason. The command resume on the node ends
// the request.
func TestFailingRelease(t *testing.T) {
	onStage(t, func(s *stage) {
		fail := errors.New("nvmlShutdown does not return")
		p := s.releasing(false, func() error { return fail })
		s.request(in(time.Hour), "a")
		s.until("why not", func() bool { return strings.Contains(s.node().Annotations[quiesceKey+"answer"], "does not return") })
		s.answered("pending")
		fail = nil
		s.answered("done")
		p.set(func(s *status.Status) { s.Quiet = false }) // gpu-device-plugin resume
		if answer := s.answered("resumed"); !strings.Contains(answer, "resume was run") {
			s.Errorf("resumed: %s", answer)
		}
		s.pass(2 * time.Hour)
		if p.quiet() {
			s.Error("it was released again")
		}
	})
}

// A user has released the driver on the node before, and continues.
func TestReleaseRequestWhileReleased(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.releasing(true, nil)
		s.request(in(time.Minute), "a")
		s.answered("done")
		s.pass(2 * time.Minute)
		if s.answered("ended"); !p.quiet() {
			s.Error("the driver is in use, although quiesce was said on the node")
		}
	})
}

// TestReleaseRequestDuringAChangeOfTheDriver: the request takes the release over, and the driver is used
// again at its end.
func TestReleaseRequestDuringAChangeOfTheDriver(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.releaser(true)
		p.status.Quiesced = &status.Quiesced{Since: time.Now(), ForChange: true}
		p.Quiesce = func(context.Context) error {
			p.set(func(s *status.Status) { s.Quiet, s.Quiesced = true, &status.Quiesced{Since: time.Now()} })
			return nil
		}
		p.start()
		s.request(in(time.Hour), "kured")
		s.answered("done")
		s.pass(30 * time.Minute)
		if !p.quiet() {
			t.Error("the driver is used before the end of the request")
		}
		s.answered("ended")
		s.until("the driver is used again", func() bool { return !p.quiet() })
	})
}

// After a kill at any moment the next process continues with the request, with and without a state
// directory.
func TestReleaseThroughRestarts(t *testing.T) {
	for name, quiet := range map[string]bool{"the release outlives it": true, "without a state directory": false} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				p := s.releasing(false, nil)
				s.request(in(time.Hour), "a")
				s.answered("done")
				p.stop()
				next := s.releasing(quiet, nil)
				next.becomes(true)
				s.pass(30 * time.Minute)
				if s.answered("done"); !next.quiet() {
					s.Error("the next process does not go on")
				}
				next.stop()
				s.pass(time.Hour) // its time passes while nobody runs
				last := s.releasing(quiet, nil)
				s.answered("ended")
				last.becomes(false)
			})
		})
	}
	t.Run("killed before the release", func(t *testing.T) {
		onStage(t, func(s *stage) {
			p := s.releasing(false, func() error { return errors.New("killed") })
			s.request(in(time.Hour), "a")
			s.answered("pending")
			p.stop()
			next := s.releasing(true, nil) // it was asked of the monitor, whose file says so
			s.answered("done")
			s.request("", "")
			next.becomes(false)
		})
	})
}

// A request ends at its time whatever the API server does. The Node is updated later, and a new
// request waits.
func TestReleaseThroughFaults(t *testing.T) {
	throughFaults(t, func(s *stage, fault apiserver.NamedFault) {
		p := s.releasing(false, nil)
		s.request(in(10*time.Minute), "a")
		s.answered("done")
		s.during(fault, func() {
			s.pass(11 * time.Minute)
			if p.quiet() {
				s.Error("the time has passed, and the driver is released")
			}
		})
		s.answered("ended")
		s.during(fault, func() { s.request(in(5*time.Hour), "b") })
		s.answered("done")
		p.becomes(true)
	})
}

// Only the leader carries out a request. The next leader continues and ends it, and so does the
// previous one if it leads again.
func TestReleaseByLeader(t *testing.T) {
	onStage(t, func(s *stage) {
		first, second := s.releasing(false, nil), s.standby(false)
		s.request(in(time.Hour), "a")
		s.answered("done")
		if s.pass(time.Minute); second.quiet() {
			s.Error("the standby obeys, too")
		}
		second.follows(first)
		second.becomes(true)
		s.pass(2 * time.Hour)
		if s.answered("ended"); second.quiet() || !first.quiet() {
			s.Errorf("released: %t in the one that leads, %t in the standby", second.quiet(), first.quiet())
		}
		first.follows(second)
		first.becomes(false)
		if n := s.writes(func() { s.pass(10 * time.Minute) }); n > 0 || first.quiet() {
			s.Errorf("%d writes, and the driver is released: %t", n, first.quiet())
		}
	})
}

// A process that leads again uses the driver if another process has ended the request, even if its
// own release was in progress at the end of its term; but not during another request, and not after
// the command quiesce.
func TestReleaseByPreviousLeader(t *testing.T) {
	ended := func(s *stage, first *process) *process {
		second := s.standby(false)
		s.request(in(time.Hour), "a")
		first.becomes(true)
		second.follows(first)
		second.becomes(true)
		s.request("", "")
		second.becomes(false)
		return second
	}
	t.Run("a release under way", func(t *testing.T) {
		onStage(t, func(s *stage) {
			first := s.releaser(false)
			first.Quiesce = func(ctx context.Context) error { first.release(true); <-ctx.Done(); return ctx.Err() }
			second := ended(s, first.start())
			first.follows(second)
			first.becomes(false)
		})
	})
	t.Run("another request", func(t *testing.T) {
		onStage(t, func(s *stage) {
			first, resumed := s.releaser(false), false
			first.Resume = func(context.Context) error { resumed = true; first.release(false); return nil }
			second := ended(s, first.start())
			s.unseen(in(5*time.Hour), "b")
			first.follows(second)
			if s.pass(time.Minute); resumed || !first.quiet() {
				s.Error("the driver is in use, although the node says that it is released")
			}
			s.server.SetFault(apiserver.Fault{})
			s.request("", "")
			first.becomes(false)
		})
	})
	t.Run("quiesce on the node", func(t *testing.T) {
		onStage(t, func(s *stage) {
			first := s.releasing(false, nil)
			second := ended(s, first)
			first.release(false)
			s.pass(time.Minute)
			first.release(true)
			first.follows(second)
			if s.pass(10 * time.Minute); !first.quiet() {
				s.Error("the driver is in use, although quiesce was said on the node")
			}
		})
	})
}

// A process that missed the start of a request by another process continues from the state on the
// Node: its own write is rejected. It found the driver released at its start.
func TestReleaseStartedByAnotherProcess(t *testing.T) {
	onStage(t, func(s *stage) {
		first, second := s.releasing(false, nil), s.standby(true)
		s.pass(time.Minute)
		s.unseen(in(time.Hour), "a")
		second.follows(first)
		s.pass(time.Minute)
		s.server.SetFault(apiserver.Fault{})
		s.request("", "")
		second.becomes(false)
	})
}

// A process without the option uses the driver again, even if it may not write the answer.
func TestReleaseAfterOptionRemoved(t *testing.T) {
	for name, may := range map[string]bool{"with the right": true, "without the right": false} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				p := s.releasing(false, nil)
				s.request(in(time.Hour), "a")
				s.answered("done")
				p.stop()
				if !may {
					s.server.SetFault(apiserver.Fault{Status: http.StatusForbidden,
						Only: func(r apiserver.Request) bool { return r.Verb == "apply" }})
				}
				next := s.releaser(true)
				next.configure(func(c *config.Config) { c.Features = config.Features{Condition: true} })
				next.start()
				next.becomes(false)
				s.pass(10 * time.Minute)
				if state := s.node().Annotations[quiesceKey+"state"]; may && state != "" || next.quiet() {
					s.Errorf("the state is %q, and the driver released: %t", state, next.quiet())
				}
			})
		})
	}
}

// Without the option nothing is read, released or written.
func TestReleaseDisabled(t *testing.T) {
	onStage(t, func(s *stage) {
		s.request(in(time.Hour), "a")
		p := s.new(config.Config{Live: config.Live{Features: config.Features{Condition: true}}}).start()
		p.gpus()
		s.pass(10 * time.Minute)
		if s.node().Annotations[quiesceKey+"state"] != "" {
			s.Errorf("answered: %v", s.node().Annotations)
		}
	})
}

// After the command resume, the next process also keeps using the driver, for a requester with any
// name.
func TestReleaseRequestWithLongName(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.releasing(false, nil)
		s.request(in(time.Hour), "x"+strings.Repeat("é", 150))
		s.answered("done")
		p.set(func(s *status.Status) { s.Quiet = false }) // gpu-device-plugin resume
		s.answered("resumed")
		p.stop()
		next := s.releasing(false, nil)
		s.pass(10 * time.Minute)
		if s.answered("resumed"); next.quiet() {
			s.Error("the driver is released again")
		}
	})
}
