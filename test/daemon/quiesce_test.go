package daemon

import (
	"context"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestRequestsAtOnce makes every two requests at the control socket at the same time: each is
// answered, well or because of the other.
func TestRequestsAtOnce(t *testing.T) {
	t.Parallel()
	s := serving(t, node.Setup{})
	s.shows(8, 8)
	type request struct {
		call      string
		arguments any
	}
	requests := []request{
		{"quiesce", nil}, {"quiesce", map[string]bool{"allocate": true}}, {"resume", nil}, {"health.clear",
			map[string]string{"gpu": "3"}}, {"status", nil},
	}
	for _, first := range requests {
		for _, second := range requests {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			var both sync.WaitGroup
			for _, r := range []request{first, second} {
				both.Go(func() {
					err := control.Call(ctx, s.ControlSocket(), r.call, r.arguments, nil)
					because := err != nil && (strings.Contains(err.Error(), "resume first") ||
						strings.Contains(err.Error(), "resume was requested"))
					if err != nil && !because {
						t.Errorf("%s, of %v and %v at once: %v", r.call, first, second, err)
					}
				})
			}
			both.Wait()
			cancel()
		}
	}
	s.call("resume", nil)
	s.shows(8, 8)
	s.admit("work", 8)
}

// TestQuiesceOutlivesTheProcess: the one that follows leaves the driver alone, whatever ended the
// one before, until resume.
func TestQuiesceOutlivesTheProcess(t *testing.T) {
	t.Parallel()
	for _, end := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		t.Run(end.String(), func(t *testing.T) {
			t.Parallel()
			s := serving(t, node.Setup{})
			s.shows(8, 8)
			s.call("quiesce", nil)
			s.shows(8, 0)
			daemon := s.Running()
			s.signal(daemon, end)
			s.ends(daemon)
			_ = s.StopDaemon() // it was killed, or says the same again
			mark := s.Mark()
			s.start()
			s.firstLine("quiesced: the driver is released since")
			if listed := s.Allocatable(gpu); listed > 0 {
				t.Errorf("%d GPUs can be given out while the driver is released", listed)
			}
			s.call("resume", nil)
			s.next(mark, standin.Listed)
			s.shows(8, 8)
			s.admit("work", 8)
		})
	}
}
