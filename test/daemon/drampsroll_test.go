package daemon

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// next returns a place for another daemon with the state of the first one.
func (c *withMPS) next() *stage {
	return c.beside(c.Profile, append(slices.Clone(c.Args), "--state-dir", c.Path("state"), "--cdi-dir", c.Path("cdi"))...)
}

// startBeside starts a daemon beside another one, and waits until kubelet calls it.
func (c *withMPS) startBeside(s *stage) {
	c.t.Helper()
	before := c.plugins.Registered()
	s.start()
	c.eventually("kubelet has registered the new daemon", func() bool {
		return slices.ContainsFunc(c.plugins.Registered(), func(socket string) bool { return !slices.Contains(before, socket) })
	})
}

// controlDaemon returns the process that serves a claim.
func (c *withMPS) controlDaemon(uid string) (pid string) {
	c.t.Helper()
	c.eventually("a control daemon serves the claim", func() bool {
		text, err := os.ReadFile(c.Path("mps/claims/" + uid + "-0/pipe/nvidia-cuda-mps-control.pid"))
		_, started := os.Stat(c.Path("mps/claims/" + uid + "-0/.started"))
		pid = string(text)
		return err == nil && started == nil
	})
	if _, err := os.Stat("/proc/" + pid); err != nil {
		c.t.Errorf("the control daemon has ended: %v", err)
	}
	return pid
}

// nothingLeft waits until nothing is left of the control daemon of a claim.
func (c *withMPS) nothingLeft(uid, pid string) {
	c.t.Helper()
	c.eventually("nothing is left of the control daemon", func() bool {
		left, err := filepath.Glob(c.Path("mps/claims/" + uid + "*"))
		_, running := os.Stat("/proc/" + pid)
		return err == nil && len(left) == 0 && os.IsNotExist(running)
	})
}

// TestMPSWhileTheDaemonIsReplaced: in a roll-out the control daemon of a claim goes on, whether the
// old process ends or is killed. What the old one prepared the new one gives back.
func TestMPSWhileTheDaemonIsReplaced(t *testing.T) {
	t.Parallel()
	c := newWithMPS(t)
	c.mpsControlDaemon()
	one := c.claimByMPS("one", "gpu-3")
	c.prepared("one", one)
	first := c.controlDaemon(one)
	next := c.next()
	c.startBeside(next)
	two := c.claimByMPS("two", "gpu-4")
	c.prepared("two", two)
	c.prepared("one", one)
	if err := c.StopDaemon(); err != nil {
		t.Error(err)
	}
	second := c.controlDaemon(two)
	if now := c.controlDaemon(one); now != first {
		t.Errorf("the claim of the old process has control daemon %s, had %s", now, first)
	}
	c.release(t.Context(), "one", one)
	c.nothingLeft(one, first)

	c.startBeside(c.stage)
	three := c.claimByMPS("three", "gpu-3")
	c.prepared("three", three)
	third := c.controlDaemon(three)
	c.signal(next.Running(), syscall.SIGKILL)
	<-next.Running().Ended()
	_ = next.StopDaemon() // it was killed
	c.prepared("two", two)
	c.prepared("three", three)
	if now := c.controlDaemon(two); now != second {
		t.Errorf("the claim of the process that was killed has control daemon %s, had %s", now, second)
	}
	c.release(t.Context(), "two", two)
	c.nothingLeft(two, second)
	c.release(t.Context(), "three", three)
	c.nothingLeft(three, third)
	if _, err := os.Stat(c.Path("mps/.exclusive")); !os.IsNotExist(err) {
		t.Errorf("GPUs are in exclusive mode still: %v", err)
	}
}

