package daemon

import (
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestLostAtStartWhilePodsHoldIt: the GPU was the only one of its resource. What the pod holds is
// listed, also after a restart of kubelet, which would crash otherwise as soon as a list without
// the device came.
func TestLostAtStartWhilePodsHoldIt(t *testing.T) {
	t.Parallel()
	const divided = "nvidia.com/mig-7g.80gb"
	s := serving(t, node.Setup{Profile: "a100-mig-mixed", Args: []string{"--mig-strategy=mixed"}})
	s.until("the MIG device is offered", func() bool { return s.Allocatable(divided) == 1 })
	held := s.admitOf("work", divided, 1)[0]
	s.stop()
	s.broken(simulator.Fault{Kind: simulator.KindLost, GPU: "7"})
	s.start()
	departs := func() bool {
		healthy, listed := s.Devices(divided)[held]
		return listed && !healthy
	}
	s.until("the pod's device is listed", departs)
	s.allocatable(2)
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	s.until("the pod's device is listed at the new kubelet", departs)
	s.Remove("work")
	s.until("the device is dropped", func() bool { return len(s.Devices(divided)) == 0 })
}

// TestHungDriver: allocations and new streams are answered from what is known while no call into
// the driver returns.
func TestHungDriver(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	s.Args = []string{"--config-file", s.write("config.yaml", "version: v1\nhealth: {unknownGrace: 1h}\n")}
	s.start()
	s.shows(8, 8)
	s.inject(simulator.Fault{Kind: simulator.KindHang})
	s.signal(s.Running(), syscall.SIGHUP) // the health check hangs
	s.admit("work", 2)
	mark := s.Mark()
	if n := s.DropStream(gpu); n != 1 {
		t.Fatalf("%d streams of the GPUs", n)
	}
	if list := s.next(mark, standin.Listed); len(list.Devices) != 8 {
		t.Errorf("the list after the stream ended has %d devices", len(list.Devices))
	}
	s.shows(8, 8)
}
