package daemon

import (
	"context"
	"flag"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	told "github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// stopped is how long TestOneDecides stops a process.
var stopped = flag.Duration("stopped", 20*time.Second, "how long a process that leads is stopped; make nightly stops it for 5 minutes")

// mostSilence is how long nobody decides at most after a process that did is silent, for 12 s, on a
// machine that is slow.
const mostSilence = time.Minute

// join starts another process of a program on the node, or of that of the first one if it is empty,
// with its state. The API server knows what it writes by its name.
func (c *claimable) join(name, program string) *stage {
	c.t.Helper()
	kubeconfig, err := c.api.KubeconfigAs(name)
	if err != nil {
		c.t.Fatal(err)
	}
	folders := []string{"--state-dir", c.Path("state"), "--cdi-dir", c.Path("cdi")}
	s := c.beside(c.Profile, slices.Concat(folders, c.Args, []string{"--kubeconfig", kubeconfig})...)
	if program != "" {
		s.Daemon = program
	}
	s.start()
	return s
}

// leads reports whether the process says that it leads.
func (s *stage) leads() bool {
	ctx, cancel := context.WithTimeout(s.t.Context(), time.Second)
	defer cancel()
	var now struct {
		Lead struct {
			This bool `json:"this"`
		} `json:"lead"`
	}
	return control.Call(ctx, s.ControlSocket(), "status", nil, &now) == nil && now.Lead.This
}

// loaded has pods with claims come and go until the test ends, and returns what ends them. It fails
// if a GPU is given to two of them.
func (c *claimable) loaded() (end func()) {
	c.callLimit = 5 * time.Second // kubelet waits for 45 s, also for a process that is stopped
	ctx, stop := context.WithCancel(c.t.Context())
	var workers sync.WaitGroup
	for i := range 4 {
		workers.Go(func() { c.load(ctx, i) })
	}
	end = sync.OnceFunc(func() { stop(); workers.Wait() })
	c.t.Cleanup(end)
	return end
}

// serves waits until more pods have got a GPU by a claim.
func (c *claimable) serves() {
	c.t.Helper()
	before := c.counted("claim")
	c.eventually("pods with claims", func() bool { return c.counted("claim") >= before+10 })
}

// onlyWrites has a GPU fail in these processes, and waits until the API server knows: the process
// with that name has told it, and no other one.
func (c *claimable) onlyWrites(name string, gpu int, processes ...*stage) {
	c.t.Helper()
	mark := len(c.api.Writers())
	for _, p := range processes {
		p.inject(simulator.Fault{Kind: simulator.KindXID, GPU: fmt.Sprint(gpu), XID: 64})
	}
	device := fmt.Sprintf("gpu-%d", gpu)
	c.eventually(device+" is not for new claims", func() bool { return c.devices()[device] == "" })
	for _, by := range c.api.Writers()[mark:] {
		if by != name {
			c.t.Errorf("%q writes while %q leads", by, name)
		}
	}
}

// terms returns in which order processes wrote, each once in a row.
func (c *claimable) terms() []string { return slices.Compact(c.api.Writers()) }

// TestOneDecides: of three processes, the one that started last leads. When it is killed or
// stopped, another one does within 15 s; when it goes on, it leads again. Meanwhile pods with
// claims come and go: no GPU is given to two of them, and no object is written by two processes.
func TestOneDecides(t *testing.T) {
	t.Parallel()
	for name, sig := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "stopped": syscall.SIGSTOP} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newClaimable(t, "dra", "--node-events", "--node-condition")
			c.published(8)
			second := c.join("second", nodeAgent)
			c.eventually("the second one leads", second.leads)
			last := c.join("last", nodeAgent)
			c.eventually("the last one leads alone", func() bool { return last.leads() && !second.leads() && !c.leads() })
			end := c.loaded()
			c.serves()
			c.onlyWrites("last", 0, c.stage, second, last)

			began := time.Now()
			d := last.Running()
			c.signal(d, sig)
			defer func() { _ = d.Signal(syscall.SIGCONT) }()
			c.eventually("another one leads", func() bool { return c.leads() || second.leads() })
			if took := time.Since(began); took > mostSilence {
				t.Errorf("nobody leads for %v", took)
			}
			t.Logf("nobody led for %v", time.Since(began).Round(time.Millisecond))
			c.eventually("the second one leads: it started later", func() bool { return second.leads() && !c.leads() })
			c.serves()
			c.onlyWrites("second", 1, c.stage, second)
			if sig == syscall.SIGSTOP {
				pause(t.Context(), *stopped-time.Since(began))
				c.serves()
				c.signal(last.Running(), syscall.SIGCONT)
				c.eventually("the last one leads again", func() bool { return last.leads() && !second.leads() })
				c.serves()
				c.onlyWrites("last", 2, c.stage, second, last)
			} else {
				<-last.Running().Ended()
				_ = last.StopDaemon() // it was killed
			}
			end()
			terms := c.terms()
			t.Logf("written in turn by %q; %d pods with claims, %d refused", terms, c.counted("claim"), len(c.refused))
			for _, by := range []string{"", "second", "last"} {
				if n := len(slices.DeleteFunc(slices.Clone(terms), func(other string) bool { return other != by })); n > 2 {
					t.Errorf("%q wrote at %d times", by, n)
				}
			}
		})
	}
}

// TestAStandbyWithoutAStateDirectory can have no part in Dynamic Resource Allocation, and gives out
// no GPU that is in a slice, neither as a standby nor when it leads.
func TestAStandbyWithoutAStateDirectory(t *testing.T) {
	t.Parallel()
	c := newClaimable(t, "dra")
	c.published(8)
	next := c.beside(c.Profile, append(slices.Clone(c.Args), "--state-dir=", "--cdi-dir", c.Path("cdi"), "--dra-mode",
		"plugin")...)
	next.Args = append(next.Args, "--config-file", next.write("config.yaml", "dra: {mode: plugin}"))
	next.start()
	c.eventually("the next one leads", next.leads)
	c.eventually("the next one is ready", func() bool {
		var now told.Readiness
		return control.Call(t.Context(), next.ControlSocket(), "ready", map[string]int{}, &now) == nil && now.Ready
	})
	if got := c.Allocatable(gpu); got > 0 || len(c.devices()) != 8 {
		t.Errorf("kubelet has %d GPUs, and %d are in slices", got, len(c.devices()))
	}
}
