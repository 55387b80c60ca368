package daemon

import (
	"context"
	"os/exec"
	"strings"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// ready runs the readiness probe, and returns whether it succeeds and what it prints.
func (s *stage) ready(args ...string) (ok bool, text string) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, append([]string{"ready", "--control-socket", s.ControlSocket()}, args...)...)
	output, err := cmd.CombinedOutput()
	if err != nil && cmd.ProcessState.ExitCode() != 1 {
		s.t.Fatalf("ready: %v: %s", err, output)
	}
	return err == nil, strings.TrimSpace(string(output))
}

// becomesReady waits until the daemon is ready, with a reason that has a text.
func (s *stage) becomesReady(reason string) {
	s.t.Helper()
	ok, text := s.ready("--wait", "20s")
	for late := time.Now().Add(patience); !ok && time.Now().Before(late); {
		ok, text = s.ready("--wait", "20s")
	}
	if !ok || !strings.Contains(text, reason) {
		s.t.Fatalf("ready: %t: %s; want that it is, with %q", ok, text, reason)
	}
}

// staysUnready waits until the daemon says that it is not ready, with a reason that has a text.
func (s *stage) staysUnready(reason string) {
	s.t.Helper()
	text := ""
	s.eventually("not ready: "+reason, func() bool {
		ok, now := s.ready()
		if ok {
			s.t.Fatalf("ready: %s; want that it is not, with %q", now, reason)
		}
		text = now
		return strings.Contains(text, reason)
	})
}

// beside makes room for another daemon beside that of the node. It ends before the node does.
func (s *stage) beside(profile string, args ...string) *stage {
	s.t.Helper()
	n, err := s.Beside(node.Setup{Profile: profile, Args: args})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		if s.t.Failed() {
			s.t.Logf("the other daemon's log ends with:\n%s", n.Logged())
		}
		if err := n.Close(); err != nil {
			s.t.Errorf("end the other daemon: %v", err)
		}
	})
	return &stage{n, s.t}
}

// wrongRoot are the arguments of a daemon that finds no driver.
var wrongRoot = []string{"--driver-root-ctr-path", "/nonexistent", "--fail-on-init-error=false"}

func TestReadyWhenKubeletCountsTheGPUs(t *testing.T) {
	t.Parallel()
	for _, version := range []standin.Version{standin.V136, standin.V137} {
		t.Run(string(version), func(t *testing.T) {
			t.Parallel()
			s := open(t, node.Setup{Version: version})
			if ok, text := s.ready(); ok || !strings.Contains(text, "no daemon answers") {
				t.Errorf("ready without a daemon: %t: %s", ok, text)
			}
			s.SetRegister(standin.RegisterRefuses)
			s.start()
			s.staysUnready("nvidia.com/gpu is not served: register nvidia.com/gpu at kubelet")
			s.SetRegister(standin.RegisterAnswers)
			s.becomesReady("ready")

			// What happens later does not take it back.
			s.inject(simulator.Fault{Kind: simulator.KindLost, GPU: "1"})
			s.allocatable(7)
			s.stillReady("a GPU is lost")
			s.inject(simulator.Fault{Kind: simulator.KindDriver, Driver: "missing"})
			s.says("a look that failed", func(now status) bool { return now.Stale != "" })
			s.stillReady("a look failed")
			s.Stop()
			s.stillReady("kubelet is away")
			if err := s.Resume(); err != nil {
				t.Fatal(err)
			}
			s.stillReady("kubelet restarted")
		})
	}
}

// stillReady fails the test if the daemon is not ready.
func (s *stage) stillReady(when string) {
	s.t.Helper()
	if ok, text := s.ready(); !ok {
		s.t.Errorf("not ready after %s: %s", when, text)
	}
}

// TestBrokenVersionIsNotReadyOverAServingDaemon: its roll-out stops, and the earlier one goes on
// serving. When the earlier one has left, kubelet remembers its GPUs for five minutes more; then
// nobody misses them.
func TestBrokenVersionIsNotReadyOverAServingDaemon(t *testing.T) {
	t.Parallel()
	c := clocktesting.NewFakePassiveClock(time.Now())
	s := serving(t, node.Setup{Clock: c})
	s.shows(8, 8)
	later := s.beside("", wrongRoot...)
	later.start()
	later.staysUnready("nvidia.com/gpu is served by another device plugin, with 8 devices")
	later.staysUnready("this one has nothing to serve: open an NVML session: no NVIDIA driver")
	if ok, text := later.ready("--wait", "2s"); ok {
		t.Errorf("it became ready over a daemon that serves: %s", text)
	}
	s.shows(8, 8)

	if err := s.StopDaemon(); err != nil {
		t.Fatal(err)
	}
	later.staysUnready("nvidia.com/gpu was served until recently")
	c.SetTime(c.Now().Add(6 * time.Minute))
	s.counts(nil)
	later.becomesReady("nothing to serve: open an NVML session: no NVIDIA driver")
}

// TestLaterDaemonIsReadyThoughPodsHoldAllGPUs: it offers them in another form, once the pods have
// ended. An upgrade does not wait for that.
func TestLaterDaemonIsReadyThoughPodsHoldAllGPUs(t *testing.T) {
	t.Parallel()
	s := serving(t, node.Setup{})
	s.shows(8, 8)
	s.admit("work", 8)
	config := s.write("shared.yaml", "version: v1\nsharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n")
	later := s.beside(s.Profile, "--config-file", config)
	later.start()
	later.becomesReady("ready")
	if healthy := s.Allocatable("nvidia.com/gpu.shared"); healthy != 0 {
		t.Errorf("%d replicas of GPUs that a pod holds can be given out", healthy)
	}
}

// TestReadyWithoutRegistration: a daemon that registers nowhere is ready, also without a driver.
func TestReadyWithoutRegistration(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{Args: append([]string{"--kubelet-socket", ""}, wrongRoot...)})
	s.Profile = ""
	s.start()
	s.becomesReady("ready")
}
