package daemon

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	told "github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/cuda"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// A validating stage has a daemon that proves CUDA by a stand-in for the driver's libcuda.
type validating struct {
	*stage
	library *cuda.Library
	uuids   []string // of the GPUs
}

// proving makes one that has not started.
func proving(t *testing.T, args ...string) *validating {
	t.Helper()
	root := t.TempDir()
	v := &validating{library: cuda.Install(t, root)}
	v.stage = open(t, node.Setup{Args: append([]string{"--driver-root-ctr-path", root}, args...)})
	v.start()
	v.eventually("the GPUs are known", func() bool {
		v.uuids = nil
		for _, d := range v.status().GPUs {
			v.uuids = append(v.uuids, d.UUID)
		}
		return len(v.uuids) == 8
	})
	return v
}

// status returns what the daemon knows, if it answers.
func (s *stage) status() (now told.Status) {
	ctx, cancel := context.WithTimeout(s.t.Context(), time.Second)
	defer cancel()
	_ = control.Call(ctx, s.ControlSocket(), "status", nil, &now)
	return now
}

// proofs returns how many devices have each result.
func (s *stage) proofs() map[string]int {
	results := map[string]int{}
	if v := s.status().Validation; v != nil {
		for _, d := range v.Devices {
			results[d.Result]++
		}
	}
	return results
}

// validate switches it on.
func (v *validating) validate() {
	v.t.Helper()
	v.stop()
	v.Args = append(v.Args, "--validate")
	v.start()
}

// ended reports whether a process has ended.
func ended(pid int) bool {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err != nil && errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) || strings.Contains(string(text), ") Z ")
}

// TestCUDAIsProvenFirst: GPUs are offered once CUDA is proven on them. One that computes wrongly
// and one that hangs take none of the others down, and stay so over a restart, in which nothing is
// proven again.
func TestCUDAIsProvenFirst(t *testing.T) {
	t.Parallel()
	v := proving(t)
	v.library.Fail(t, v.uuids[3], "cuMemcpyHtoD", "wrong")
	v.library.Fail(t, v.uuids[5], "cuDevicePrimaryCtxRetain", "hang")
	v.shows(8, 8) // the list of the process that does not prove anything
	mark := v.Mark()
	v.validate()
	for _, d := range v.next(mark, standin.Listed).Devices {
		if d.GetHealth() == "Healthy" {
			t.Errorf("the first list has %s as Healthy", d.GetID())
		}
	}
	v.shows(8, 6)
	v.eventually("each GPU has a verdict", func() bool {
		p := v.proofs()
		return p[told.Proven] == 6 && p[told.Failed] == 2 && v.status().Validation.Seconds > 0
	})
	now := v.status()
	for gpu, want := range map[int]string{3: "the GPU computes wrongly",
		5: "cuDevicePrimaryCtxRetain does not return within 10s"} {
		if d := now.GPUs[gpu]; d.State != "Unhealthy" || !strings.Contains(d.Reason, want) || d.Remedy != "reset" {
			t.Errorf("GPU %d: %+v, want %q", gpu, d, want)
		}
	}
	v.admit("work", 6)

	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		before := v.Running()
		v.signal(before, sig)
		<-before.Ended()
		mark := v.Mark()
		v.start()
		v.next(mark, standin.Listed)
		v.shows(8, 6)
	}
	for i, uuid := range v.uuids {
		if n := v.library.Count(t, uuid, "cuInit"); n != 1 && i != 5 { // a hang may pass
			t.Errorf("GPU %d was tried %d times", i, n)
		}
	}
	v.library.Repair(t)
	v.call("health.clear", map[string]string{"gpu": "3"})
	v.shows(8, 8)
}

// TestAKillWhileCUDAIsProven, in each function: the process for the proof ends with the daemon, and
// the next daemon proves what is left. When quiesce has answered, no process of a proof uses the driver.
func TestAKillWhileCUDAIsProven(t *testing.T) {
	t.Parallel()
	v := proving(t)
	for i, function := range []string{"cuInit", "cuModuleLoadDataEx", "cuMemFree"} {
		v.library.Repair(t)
		for _, uuid := range v.uuids[i:] {
			v.library.Fail(t, uuid, function, "hang")
		}
		if i == 0 {
			v.validate()
		} else {
			v.start()
		}
		child := 0
		v.eventually("it hangs in "+function, func() bool {
			for _, c := range v.library.Calls(t) {
				if c.Function == function && c.UUID == v.uuids[i] {
					child = c.PID
				}
			}
			return child != 0
		})
		killed := v.Running()
		v.signal(killed, syscall.SIGKILL)
		<-killed.Ended()
		v.eventually("the process for the proof has ended", func() bool { return ended(child) })
	}
	v.library.Repair(t)
	v.library.Fail(t, v.uuids[3], "cuInit", "hang")
	v.start()
	child := 0
	v.eventually("a proof hangs", func() bool {
		for _, c := range v.library.Calls(t) {
			if c.UUID == v.uuids[3] && !ended(c.PID) {
				child = c.PID
			}
		}
		return child != 0
	})
	v.call("quiesce", nil)
	if !ended(child) {
		t.Errorf("quiesce has answered, and process %d of a proof is there", child)
	}
	v.library.Repair(t)
	v.call("resume", nil)
	v.shows(8, 8)
}

