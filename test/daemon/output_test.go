package daemon

import (
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// piped makes a node whose daemon logs into a pipe of one page. The other end is returned, and the
// daemon's is closed here.
func piped(t *testing.T, setup node.Setup) (s *stage, reader *os.File) {
	t.Helper()
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = reader.Close() })
	if _, _, errno := syscall.Syscall(syscall.SYS_FCNTL, writer.Fd(), syscall.F_SETPIPE_SZ, 4096); errno != 0 {
		t.Fatal(errno)
	}
	setup.Stderr = writer
	s = open(t, setup)
	s.start()
	s.Stderr = nil
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	return s, reader
}

// TestNobodyReadsStandardError: with or without a reader of what it logs, the daemon serves and
// ends.
func TestNobodyReadsStandardError(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"it is not read", "its reader is gone"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, reader := piped(t, node.Setup{})
			if name == "its reader is gone" {
				if err := reader.Close(); err != nil {
					t.Fatal(err)
				}
			}
			s.shows(8, 8)
			for range 200 { // each logs a line: several times what the pipe holds
				s.call("status", nil)
			}
			mark := s.Mark()
			if err := s.Restart(); err != nil {
				t.Fatal(err)
			}
			s.next(mark, standin.Listed)
			s.shows(8, 8)
			s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "1", XID: 79})
			s.shows(8, 7)
			daemon := s.Running()
			s.signal(daemon, syscall.SIGTERM)
			s.ends(daemon)
			if err := daemon.Err(); err != nil {
				t.Errorf("it ended with %v", err)
			}
		})
	}
}

// TestTheReasonOfAnEndIsNotWaitedFor: a process that fails ends, whether somebody reads the reason
// or not.
func TestTheReasonOfAnEndIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	// What it logs and says is longer than the pipe.
	s, _ := piped(t, node.Setup{Args: []string{"--mig-strategy", strings.Repeat("x", 10_000)}})
	daemon := s.Running()
	s.ends(daemon)
	if daemon.Err() == nil {
		t.Error("it ended with exit status 0")
	}
	_ = s.StopDaemon() // says the same again
}

// TestStandardErrorHasEverythingThatIsRead: what is logged comes out late, in order and whole, and
// what the runtime says of a process that crashes comes out as well.
func TestStandardErrorHasEverythingThatIsRead(t *testing.T) {
	t.Parallel()
	s, reader := piped(t, node.Setup{})
	s.shows(8, 8)
	const calls = 200
	for range calls {
		s.call("status", nil)
	}
	if err := reader.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	for page := make([]byte, 4096); strings.Count(log.String(), `"Control call" call="status"`) < calls; {
		n, err := reader.Read(page)
		if err != nil {
			t.Fatalf("%v; until then standard error had %q", err, log.String())
		}
		log.Write(page[:n])
	}
	daemon := s.Running()
	s.signal(daemon, syscall.SIGABRT)
	crash, err := io.ReadAll(reader)
	if err != nil {
		t.Fatal(err)
	}
	s.ends(daemon)
	_ = s.StopDaemon() // it crashed
	if text := string(crash); !strings.Contains(text, "SIGABRT: abort") || !strings.Contains(text, "goroutine ") {
		t.Errorf("standard error ends with %q", text)
	}
	if !strings.Contains(log.String(), `"Starting"`) {
		t.Errorf("standard error begins with %q", log.String()[:min(200, log.Len())])
	}
}
