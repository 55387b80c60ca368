package daemon

import (
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestStory is what make test runs of this package: the GPUs are registered, a pod gets two, one
// fails and is repaired, and kubelet restarts.
func TestStory(t *testing.T) {
	t.Parallel()
	s := serving(t, node.Setup{})
	s.shows(8, 8)
	s.admit("train", 2)
	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 48})
	s.shows(8, 7)
	s.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "3"})
	s.shows(8, 8)
	mark := s.Mark()
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	s.next(mark, standin.Listed)
	s.shows(8, 8)
	s.admit("infer", 6)
}
