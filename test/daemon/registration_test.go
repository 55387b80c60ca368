package daemon

import (
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestEveryMachineRegisters: what kubelet shows of every machine that the simulator knows.
func TestEveryMachineRegisters(t *testing.T) {
	t.Parallel()
	type resources map[string]int
	whole := func(n int) map[string]resources { return map[string]resources{"none": {gpu: n}} }
	want := map[string]map[string]resources{ // profile → MIG strategy → resources
		"a100-mig-mixed": {
			"none": {gpu: 8},
			"mixed": {
				gpu: 2, "nvidia.com/mig-1c.3g.40gb": 3, "nvidia.com/mig-1g.10gb": 9, "nvidia.com/mig-1g.10gb.me": 1,
				"nvidia.com/mig-2g.20gb": 2, "nvidia.com/mig-3g.40gb": 4, "nvidia.com/mig-4g.40gb": 1, "nvidia.com/mig-7g.80gb": 1,
			},
			"single": {gpu: 4}, // the 3g.40gb, which most of its GPUs have
		},
		"h100-mig-1g": {"none": {gpu: 8}, "mixed": {"nvidia.com/mig-1g.10gb": 56}, "single": {gpu: 56}},
		"dgx-1":       whole(8),
		"dgx-2":       whole(16),
		"dgx-a100":    whole(8),
		"dgx-b200":    whole(8),
		"dgx-h100":    {"none": {gpu: 8}, "mixed": {gpu: 8}, "single": {gpu: 8}},
		"dgx-h200":    whole(8),
		"l40s-x8":     whole(8),
		"t4":          whole(1),
		"p100-x4":     whole(4),
		"l4-x8":       whole(8),
		"l40-x4":      whole(4),
		"hgx-h20":     whole(8),
		"h100-nvl-x4": whole(4),
		"gb300-nvl72": whole(4),
		"a30-x4": {
			"none": {gpu: 4}, "mixed": {gpu: 2, "nvidia.com/mig-1g.6gb": 4, "nvidia.com/mig-2g.12gb": 2},
		},
		"rtx-pro-6000-x8": {
			"none": {gpu: 8}, "mixed": {
				gpu: 6, "nvidia.com/mig-1g.24gb": 5, "nvidia.com/mig-1g.24gb.me": 1, "nvidia.com/mig-2g.48gb": 1,
			},
		},
	}
	for _, profile := range simulator.Names() {
		if len(want[profile]) == 0 {
			t.Errorf("what %s registers is not known here", profile)
		}
		for strategy, resources := range want[profile] {
			t.Run(profile+" "+strategy, func(t *testing.T) {
				t.Parallel()
				s := open(t, node.Setup{Profile: profile, Args: []string{"--mig-strategy", strategy}})
				s.start()
				quantities := map[string]standin.Quantity{}
				for name, n := range resources {
					quantities[name] = standin.Quantity{Capacity: n, Allocatable: n}
				}
				s.counts(quantities)
				// A kubelet that is slow to take a list in has one registered again: what counts is that
				// nothing else is.
				for _, e := range s.Events(0) {
					if _, wanted := resources[e.Resource]; e.Kind == standin.Registering && !wanted {
						t.Errorf("%s was registered, too", e.Resource)
					}
				}
			})
		}
	}
}

// TestLostAtStartWhilePodsHoldIt: the GPU was the only one of its resource. What the pod holds is
// listed, also after a restart of kubelet, which would crash otherwise as soon as a list without
// the device came.
func TestLostAtStartWhilePodsHoldIt(t *testing.T) {
	t.Parallel()
	const divided = "nvidia.com/mig-7g.80gb"
	s := serving(t, node.Setup{Profile: "a100-mig-mixed", Args: []string{"--mig-strategy=mixed"}})
	s.until("the MIG device is on offer", func() bool { return s.Allocatable(divided) == 1 })
	held := s.admitOf("work", divided, 1)[0]
	if err := s.StopDaemon(); err != nil {
		t.Fatal(err)
	}
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
