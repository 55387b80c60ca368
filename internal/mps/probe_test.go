package mps_test

import (
	"context"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	clocktest "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
)

// A probe is a running Prober, with the clock of the test.
type probe struct {
	*mps.Prober
	clock *clocktest.FakeClock
}

func (n *node) probe(resources ...string) *probe {
	n.t.Helper()
	p := &probe{clock: clocktest.NewFakeClock(time.Unix(0, 0))}
	p.Prober = mps.NewProber(n.root, p.clock)
	p.Follow(resources)
	ctx, cancel := context.WithCancel(context.WithoutCancel(n.t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	n.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			n.t.Errorf("Run: %v", err)
		}
	})
	return p
}

// untilReason waits until a resource is not ready for a reason; empty means ready.
func (n *node) untilReason(p *probe, resource, part string) {
	n.t.Helper()
	n.until(resource+": "+part, func() bool {
		p.clock.Step(time.Second)
		reason, unready := p.Unready().Value()[resource]
		return unready == (part != "") && strings.Contains(reason, part)
	})
}

func TestProberFollowsDaemons(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := mps.NewProber(n.root, clocktest.NewFakeClock(time.Unix(0, 0))) // does not run
	p.Follow([]string{one})
	if reason := p.Unready().Value()[one]; reason != "the MPS control daemon of nvidia.com/gpu has not answered yet" {
		t.Errorf("before it was asked: %q", reason)
	}

	if p.HasResult(one) {
		t.Error("it counts as asked before it was")
	}

	asked := n.probe(one, two)
	n.untilReason(asked, one, "the MPS control daemon of nvidia.com/gpu does not answer: stat "+n.path(one+"/pipe"))
	if !asked.HasResult(one) || asked.HasResult("another") {
		t.Errorf("after the answer: asked %t; a resource that is not followed: %t", asked.HasResult(one),
			asked.HasResult("another"))
	}
	end := n.supervise(group(one, gpu("a", 80, 2)))
	n.untilReason(asked, one, "")
	if asked.Unready().Value()[two] == "" {
		t.Error("a resource without a daemon is ready because another is")
	}
	_, changed := asked.Unready().Latest()
	asked.Follow([]string{one, two})
	select {
	case <-changed:
		t.Error("news without news")
	default:
	}
	asked.Follow([]string{one})
	if got := asked.Unready().Value(); len(got) != 0 {
		t.Errorf("after one was no longer followed: %q", got)
	}

	end()
	n.untilReason(asked, one, "Cannot find MPS control daemon process")
	n.supervise(group(one, gpu("a", 80, 2)))
	n.untilReason(asked, one, "")
	asked.Follow([]string{one, two})
	if !asked.HasResult(one) || asked.HasResult(two) && asked.Unready().Value()[two] == "" {
		t.Error("what is followed on is forgotten")
	}
	asked.Follow(nil)
	if got := asked.Unready().Value(); len(got) != 0 {
		t.Errorf("nothing is followed: %q", got)
	}
}

