package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestFIFOs: nobody writes into them, and nothing waits for that. GPUs are served, faults are
// found, and the daemon ends.
func TestFIFOs(t *testing.T) {
	t.Parallel()
	for place, says := range map[string]string{
		"control.sock":                               "a file that is not a socket is there",
		"state/faults.json":                          "is a FIFO",
		"state/faults.lock":                          "",
		"state/quiesce.json":                         "is a FIFO",
		"cdi/k8s.device-plugin.nvidia.com-gpu.json":  "",
		"device-plugins/nvidia-gpu.sock":             "",
		"device-plugins/kubelet_internal_checkpoint": "",
	} {
		t.Run(place, func(t *testing.T) {
			t.Parallel()
			s := open(t, node.Setup{Args: []string{"--device-list-strategy", "envvar,cdi-cri"}})
			fifo := s.Path(place)
			if err := os.MkdirAll(filepath.Dir(fifo), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Mkfifo(fifo, 0o600); err != nil && !errors.Is(err, os.ErrExist) {
				t.Fatal(err)
			}
			s.start()
			s.shows(8, 8)
			if says != "" {
				s.logs(says)
			}
			if place != "control.sock" {
				s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "1", XID: 79})
				s.shows(8, 7)
			}
			daemon := s.Running()
			s.signal(daemon, syscall.SIGTERM)
			s.ends(daemon)
			if err := daemon.Err(); err != nil {
				t.Errorf("it ended with %v", err)
			}
		})
	}
}

// TestFewDescriptors: a daemon that may open no more files says so, goes on, and does what it has
// to once it may again.
func TestFewDescriptors(t *testing.T) {
	t.Parallel()
	s := serving(t, node.Setup{})
	s.call("status", nil)
	limit := func(n uint64) {
		t.Helper()
		var before unix.Rlimit
		if err := unix.Prlimit(s.Running().Pid, unix.RLIMIT_NOFILE, nil, &before); err != nil {
			t.Fatal(err)
		}
		if err := unix.Prlimit(s.Running().Pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: n, Max: before.Max}, nil); err != nil {
			t.Fatal(err)
		}
	}
	limit(4)
	mark := s.Mark()
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_ = control.Call(ctx, s.ControlSocket(), "status", nil, nil) // it cannot be accepted
	s.logs("too many open files")
	limit(1000)
	s.next(mark, standin.Listed)
	s.shows(8, 8)
	s.call("status", nil)
	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "1", XID: 79})
	s.shows(8, 7)
}

// TestStartWithFewDescriptors: a daemon that may open few files from its start says so and ends
// well; the next one, which may open more, serves.
func TestStartWithFewDescriptors(t *testing.T) {
	t.Parallel()
	for _, most := range []int{9, 10, 11, 12, 14} { // with fewer no program in Go starts, and with more nothing is missing
		t.Run(strconv.Itoa(most), func(t *testing.T) {
			t.Parallel()
			s := open(t, node.Setup{})
			enough := s.Daemon
			s.Daemon = s.Path(fmt.Sprint("few-", most))
			if err := os.Symlink(few, s.Daemon); err != nil {
				t.Fatal(err)
			}
			s.start()
			s.logs("too many open files")
			if err := s.StopDaemon(); err != nil {
				t.Errorf("it ended with %v", err)
			}
			s.Daemon = enough
			s.start()
			s.next(0, standin.Listed)
			s.shows(8, 8)
		})
	}
}
