package daemon

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestFaultsLeaveNothingBehind: after fifty faults and their cure the daemon has hardly more goroutines and threads than
// one that has seen none.
func TestFaultsLeaveNothingBehind(t *testing.T) {
	t.Parallel()
	quiet := serving(t, node.Setup{})
	quiet.shows(8, 8)

	s := serving(t, node.Setup{})
	for i := range 50 {
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
	s.inject(simulator.Fault{Kind: simulator.KindRestore})
	s.signal(s.Running(), syscall.SIGHUP)
	s.shows(8, 8)

	// Each of the six kinds of faults happened eight times or more: one that left a goroutine or a thread behind is over
	// this, calls that are under way are not.
	const slack = 6
	if before, after := quiet.threads(), s.threads(); after > before+slack {
		t.Errorf("%d threads, and without faults %d", after, before)
	}
	if before, after := quiet.goroutines(), s.goroutines(); after > before+slack {
		t.Errorf("%d goroutines, and without faults %d", after, before)
	}
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

// goroutines returns how many goroutines the daemon has, without those of Go's runtime. It ends the daemon for it: the
// runtime prints them on SIGABRT.
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