func TestProberOfADaemonThatHangs(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("a daemon that hangs is noticed after 4 s, twice: make test-all runs it")
	}
	n := newNode(t)
	n.supervise(group(one, gpu("a", 80, 2)), group(two, gpu("b", 80, 2)))
	n.untilReady()
	p := n.probe(one, two)
	n.untilReason(p, one, "")
	n.untilReason(p, two, "")
	if err := syscall.Kill(n.pid(one), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	n.untilReason(p, one, "no answer within 4s")
	later := n.probe(one) // at the start of a process: the first list does not wait longer
	n.untilReason(later, one, "no answer within 4s")
	if !later.HasResult(one) {
		t.Error("a daemon that hangs from the start counts as not asked")
	}
	n.untilReason(p, two, "") // still ready, or ready again if the machine was too busy for an answer in time
	if err := syscall.Kill(n.pid(one), syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	n.untilReason(p, one, "")
}

// TestOwnLimits: the answers tell the limits of a daemon for all clients.
func TestOwnLimits(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	unlimited := mps.Group{Resource: two, GPUs: []mps.GPU{{UUID: "GPU-b", Replicas: 1}}, Unlimited: true}
	n.supervise(group(one, gpu("a", 80, 2)), unlimited)
	n.untilReady()
	p := n.probe(one, two)
	n.untilReason(p, one, "")
	n.untilReason(p, two, "")
	if of, all := p.OwnLimits(one), p.OwnLimits(two); of != "50 percent of the threads and 40G of memory" || all != "" {
		t.Errorf("limits of a shared GPU %q, of one in units %q", of, all)
	}
}

// A countingClock counts the started timers.
type countingClock struct {
	*clocktest.FakeClock
	timers atomic.Int32
}

func (c *countingClock) After(d time.Duration) <-chan time.Time {
	c.timers.Add(1)
	return c.FakeClock.After(d)
}

// TestNewResourceDoesNotDelayLooks: a new resource does not delay the next look at other daemons.
func TestNewResourceDoesNotDelayLooks(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	c := &countingClock{FakeClock: clocktest.NewFakeClock(time.Unix(0, 0))}
	p := mps.NewProber(n.root, c)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	var followed []string
	for _, name := range []string{one, two, "nvidia.com/third", "nvidia.com/fourth"} {
		followed = append(followed, name)
		p.Follow(followed)
		n.until(name+" is asked", func() bool { return p.HasResult(name) })
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("Run: %v", err)
	}
	if got := c.timers.Load(); got != 1 {
		t.Errorf("%d timers for the next look were begun before it came, want 1", got)
	}
}

// TestBusyDaemon: a control daemon that rejects commands for a moment, as when a client comes or
// goes, gets its limits and counts as ready.
func TestBusyDaemon(t *testing.T) {
	n := newNode(t)
	t.Setenv("MPS_STAND_IN", "busy")
	n.supervise(group(one, gpu("a", 80, 2)))
	n.untilReady()
	p := n.probe(one)
	n.untilReason(p, one, "")
	_, changed := p.Unready().Latest()
	asked := func() int {
		log, err := os.ReadFile(n.path(one + "/log/control.log"))
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(log), "Cmd:get_default_active_thread_percentage")
	}
	before := asked()
	n.until("ten probes", func() bool {
		p.clock.Step(time.Second)
		return asked() >= before+10
	})
	select {
	case <-changed:
		t.Errorf("a daemon that was busy for a moment is not ready: %q", p.Unready().Value()[one])
	default:
	}
}

// TestDaemonRestartBetweenProbes: a ready daemon is probed at the next look after its mark
// disappears.
func TestDaemonRestartBetweenProbes(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	end := n.supervise(group(one, gpu("a", 80, 2)))
	n.untilReady()
	p := n.probe(one)
	n.untilReason(p, one, "")
	asked := func() int {
		log, err := os.ReadFile(n.path(one + "/log/control.log"))
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(log), "Cmd:get_default_active_thread_percentage")
	}
	look := func() {
		n.until("the next look is waited for", p.clock.HasWaiters)
		p.clock.Step(time.Second)
	}
	// The next probe of a ready daemon is ten looks away.
	before := asked()
	n.until("a question", func() bool { look(); return asked() > before })
	end()
	// A look while the daemon's answer to the question is still awaited has no effect.
	n.until("the end of the daemon is noticed", func() bool {
		noticed := p.Unready().Value()[one] != ""
		if !noticed && p.clock.HasWaiters() {
			p.clock.Step(time.Second)
		}
		return noticed
	})
}

func TestProberWithoutTheDriversProgram(t *testing.T) {
	n := newNode(t)
	n.supervise(group(one, gpu("a", 80, 2)))
	n.untilReady()
	t.Setenv("PATH", t.TempDir())
	n.untilReason(n.probe(one), one, "NVIDIA_DRIVER_CAPABILITIES=compute,utility")
}