// TestGPUsInUseAreNotTried, and pods that hold them are left alone.
func TestGPUsInUseAreNotTried(t *testing.T) {
	t.Parallel()
	v := proving(t)
	v.shows(8, 8)
	v.admit("before", 3)
	v.validate()
	v.shows(8, 5)
	v.eventually("three wait for their pod", func() bool {
		waiting := 0
		now := v.status().Validation
		for i := 0; now != nil && i < len(now.Devices); i++ {
			d := now.Devices[i]
			if d.Result == told.Waiting && d.Reason == "in use by pod default/before" {
				waiting++
			}
		}
		return waiting == 3
	})
	v.admit("beside", 5)
	v.Remove("before")
	v.shows(8, 8)
	for i, uuid := range v.uuids {
		if n := v.library.Count(t, uuid, "cuInit"); n != 1 {
			t.Errorf("GPU %d was tried %d times", i, n)
		}
	}
}

// TestTwoProcessesProveOnce: another process takes the lead in the middle, and no GPU is given to
// pods unproven. What the first one proved is not proven again; what it was about to is.
func TestTwoProcessesProveOnce(t *testing.T) {
	t.Parallel()
	v := proving(t)
	v.library.Fail(t, v.uuids[0], "cuInit", "hang")
	v.validate()
	proven := map[string]bool{}
	v.eventually("the first GPU hangs, and others are proven", func() bool {
		if now := v.status().Validation; now != nil {
			for _, d := range now.Devices {
				if d.Result == told.Proven {
					proven[d.UUID] = true
				}
			}
		}
		return len(proven) > 0 && v.library.Count(t, v.uuids[0], "cuInit") > 0
	})
	other := v.beside(v.Profile, append([]string{"--state-dir", v.Path("state"), "--cdi-dir", v.Path("cdi")},
		v.Args...)...)
	other.start()
	v.eventually("the other one leads", other.leads)
	v.library.Repair(t)
	v.eventually("the other one knows each GPU", func() bool { return other.proofs()[told.Proven] == 8 })
	v.eventually("the first one does, too", func() bool { return v.proofs()[told.Proven] == 8 })
	v.shows(8, 8)
	for i, uuid := range v.uuids {
		n := v.library.Count(t, uuid, "cuMemFree") // it is called twice in a proof
		if n != 2 && (proven[uuid] || n < 2 || n > 4) {
			t.Errorf("GPU %d was proven %d times, by the first process %v", i, n/2, proven[uuid])
		}
	}
}

// TestANewNodeIsReady: with the stand-in for libcuda, 8 GPUs are proven and offered within 15 s of
// the driver's answer, and the steps are in their order. The bound is wide for a busy machine: make
// bench has how long it takes.
func TestANewNodeIsReady(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	cuda.Install(t, root)
	s := open(t, node.Setup{Args: []string{"--driver-root-ctr-path", root, "--validate"}})
	s.start()
	var steps []told.ReadyStep
	s.eventually("pods get GPUs", func() bool {
		now := s.status()
		_, waits := now.Waits()
		steps = now.Steps
		return !waits && len(steps) > 0
	})
	s.shows(8, 8)
	var names []string
	for i, step := range steps {
		names = append(names, step.Name)
		if step.Seconds == 0 || i > 0 && step.Seconds < steps[i-1].Seconds {
			t.Errorf("%s was reached after %v s, and the step before it after %v s", step.Name, step.Seconds,
				steps[max(0, i-1)].Seconds)
		}
	}
	if got := strings.Join(names, ", "); got != "driver, device nodes, containers, CUDA, kubelet" {
		t.Errorf("steps %s", got)
	}
	if took := steps[4].Seconds - steps[0].Seconds; took > 15 {
		t.Errorf("8 GPUs are offered %.1f s after the driver's answer", took)
	}
	text := s.command("status")
	if !strings.Contains(text, "steps: driver ") || !strings.Contains(text, "after the start of the daemon") {
		t.Errorf("status prints %s", text)
	}
	t.Logf("%+v", steps)
}

// TestDriversThatAreNotAccepted: no device is offered with a driver outside of the range, and pods
// that hold one keep it.
func TestDriversThatAreNotAccepted(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	file := s.Path("config.yaml")
	write := func(text string) {
		if err := os.WriteFile(file+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	write(`driver: {below: "100"}`)
	s.Args = append(s.Args, "--config-file", file)
	mark := s.Mark()
	s.start()
	for _, d := range s.next(mark, standin.Listed).Devices {
		if d.GetHealth() == "Healthy" {
			t.Errorf("the first list has %s as Healthy", d.GetID())
		}
	}
	s.shows(8, 0)
	if held := s.status().Holds; len(held) != 8 || !strings.Contains(held[0].Reason,
		"is not accepted: driver.below is 100") {
		t.Errorf("held: %v", held)
	}
	write(`driver: {atLeast: "100"}`)
	s.shows(8, 8)
	s.admit("work", 2)
	write(`driver: {below: "100"}`)
	s.shows(8, 0)
	if n := len(s.Events(mark)); n == 0 {
		t.Error("nothing happened")
	}
}
