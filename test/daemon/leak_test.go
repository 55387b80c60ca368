package daemon

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	told "github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestFaultsLeaveNothingBehind: after very many faults and repairs the daemon has hardly more
// threads than after some, and hardly more goroutines than one that has seen none.
func TestFaultsLeaveNothingBehind(t *testing.T) {
	t.Parallel()
	quiet := serving(t, node.Setup{})
	quiet.shows(8, 8)

	// Each kind of fault happens rounds times. One that leaves a goroutine or a thread behind is over
	// slack; calls that are under way, and the threads that the runtime starts when the machine is
	// busy, are not.
	const rounds, slack = 40, 25
	s := open(t, node.Setup{})
	s.Args = []string{"--config-file", s.write("config.yaml", "version: v1\nhealth: {flapLimit: 10000}\n")}
	s.start()
	s.shows(8, 8)
	s.suffers(rounds)
	before := s.threads()
	s.suffers(rounds)
	if after := s.threads(); after > before+slack {
		t.Errorf("%d threads after twice as many faults, and %d before", after, before)
	}
	if before, after := quiet.goroutines(), s.goroutines(); after > before+slack {
		t.Errorf("%d goroutines, and without faults %d", after, before)
	}
}

// TestThreadsOfCallsThatHang: calls about 15 of 16 GPUs do not return, in a library in C, where
// each keeps a thread. The process has a thread for each of these GPUs and few more, each GPU is
// found to hang by itself, and the one that answers is given to pods.
func TestThreadsOfCallsThatHang(t *testing.T) {
	t.Parallel()
	const gpus, slack = 16, 12
	d, s := installed(t, gpus)
	bounded := func(when string) {
		t.Helper()
		threads := s.threads()
		t.Logf("%s: %d threads", when, threads)
		if threads > gpus+slack {
			t.Errorf("%s: %d threads with %d GPUs", when, threads, gpus)
		}
	}
	bounded("all answer")
	if err := os.WriteFile(d.hangs(), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s.signal(s.Running(), syscall.SIGHUP)
	s.eventually("a call about each GPU but one does not return", func() bool {
		var now told.Status
		return control.Call(t.Context(), s.ControlSocket(), "status", nil, &now) == nil && now.Hanging == gpus-1
	})
	bounded("calls hang")
	s.shows(gpus, 1)
	bounded("the GPUs are Unhealthy")
	s.admit("work", 1)
	if err := os.Remove(d.hangs()); err != nil {
		t.Fatal(err)
	}
	s.shows(gpus, gpus)
	bounded("all answer again")
}

// suffers has each kind of fault happen so many times, and waits until all of them are repaired.
func (s *stage) suffers(rounds int) {
	s.t.Helper()
	for i := range 6 * rounds {
		at := strconv.Itoa(i % 8)
		s.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: at})
		s.inject([]simulator.Fault{
			{Kind: simulator.KindXID, GPU: at, XID: 48},
			{Kind: simulator.KindLost, GPU: at},
			{Kind: simulator.KindHang, GPU: at, Call: "DeviceGetMemoryInfo"},
			{Kind: simulator.KindFail, GPU: at, Return: "RESET_REQUIRED"},
			{Kind: simulator.KindRecoveryAction, GPU: at, Action: "drain-and-reset"},
			{Kind: simulator.KindFail, Call: "EventSetWait", Return: "UNKNOWN"},
		}[i%6])
		if i%10 == 0 {
			s.signal(s.Running(), syscall.SIGHUP)
		}
	}
	// Faults that nobody has seen yet leave all GPUs Healthy, too: what is waited for is that the last
	// one is seen and repaired.
	s.inject(simulator.Fault{Kind: simulator.KindRestore}, simulator.Fault{Kind: simulator.KindRecoveryAction, GPU: "1",
		Action: "reset"})
	s.signal(s.Running(), syscall.SIGHUP)
	s.says("GPU 1 alone is to be reset, which none of the faults above asks for", func(now status) bool {
		for i, g := range now.GPUs {
			if i != 1 && g.State != "Healthy" {
				return false
			}
		}
		return len(now.GPUs) == 8 && strings.Contains(now.GPUs[1].Reason, "gpu-reset")
	})
	s.shows(8, 7)
	s.inject(simulator.Fault{Kind: simulator.KindRestore})
	s.signal(s.Running(), syscall.SIGHUP)
	s.shows(8, 8)
}

// threads returns how many threads the daemon has.
func (s *stage) threads() int {
	s.t.Helper()
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", s.Running().Pid))
	if err != nil {
		s.t.Fatal(err)
	}
	return len(tasks)
}

// goroutines returns how many goroutines the daemon has, without those of Go's runtime. It ends the
// daemon for it: the runtime prints them on SIGABRT.
func (s *stage) goroutines() int {
	s.t.Helper()
	daemon := s.Running()
	s.signal(daemon, syscall.SIGABRT)
	s.ends(daemon)
	_ = s.StopDaemon() // it was aborted, and says so
	log, err := os.ReadFile(s.LogPath())
	if err != nil {
		s.t.Fatal(err)
	}
	n := 0
	for block := range strings.SplitSeq(string(log), "\n\n") {
		if strings.HasPrefix(strings.TrimSpace(block), "goroutine ") && !strings.Contains(block, "\ncreated by runtime.") {
			n++
		}
	}
	if n < 5 {
		s.t.Fatalf("the daemon's log has %d goroutines", n)
	}
	return n
}
