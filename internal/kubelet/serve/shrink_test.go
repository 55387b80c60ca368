package serve_test

import (
	"strings"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// A replicated is a node whose two GPUs are offered as four replicas each, by a daemon whose
// changes wait.
type replicated struct {
	*testing.T
	*node
	daemon *daemon
	clock  *clocktesting.FakeClock
}

func newReplicated(t *testing.T, v standin.Version) *replicated {
	t.Helper()
	s := &replicated{T: t, node: newNode(t), clock: clocktesting.NewFakeClock(time.Now())}
	s.startKubelet(t, v)
	s.daemon = s.startDaemon(t, s.clock)
	s.offers(4, true)
	s.awaitAllocatable(t, 8)
	return s
}

// offers has the GPUs offered with so many replicas; one: they are not shared. The GPUs of these
// indices are sick.
func (s *replicated) offers(replicas int, announce bool, sick ...int) {
	all := gpus(2)
	for _, i := range sick {
		all[i].Health = inventory.Health{State: inventory.Unhealthy}
	}
	var o resource.Options
	if replicas > 1 {
		o.Sharing = resource.Sharing{Mode: resource.TimeSliced,
			Rules: []resource.SharingRule{{Name: gpu, Replicas: replicas}}}
	}
	how := asEnvironment
	how.AnnounceShrink = announce
	s.daemon.Apply(resource.New(inventory.Snapshot{GPUs: all}, o), how, 1)
}

// whole reports whether kubelet counts both GPUs and no replica.
func (s *replicated) whole() bool {
	devices := s.Devices(gpu)
	return devices[id(0)] && devices[id(1)] && s.Allocatable(gpu) == 2
}

func (s *replicated) admit(pod string) {
	s.Helper()
	if _, err := s.Admit(s.Context(), standin.Container{Pod: pod, Name: "c", Resource: gpu, Count: 1}); err != nil {
		s.Errorf("a pod that was on its way is refused: %v", err)
	}
}

func TestFewerDevicesWait(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		s := newReplicated(t, v)
		s.offers(1, true)
		if got := s.daemon.PendingShrink().Value(); got != 1 {
			t.Fatalf("the change that waits is %d, want 1", got)
		}
		for _, pod := range []string{"a", "b", "c", "d", "e"} { // sent by the old count
			s.admit(pod)
		}
		s.daemon.ApproveShrink(2)
		if got := s.daemon.PendingShrink().Value(); got != 1 || s.Allocatable(gpu) != 8 {
			t.Errorf("change %d waits, and kubelet counts %d, want 1 and 8", got, s.Allocatable(gpu))
		}
		if holds := s.daemon.Offered().Value().Holds; len(holds) != 2 ||
			!strings.Contains(holds[0].Reason, "is tainted before") {
			t.Errorf("the holds are %+v", holds)
		}
		s.daemon.ApproveShrink(1)
		if got := s.daemon.PendingShrink().Value(); got != 0 {
			t.Errorf("change %d waits still", got)
		}
		s.awaitAllocatable(t, 2)
		for _, pod := range []string{"a", "b", "c", "d", "e"} {
			s.Remove(pod)
		}
		until(t, s.clock, "both GPUs are whole", s.whole)
		if s.count(standin.Crash, 0) != 0 {
			t.Error("kubelet crashed")
		}
	})
}

func TestFewerDevicesWaitThirtySecondsAtMost(t *testing.T) {
	t.Parallel()
	s := newReplicated(t, standin.V137)
	s.offers(1, true)
	s.awaitAllocatable(t, 8)
	waited := until(t, s.clock, "the devices are gone", func() bool { return s.daemon.PendingShrink().Value() == 0 })
	if waited < 30*time.Second || waited > 2*time.Minute { // the clock may be ahead of a process that has no processor
		t.Errorf("it waited for %v, want 30s", waited)
	}
	until(t, s.clock, "both GPUs are whole", s.whole)
	s.offers(4, true)
	until(t, s.clock, "the replicas are there", func() bool { return s.Allocatable(gpu) == 8 })
	s.offers(1, true)
	if got := s.daemon.PendingShrink().Value(); got != 2 {
		t.Errorf("the next change is %d, want 2", got)
	}
}

