package cluster_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

const rebootKey = "gpu-device-plugin.github.io/reboot.required"

// rebooting returns a process that keeps the annotation.
func (s *stage) rebooting() *process {
	return s.new(config.Config{Features: config.Features{Reboot: true}})
}

// needs has the daemon see GPUs that only a restart cures; looked is false while it sees nothing.
func (p *process) needs(looked bool, lost ...int) {
	snapshot := inventory.Snapshot{Stale: "the driver does not answer"}
	if looked {
		snapshot = inventory.Snapshot{Driver: inventory.Driver{Version: "580.95.05"}}
	}
	for _, index := range lost {
		h := inventory.Health{State: inventory.Lost, Reason: "XID 79", Cure: inventory.CureReboot}
		snapshot.GPUs = append(snapshot.GPUs, inventory.GPU{Index: index, Health: h})
	}
	p.Snapshots.Publish(snapshot)
}

// request is the annotation.
func (s *stage) request() string { return s.node().Annotations[rebootKey] }

// asks waits until the node has a request with this reason; empty for none.
func (s *stage) asks(reason string) (since time.Time, boot string) {
	s.Helper()
	var is struct {
		Since        time.Time
		Boot, Reason string
	}
	s.until("a restart is asked for because "+reason, func() bool {
		text := s.request()
		return text == "" && reason == "" || json.Unmarshal([]byte(text), &is) == nil && is.Reason == reason
	})
	return is.Since, is.Boot
}

const lost3 = "GPU 3 is Lost: XID 79"

// The annotation is there while only a restart cures a GPU, over restarts of the process. What is not known changes nothing.
func TestRequestOfARestart(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.rebooting().start()
		if n := s.writes(func() { p.needs(true); s.pass(time.Hour) }); n != 0 || s.request() != "" {
			s.Errorf("nothing needs a restart: %d writes, %q", n, s.request())
		}
		p.needs(true, 3)
		since, boot := s.asks(lost3)
		if boot != "boot" || time.Since(since) > time.Minute {
			s.Errorf("asked for since %v of boot %q", since, boot)
		}
		p.needs(true, 3, 5)
		if more, _ := s.asks(lost3 + "; GPU 5 is Lost: XID 79"); !more.Equal(since) {
			s.Errorf("since %v, want %v", more, since)
		}
		p.needs(false)
		if n := s.writes(func() { s.pass(time.Hour) }); n != 0 {
			s.Errorf("%d writes while nothing changes", n)
		}
		p.stop() // a roll-out withdraws nothing
		next := s.rebooting().start()
		s.pass(10 * time.Minute)
		next.needs(true, 3)
		if again, _ := s.asks(lost3); !again.Equal(since) {
			s.Errorf("after a restart of the process, since %v, want %v", again, since)
		}
		next.needs(true)
		s.asks("")
		next.needs(true, 3)
		if later, _ := s.asks(lost3); !later.After(since) {
			s.Errorf("a new request is since %v", later)
		}
		next.configure(func(c *config.Config) { c.Features.Reboot = false })
		s.asks("")
		if n := s.writes(func() { next.needs(true, 3); s.pass(time.Hour) }); n != 0 {
			s.Errorf("%d writes without the option", n)
		}
	})
}

// After a restart of the node nothing is asked for, also where the driver does not come; what needs another one is a new request.
func TestRequestOfAFormerBoot(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.rebooting().start()
		p.needs(true, 3)
		since, _ := s.asks(lost3)
		p.stop()
		s.pass(time.Minute)
		next := s.rebooting()
		next.needs(false)
		next.startOn("second")
		s.asks("")
		next.needs(true, 3)
		if later, boot := s.asks(lost3); boot != "second" || !later.After(since) {
			s.Errorf("the new request is since %v of boot %q", later, boot)
		}
	})
}

// What somebody else writes there gives way to a request, and stays where there is none.
func TestRequestOfSomebodyElse(t *testing.T) {
	onStage(t, func(s *stage) {
		write := func(text string) {
			s.change(func(n *corev1.Node) {
				if n.Annotations == nil {
					n.Annotations = map[string]string{}
				}
				n.Annotations[rebootKey] = text
			})
		}
		write(`{"since":7}`)
		p := s.rebooting().start()
		p.needs(true)
		if n := s.writes(func() { s.pass(time.Hour) }); n > 1 || s.request() != `{"since":7}` {
			s.Errorf("%d writes, and it is %q", n, s.request())
		}
		p.needs(true, 3)
		s.asks(lost3)
		n := s.writes(func() {
			for range 60 { // another program undoes it each second
				write("no")
				s.pass(time.Second)
			}
		})
		if s.asks(lost3); n > 7 {
			s.Errorf("%d writes within a minute", n)
		}
		write(`{"since":"2999-01-01T00:00:00Z","boot":"boot","reason":"` + strings.Repeat("x", 3000) + `"}`)
		if since, _ := s.asks(lost3); since.After(time.Now()) {
			s.Errorf("since %v", since)
		}
	})
}

// The request waits for the API server, and is taken away when that works again.
func TestRequestAndFaultsOfTheAPIServer(t *testing.T) {
	throughFaults(t, func(s *stage, fault apiserver.NamedFault) {
		p := s.rebooting().start()
		p.needs(true)
		s.pass(time.Minute)
		s.during(fault, func() { p.needs(true, 3) })
		s.asks(lost3)
		s.during(fault, func() { p.needs(true) })
		s.asks("")
	})
}

// Of two processes the one that leads asks, and the next one that leads goes on.
func TestRequestOfTheLead(t *testing.T) {
	onStage(t, func(s *stage) {
		first, second := s.rebooting().start(), s.rebooting()
		second.leads.Publish(false)
		second.start()
		second.needs(true)
		first.needs(true, 3)
		since, _ := s.asks(lost3)
		if n := s.writes(func() { s.pass(time.Hour) }); n != 0 {
			s.Errorf("%d writes of two processes that see different things", n)
		}
		first.leads.Publish(false)
		second.needs(true, 3)
		second.leads.Publish(true)
		s.pass(time.Minute)
		if still, _ := s.asks(lost3); !still.Equal(since) {
			s.Errorf("since %v, want %v", still, since)
		}
		second.needs(true)
		s.asks("")
	})
}

// Without the right to write nothing else is missing, and the log says so once.
func TestRequestWithoutTheRight(t *testing.T) {
	onStage(t, func(s *stage) {
		s.server.SetFault(apiserver.Fault{Status: http.StatusForbidden, Only: func(r apiserver.Request) bool { return r.Verb == "apply" }})
		p := s.rebooting().start()
		p.needs(true, 3)
		s.pass(10 * time.Minute)
		if n := p.logged("Cannot talk to the API server; trying until it works"); n != 1 {
			s.Errorf("said %d times", n)
		}
		s.server.SetFault(apiserver.Fault{})
		s.asks(lost3)
	})
}
