package plugin_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// until moves the clock on, second by second, until done holds, and returns by how much.
func until(t *testing.T, c *clocktesting.FakeClock, what string, done func() bool) time.Duration {
	t.Helper()
	began := c.Now()
	eventually(t, what, func() bool {
		if done() {
			return true
		}
		c.Step(time.Second)
		return false
	})
	return c.Since(began)
}

func TestADeviceLeavesTheListSlowly(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		c := clocktesting.NewFakeClock(time.Now())
		n := newNode(t)
		n.startKubelet(t, v)
		account := &countedAccount{Accountant: n.account(t, c)}
		d := n.startDaemonWith(t, c, account)
		d.offer(8)
		n.awaitAllocatable(t, 8)
		pod := standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 8}
		if _, err := n.Admit(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
		d.offer(7) // the eighth was unplugged
		n.await(t, "Unhealthy", func() bool { healthy, listed := n.Devices(gpu)[id(7)]; return listed && !healthy })

		for range 30 {
			asked := account.asked.Load()
			until(t, c, "a look at the holders", func() bool { return account.asked.Load() > asked })
		}
		if _, listed := n.Devices(gpu)[id(7)]; !listed {
			t.Fatal("the device was dropped while a pod held it")
		}
		if n.PodStatus("p")[gpu][id(7)] {
			t.Error("the pod's device turned Healthy")
		}
		n.Remove("p")
		until(t, c, "dropped", func() bool { return n.Capacity(gpu) == 7 })
		if n.count(standin.Crash, 0) != 0 {
			t.Error("kubelet crashed")
		}
	})
}

// A countedAccount counts how often it was asked who holds devices.
type countedAccount struct {
	plugin.Accountant
	asked atomic.Int64
}

func (a *countedAccount) Held(ctx context.Context) (map[string][]string, error) {
	defer a.asked.Add(1)
	return a.Accountant.Held(ctx)
}

func TestADeviceNobodyHoldsIsDroppedAfterTenSeconds(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		podResources bool
		least, most  time.Duration
	}{
		"kubelet's account can be asked": {true, 10 * time.Second, 60 * time.Second},
		"and where it cannot":            {false, 5 * time.Minute, 10 * time.Minute},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := clocktesting.NewFakeClock(time.Now())
			n := newNode(t)
			if !test.podResources {
				n.podResources = ""
			}
			n.startKubelet(t, standin.V137)
			account := &countedAccount{Accountant: n.account(t, c)}
			d := n.startDaemonWith(t, c, account)
			d.offer(8)
			n.awaitAllocatable(t, 8)
			mark, began := n.Mark(), c.Now()
			d.offer(7)
			n.await(t, "Unhealthy", func() bool { return n.Allocatable(gpu) == 7 })
			for dropped := func() bool { return n.Capacity(gpu) == 7 }; !dropped(); {
				asked := account.asked.Load()
				c.Step(time.Second)
				eventually(t, "a look at the holders", func() bool { return account.asked.Load() > asked || dropped() })
			}
			took := c.Since(began)
			if took < test.least || took > test.most {
				t.Errorf("dropped after %v, want %v to %v", took, test.least, test.most)
			}
			if got := n.count(standin.Registering, mark); got != 0 {
				t.Errorf("%d registrations on the way, want none", got)
			}
		})
	}
}

func TestADeviceThatReturnsStays(t *testing.T) {
	t.Parallel()
	c := clocktesting.NewFakeClock(time.Now())
	n, d := serving(t, standin.V137, c, 8)
	d.offer(7)
	n.awaitAllocatable(t, 7)
	d.offer(8)
	n.awaitAllocatable(t, 8)
	for range 60 {
		c.Step(time.Second)
	}
	d.offer(8, 0)
	n.awaitAllocatable(t, 7)
	if n.Capacity(gpu) != 8 {
		t.Errorf("capacity = %d, want 8", n.Capacity(gpu))
	}
}

func TestAResourceWithoutDevicesKeepsItsStreamUntilTheConfigurationRetiresIt(t *testing.T) {
	t.Parallel()
	c := clocktesting.NewFakeClock(time.Now())
	n := newNode(t)
	n.startKubelet(t, standin.V137)
	// Kubelet's account is not asked, as the clock is faster than kubelet is.
	d := n.startDaemonWith(t, c, &liar{err: errors.New("not here")})
	d.offerUnder(1, 2)
	n.awaitAllocatable(t, 2)
	mark := n.Mark()

	d.Apply(resource.Plan{}, asEnvironment, 1)
	n.awaitAllocatable(t, 0)
	until(t, c, "empty", func() bool { return n.Capacity(gpu) == 0 })
	d.offerUnder(1, 2)
	n.awaitAllocatable(t, 2)
	if n.count(standin.StreamEnded, mark) != 0 {
		t.Error("the stream ended although the configuration stayed")
	}

	d.Apply(resource.Plan{}, asEnvironment, 2)
	n.awaitAllocatable(t, 0)
	until(t, c, "emptied", func() bool { return d.listed() == 0 })
	n.await(t, "without capacity", func() bool { return n.Capacity(gpu) == 0 })
	until(t, c, "retired", func() bool { return len(d.Status()) == 0 })
	n.await(t, "the end of the stream", func() bool { return n.count(standin.StreamEnded, mark) > 0 })
	if left := n.sockets(t); len(left) != 0 {
		t.Errorf("sockets left: %v", left)
	}
}

func TestDevicesOfAnEarlierProcessLeaveSlowlyToo(t *testing.T) {
	t.Parallel()
	c := clocktesting.NewFakeClock(time.Now())
	n, before := serving(t, standin.V137, c, 8)
	if _, err := n.Admit(t.Context(), standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 8}); err != nil {
		t.Fatal(err)
	}
	before.stop()
	mark := n.Mark()
	n.startDaemon(t, c).offer(7)
	n.await(t, "a list", func() bool { return n.count(standin.Listed, mark) > 0 && n.Allocatable(gpu) == 7 })
	if healthy, listed := n.Devices(gpu)[id(7)]; !listed || healthy {
		t.Errorf("the device that a pod still holds is listed=%v healthy=%v, want listed as Unhealthy", listed, healthy)
	}
	n.Remove("p")
	until(t, c, "dropped", func() bool { return n.Capacity(gpu) == 7 })
}
