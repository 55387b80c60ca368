package daemon

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	told "github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// resets runs the command reset, and returns what it prints and whether it succeeds.
func (s *stage) resets(arguments ...string) (output string, ok bool) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	out, err := s.resetting(ctx, arguments...).CombinedOutput()
	return string(out), err == nil
}

func (s *stage) resetting(ctx context.Context, arguments ...string) *exec.Cmd {
	return exec.CommandContext(ctx, binary, append([]string{"reset", "--control-socket", s.ControlSocket()},
		arguments...)...)
}

// state returns the state of a GPU.
func (s *stage) state(gpu int) string {
	if gpus := s.status().GPUs; gpu < len(gpus) {
		return gpus[gpu].State
	}
	return ""
}

// smi sets what nvidia-smi does with a GPU.
func (s *stage) smi(gpu, does string) {
	s.inject(simulator.Fault{Kind: simulator.KindSMIReset, GPU: gpu, State: does})
}

// TestResets: a reset that works, one that fails, one that repairs another GPU, and GPUs that go
// together. Others are offered throughout.
func TestResets(t *testing.T) {
	t.Parallel()
	s := serving(t, node.Setup{})
	s.shows(8, 8)
	for _, gpu := range []string{"3", "4", "5"} {
		s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: gpu, XID: 119})
	}
	s.shows(8, 5)
	if out, ok := s.resets("--gpu", "3"); !ok || !strings.Contains(out, "GPU 3: reset, and Healthy") {
		t.Fatalf("reset of GPU 3: %v\n%s", ok, out)
	}
	s.shows(8, 6)

	s.inject(simulator.Fault{Kind: simulator.KindFail, GPU: "3", Return: "RESET_REQUIRED"})
	s.shows(8, 5)
	if out, ok := s.resets("--gpu", "3"); !ok { // it cannot tell its processes
		t.Errorf("a GPU that answers only that it wants a reset: %s", out)
	}
	s.shows(8, 6)

	s.smi("4", "fails")
	out, ok := s.resets("--gpu", "4")
	if ok || !strings.Contains(out, "nvidia-smi: exit status 255: The following GPUs could not be reset: GPU 0000:") {
		t.Errorf("a reset that fails: %v\n%s", ok, out)
	}
	if r := s.status().Reset; r == nil || r.Phase != "failed" || !strings.Contains(r.Reason, "Unknown Error") {
		t.Errorf("status says %+v", r)
	}
	s.inject(simulator.Fault{Kind: simulator.KindClients, GPU: "4", Clients: []string{"host"}})
	s.smi("4", "works")
	if out, ok = s.resets("--gpu", "4"); ok || !strings.Contains(out,
		"In use by another client; open: GPU 4 by process ") {
		t.Errorf("a GPU that a process has open: %v\n%s", ok, out)
	}
	s.inject(simulator.Fault{Kind: simulator.KindClients, GPU: "4"})

	s.smi("4", "another") // the next one
	if out, ok = s.resets("--gpu", "4"); ok || !strings.Contains(out, "after the reset, GPU 4 is Unhealthy: ") {
		t.Errorf("a reset of another GPU: %v\n%s", ok, out)
	}
	s.shows(8, 7) // GPU 5 by its readings
	s.smi("4", "peers")
	s.smi("6", "peers")
	if out, ok = s.resets("--gpu", "4"); ok || !strings.Contains(out,
		"append the following device indexes to the command line and retry. 6") {
		t.Errorf("a GPU without its peer: %v\n%s", ok, out)
	}
	if out, ok = s.resets("--gpu", "4,6"); !ok {
		t.Errorf("GPUs that go together: %s", out)
	}
	s.shows(8, 8)
	s.admit("work", 8)
}

// TestResetOfAGPUInUse names the pod, and resets nothing; with --wait it waits for its end.
func TestResetOfAGPUInUse(t *testing.T) {
	t.Parallel()
	s := serving(t, node.Setup{})
	s.shows(8, 8)
	s.admit("train", 8)
	out, ok := s.resets("--gpu", "2")
	if ok || !strings.Contains(out, "in use: GPU 2 by pod ") || !strings.Contains(out, "train") ||
		!strings.Contains(out, "--wait") {
		t.Errorf("a GPU in use: %v\n%s", ok, out)
	}
	s.shows(8, 8)

	// A command that is ended while it waits ends the reset.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	waits := func() bool { r := s.status().Reset; return r != nil && r.Phase == "waiting" && s.state(2) == "Unknown" }
	c := s.resetting(ctx, "--gpu", "2", "--wait", "10m")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	s.eventually("the pod is waited for", waits)
	s.shows(8, 7)
	if out, ok := s.resets("--gpu", "3"); ok || !strings.Contains(out, "another reset is running") {
		t.Errorf("a second reset: %v\n%s", ok, out)
	}
	cancel()
	_ = c.Wait()
	s.eventually("the reset was given up", func() bool { return s.status().Reset.Phase == "failed" && s.state(2) == "Healthy" })
	s.shows(8, 8)

	ended := make(chan error, 1)
	go func() { ended <- s.resetting(t.Context(), "--gpu", "2", "--wait", "10m").Run() }()
	s.eventually("the pod is waited for", waits)
	s.Remove("train")
	if err := <-ended; err != nil {
		t.Errorf("after the end of the pod: %v", err)
	}
	s.shows(8, 8)
}