// TestMPSWhileBothProcessesAreReplaced: mps-control-daemon is replaced, killed, or does not come,
// in the roll-out of the daemon. A GPU never has two control daemons, and what was left of a claim
// ends before the next claim has its GPU.
func TestMPSWhileBothProcessesAreReplaced(t *testing.T) {
	t.Parallel()
	c := newWithMPS(t)
	mps := c.mpsControlDaemon()
	one := c.claimByMPS("one", "gpu-3")
	c.prepared("one", one)
	first := c.controlDaemon(one)

	next := c.next()
	c.startBeside(next)
	other := c.mpsControlDaemon() // waits for the first one's lock
	mps(syscall.SIGTERM)
	c.eventually("the control daemon is that of the new process", func() bool { return c.controlDaemon(one) != first })
	c.prepared("one", one)
	if err := c.StopDaemon(); err != nil {
		t.Error(err)
	}

	// A call waits for a control daemon as all processes are killed.
	other(syscall.SIGSTOP)
	two := c.claimByMPS("two", "gpu-4")
	waiting := make(chan error, 1)
	go func() {
		_, err := c.prepare(t.Context(), "two", two)
		waiting <- err
	}()
	c.eventually("the call waits", func() bool { _, err := os.Stat(c.Path("mps/claims/" + two + "-0.json")); return err == nil })
	c.signal(next.Running(), syscall.SIGKILL)
	<-next.Running().Ended()
	_ = next.StopDaemon() // it was killed
	if err := <-waiting; err == nil {
		t.Error("a process that was killed has prepared a claim")
	}
	left := c.controlDaemon(one)
	other(syscall.SIGKILL)
	c.startBeside(c.stage)
	again := c.mpsControlDaemon()
	c.prepared("two", two)
	c.prepared("one", one)
	c.eventually("the control daemon that was left behind has ended", func() bool {
		_, running := os.Stat("/proc/" + left)
		return os.IsNotExist(running)
	})

	// Claims are given back while no mps-control-daemon runs.
	left = c.controlDaemon(one)
	again(syscall.SIGKILL)
	c.startBeside(next)
	if err := c.StopDaemon(); err != nil {
		t.Error(err)
	}
	c.release(t.Context(), "one", one)
	refused := func(name, uid string) {
		t.Helper()
		if _, err := c.prepare(t.Context(), name, uid); err == nil ||
			!strings.Contains(err.Error(), "mps-control-daemon does not run on this node") {
			t.Errorf("claim %s is prepared while a control daemon of another claim is left on its GPU: %v", name, err)
		}
	}
	plain := c.claim("plain", "gpu-3")
	refused("plain", plain)
	c.release(t.Context(), "plain", plain)
	three := c.claimByMPS("three", "gpu-3")
	refused("three", three)
	c.mpsControlDaemon()
	c.prepared("three", three)
	c.nothingLeft(one, left)
	for name, uid := range map[string]string{"two": two, "three": three} {
		pid := c.controlDaemon(uid)
		c.release(t.Context(), name, uid)
		c.nothingLeft(uid, pid)
	}
}

// TestMPSWhileTheModeChanges: the node keeps the label by which it has mps-control-daemon until the
// last claim is given back, although the mode is plugin, and the daemon is killed meanwhile.
func TestMPSWhileTheModeChanges(t *testing.T) {
	t.Parallel()
	const capable = "nvidia.com/mps.capable"
	c := newWithMPS(t, "--node-labels", "node")
	c.mpsControlDaemon()
	uid := c.claimByMPS("one", "gpu-3")
	c.prepared("one", uid)
	pid := c.controlDaemon(uid)
	c.eventually("the node has the label", func() bool { return labeled(c.api)[capable] == "true" })
	ctx, stop := context.WithCancel(t.Context())
	lost := make(chan bool, 1)
	go func() {
		lacks := false
		for ctx.Err() == nil {
			lacks = lacks || labeled(c.api)[capable] != "true"
			pause(ctx, 5*time.Millisecond)
		}
		lost <- lacks
	}()
	c.mode("{mode: plugin}")
	c.allocatable(7)
	c.crash()
	c.allocatable(7)
	c.becomesReady("")
	if stop(); <-lost {
		t.Error("the node did not have the label while a claim by MPS was prepared")
	}
	if now := c.controlDaemon(uid); now != pid {
		t.Errorf("the claim has control daemon %s, had %s", now, pid)
	}
	c.release(t.Context(), "one", uid)
	c.nothingLeft(uid, pid)
	c.eventually("the node does not have the label any more", func() bool { return labeled(c.api)[capable] == "false" })
	c.allocatable(8)
}