// TestAChangeBackEndsTheWait: the devices that were to go stay.
func TestAChangeBackEndsTheWait(t *testing.T) {
	t.Parallel()
	s := newReplicated(t, standin.V137)
	s.offers(1, true)
	s.admit("a")
	s.offers(4, true)
	if got := s.daemon.PendingShrink().Value(); got != 0 {
		t.Errorf("change %d waits still", got)
	}
	s.daemon.ApproveShrink(1)
	s.awaitAllocatable(t, 8)
	s.offers(2, true) // some of them go
	if got := s.daemon.PendingShrink().Value(); got != 2 {
		t.Errorf("the next change is %d, want 2", got)
	}
	s.awaitAllocatable(t, 8)
	s.daemon.ApproveShrink(2)
	until(t, s.clock, "four replicas", func() bool { return s.Allocatable(gpu) == 4 })
}

// TestAnotherProcessTakesDevicesAway: a process that starts with another configuration offers what
// the one before it did, until it may go.
func TestAnotherProcessTakesDevicesAway(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		for _, beside := range []bool{true, false} {
			if beside && v == standin.V136 {
				continue // the end of the first stream has its own tests
			}
			s := newReplicated(t, v)
			s.admit("held")
			first := s.daemon
			if !beside {
				first.stop()
				s.awaitEnd(t)
			}
			s.daemon = s.startDaemon(t, s.clock)
			mark := len(s.Events(0))
			s.offers(1, true)
			s.await(t, "the later process lists", func() bool { return s.listedAnew(mark) })
			s.awaitAllocatable(t, 8)
			first.stop()
			s.awaitAllocatable(t, 8)
			s.admit("sent")
			if got := s.daemon.PendingShrink().Value(); got != 1 {
				t.Errorf("the change that waits is %d, want 1", got)
			}
			s.daemon.ApproveShrink(1)
			until(t, s.clock, "the devices are gone", func() bool { return s.Allocatable(gpu) == 2 })
			s.Remove("held")
			s.Remove("sent")
			until(t, s.clock, "both GPUs are whole", s.whole)
		}
	})
}

// TestWhatDoesNotWait: a change that takes nothing away, one that is not to be announced, and
// devices that no pod may be given.
func TestWhatDoesNotWait(t *testing.T) {
	t.Parallel()
	t.Run("more devices", func(t *testing.T) {
		t.Parallel()
		s := newReplicated(t, standin.V137)
		s.offers(8, true)
		until(t, s.clock, "16 replicas", func() bool { return s.Allocatable(gpu) == 16 })
		if got := s.daemon.PendingShrink().Value(); got != 0 {
			t.Errorf("change %d waits", got)
		}
	})
	t.Run("not announced", func(t *testing.T) {
		t.Parallel()
		s := newReplicated(t, standin.V137)
		s.offers(1, false)
		if got := s.daemon.PendingShrink().Value(); got != 0 {
			t.Errorf("change %d waits", got)
		}
		until(t, s.clock, "both GPUs are whole", s.whole)
	})
	t.Run("a sick GPU", func(t *testing.T) {
		t.Parallel()
		s := newReplicated(t, standin.V137)
		s.offers(1, true)
		s.awaitAllocatable(t, 8)
		s.offers(1, true, 0)
		s.awaitAllocatable(t, 4)
		if got := s.daemon.PendingShrink().Value(); got != 1 {
			t.Errorf("change %d waits, want 1", got)
		}
		s.offers(1, true, 0, 1)
		poll.Until(t, "nothing is offered", func() bool { return s.Allocatable(gpu) == 0 })
		if got := s.daemon.PendingShrink().Value(); got != 0 {
			t.Errorf("change %d waits for devices that are sick", got)
		}
	})
}

// TestAKeptDeviceBeginsToDepartWhenItGoes: kubelet may be allocating it, and crashes if the list
// loses it at once.
func TestAKeptDeviceBeginsToDepartWhenItGoes(t *testing.T) {
	t.Parallel()
	s := newReplicated(t, standin.V137)
	s.offers(2, true)
	gone := id(0) + "::3"
	for range 20 {
		s.clock.Step(time.Second)
	}
	s.daemon.ApproveShrink(1)
	s.awaitAllocatable(t, 4)
	if _, listed := s.Devices(gpu)[gone]; !listed {
		t.Error("a device that was offered until now is dropped at once")
	}
	until(t, s.clock, "it is dropped", func() bool { _, listed := s.Devices(gpu)[gone]; return !listed })
}