// child returns the process that stands in for nvidia-smi; 0 if there is none.
func (s *stage) child() int {
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, name := range all {
		text, err := os.ReadFile(name)
		if words := strings.Split(string(text), "\x00"); err == nil && len(words) > 2 && words[1] == "simulated-nvidia-smi" &&
			words[2] == s.ControlSocket() {
			pid, _ := strconv.Atoi(strings.Split(name, "/")[2])
			return pid
		}
	}
	return 0
}

// TestInterruptedResets: the daemon is killed, or ends, while it waits and while the driver's
// program runs. The next one uses the driver, shows the reset as interrupted, and judges the GPU by
// its readings. A command that ends while the program runs ends nothing.
func TestInterruptedResets(t *testing.T) {
	t.Parallel()
	s := serving(t, node.Setup{})
	s.shows(8, 8)
	s.smi("1", "hangs")
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM} {
		var complaint strings.Builder
		c := s.resetting(t.Context(), "--gpu", "1")
		c.Stderr = &complaint
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		child := 0
		s.eventually("the program runs", func() bool { child = s.child(); return child != 0 })
		if r := s.status().Reset; r == nil || r.Phase != "resetting" {
			t.Errorf("status says %+v", r)
		}
		s.shows(8, 7)
		daemon := s.Running()
		s.signal(daemon, sig)
		s.ends(daemon)
		s.eventually("the program has ended", func() bool { return ended(child) })
		if err := c.Wait(); err == nil {
			t.Errorf("the command succeeds: %s", complaint.String())
		}
		_ = s.StopDaemon()
		s.start()
		s.shows(8, 8)
		var r *told.Reset
		s.eventually("the reset is shown", func() bool { r = s.status().Reset; return r != nil })
		if r.Phase != "interrupted" || len(r.GPUs) != 1 || !strings.Contains(r.Reason, "judged by their readings") {
			t.Errorf("after %v status says %+v", sig, r)
		}
		s.smi("1", "hangs")
	}

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c := s.resetting(ctx, "--gpu", "1")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	s.eventually("the program runs", func() bool { return s.child() != 0 })
	cancel()
	_ = c.Wait()
	s.smi("1", "works")
	s.eventually("the reset goes on", func() bool { r := s.status().Reset; return r != nil && r.Phase == "done" })
	s.shows(8, 8)
}

// TestHandOverDuringAReset: another process takes the lead while the driver's program runs. It
// gives the GPU to no pod and resets none until the first one is killed. Then it shows the reset as
// interrupted, and judges the GPU by its readings.
func TestHandOverDuringAReset(t *testing.T) {
	t.Parallel()
	s := serving(t, node.Setup{})
	s.shows(8, 8)
	s.smi("1", "hangs")
	c := s.resetting(t.Context(), "--gpu", "1")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	child := 0
	s.eventually("the program runs", func() bool { child = s.child(); return child != 0 })
	s.shows(8, 7)

	other := s.beside(s.Profile, "--state-dir", s.Path("state"))
	other.start()
	s.eventually("the later process leads", other.leads)
	other.eventually("it shows the reset that goes on", func() bool {
		r := other.status().Reset
		return r != nil && r.Phase == "resetting" && strings.Contains(r.Reason, "led before and may still reset them")
	})
	other.eventually("it withdraws the GPU", func() bool { return other.state(1) == "Unknown" })
	s.shows(8, 7)
	if out, ok := other.resets("--gpu", "2"); ok || !strings.Contains(out, "may still change GPUs") {
		t.Errorf("a second reset: %v\n%s", ok, out)
	}
	if ended(child) {
		t.Error("the program has ended")
	}

	first := s.Running()
	s.signal(first, syscall.SIGKILL)
	s.ends(first)
	s.eventually("the program has ended", func() bool { return ended(child) })
	if err := c.Wait(); err == nil {
		t.Error("the command succeeds")
	}
	_ = s.StopDaemon()
	other.eventually("the reset is shown as interrupted", func() bool {
		r := other.status().Reset
		return r.Phase == "interrupted" && strings.Contains(r.Reason, "judged by their readings")
	})
	s.shows(8, 8)
}
