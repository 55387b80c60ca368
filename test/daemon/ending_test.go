package daemon

import (
	"net"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// maxEnd is how long the daemon may take to end: so long kubelet waits before it kills a pod. On a
// machine that has nothing else to do it takes two seconds at most, as test/faults prints.
const maxEnd = 30 * time.Second

// TestSIGTERM: the daemon ends soon, leaves nothing of its own and everything of others', and says
// no farewell.
func TestSIGTERM(t *testing.T) {
	t.Parallel()
	for name, faults := range map[string][]simulator.Fault{
		"idle":                 nil,
		"the driver hangs":     {{Kind: simulator.KindHang}},
		"the event wait hangs": {{Kind: simulator.KindHang, Call: "EventSetWait"}},
		"a GPU is lost":        {{Kind: simulator.KindLost, GPU: "1"}},
		"silent connections":   nil,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := serving(t, node.Setup{})
			foreign, err := net.Listen("unix", filepath.Join(filepath.Dir(s.Socket()), "nvidia-gpu.sock"))
			if err != nil {
				t.Fatal(err)
			}
			defer foreign.Close()
			s.inject(faults...)
			if name == "a GPU is lost" {
				s.shows(8, 7)
			}
			if name == "silent connections" {
				s.connect()
			}
			mark, daemon := s.Mark(), s.Running()
			before := s.lastList()
			s.signal(daemon, syscall.SIGTERM)
			s.ends(daemon)
			if err := daemon.Err(); err != nil {
				t.Errorf("it ended with %v", err)
			}
			s.next(mark, standin.StreamEnded)
			if diff := cmp.Diff([]string{"nvidia-gpu.sock"}, s.sockets()); diff != "" {
				t.Errorf("sockets that are left (-want +got):\n%s", diff)
			}
			// One that says the same again is none: the foreign socket may be the reason.
			if diff := cmp.Diff(before, s.lastList()); diff != "" {
				t.Errorf("a list for a farewell (-before +farewell):\n%s", diff)
			}
		})
	}
}

// connect opens a connection to every socket beside kubelet's that says nothing until the test
// ends.
func (s *stage) connect() {
	s.t.Helper()
	for _, name := range s.sockets() {
		conn, err := (&net.Dialer{}).DialContext(s.t.Context(), "unix", filepath.Join(filepath.Dir(s.Socket()), name))
		if err != nil {
			s.t.Fatal(err)
		}
		s.t.Cleanup(func() { _ = conn.Close() })
	}
}

// lastList returns the health of the GPUs, by ID, as kubelet heard of it last.
func (s *stage) lastList() map[string]string {
	last := map[string]string{}
	for _, e := range s.Events(0) {
		if e.Kind != standin.Listed || e.Resource != gpu {
			continue
		}
		clear(last)
		for _, d := range e.Devices {
			last[d.GetID()] = d.GetHealth()
		}
	}
	return last
}

// TestSIGKILL: a daemon that was killed is followed by one that serves, whatever the first one left
// behind.
func TestSIGKILL(t *testing.T) {
	t.Parallel()
	s := serving(t, node.Setup{})
	left := s.sockets()
	s.kill()
	s.shows(8, 0)
	mark := s.Mark()
	s.start()
	s.next(mark, standin.Listed)
	s.shows(8, 8)
	s.admit("work", 8)
	s.eventually("the dead daemon's sockets are removed", func() bool {
		now := s.sockets()
		return len(now) == len(left) && !slices.Contains(now, left[0])
	})
}
