package serve_test

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// An allocationNotes is the account of a daemon that does not ask the kubelet about pods. It notes
// the kubelet's allocations for the questions of the test: a question of the daemon could be under
// way when an allocation begins.
type allocationNotes struct {
	*kubelet.PodResources
	real *kubelet.PodResources // by the real clock
}

func (allocationNotes) Held(context.Context) ([]kubelet.HeldDevice, error) {
	return nil, kubelet.ErrNoPodResources
}

func (a allocationNotes) Allocatable(ctx context.Context) (map[string][]string, error) {
	return a.real.Allocatable(ctx)
}

// TestNoGPUForTwoPods: while kubelet allocates a GPU, another pod has ended and the daemon wants to
// know which pods hold devices. Kubelet, asked at that moment, would forget the GPU and give it to
// the next pod, too. On a busy machine kubelet waits for a CPU after it has chosen.
func TestNoGPUForTwoPods(t *testing.T) {
	t.Parallel()
	for at, kubeletWaits := range map[standin.Moment]time.Duration{standin.BeforeAllocate: 900 * time.Millisecond,
		standin.AfterAllocate: 0} {
		t.Run(string(at), func(t *testing.T) {
			t.Parallel()
			bothVersions(t, func(t *testing.T, v standin.Version) { noGPUForTwoPods(t, v, at, kubeletWaits) })
		})
	}
}

func noGPUForTwoPods(t *testing.T, v standin.Version, at standin.Moment, kubeletWaits time.Duration) {
	t.Helper()
	n := newNode(t)
	n.startKubelet(t, v)
	c := clocktesting.NewFakeClock(time.Now())
	account := n.accountBy(t, c)
	d := n.startDaemonWith(t, clock.RealClock{}, allocationNotes{account, n.account(t, clock.RealClock{})})
	d.offer(2)
	n.awaitAllocatable(t, 2)
	admit := func(pod string) string {
		t.Helper()
		got, err := n.Admit(t.Context(), standin.Container{Pod: pod, Name: "c", Resource: gpu, Count: 1})
		if err != nil {
			t.Fatal(err)
		}
		return got.IDs[0]
	}
	admit("ended")
	var held []kubelet.HeldDevice
	answered := make(chan error, 1)
	mark := n.Mark()
	c.Step(time.Second)
	n.WhileAllocating(func(now standin.Moment) {
		if now != at {
			return
		}
		n.Remove("ended")
		go func() {
			var err error
			held, err = account.Held(t.Context())
			answered <- err
		}()
		asks := func() bool { return c.HasWaiters() || len(answered) > 0 }
		poll.Until(t, "the question is asked or waits", asks)
		for waited := time.Duration(0); waited < kubeletWaits; waited += 50 * time.Millisecond {
			c.Step(50 * time.Millisecond)
			poll.Until(t, "the question is asked or waits on", asks)
		}
	})
	second := admit("second")
	n.WhileAllocating(nil)
	admit("third")
	if got, err := n.Admit(t.Context(), standin.Container{Pod: "fourth", Name: "c", Resource: gpu, Count: 1}); err == nil {
		t.Errorf("three pods have two GPUs, the last one %s", got.IDs)
	}
	if forgotten := n.count(standin.Forgotten, mark); forgotten > 0 || len(answered) > 0 {
		t.Errorf("kubelet was asked while it allocated, and forgot devices %d times", forgotten)
	}
	c.Step(time.Second)
	if err := <-answered; err != nil || !slices.ContainsFunc(held,
		func(d kubelet.HeldDevice) bool { return d.ID == second }) {
		t.Errorf("the answer %v, %v does not name the pod that got a GPU meanwhile", held, err)
	}
}

// TestAnAccountFromBeforeAllocate: a checkpoint that was read before a call of Allocate, and whose
// reading took longer than a device counts as given, does not say that no pod holds the device.
func TestAnAccountFromBeforeAllocate(t *testing.T) {
	t.Parallel()
	c := clocktesting.NewFakeClock(time.Now())
	n := newNode(t)
	n.startKubelet(t, standin.V137)
	directory := n.directory(t)
	var slow atomic.Bool
	begun, returns := make(chan struct{}), make(chan struct{})
	d := n.startSetOn(t, serve.Collaborators{Accountant: noPodResources{n.account(t, c)}, Clock: c,
		Checkpoint: func() (kubelet.Checkpoint, error) {
			saved, err := directory.Checkpoint()
			if slow.Load() {
				begun <- struct{}{}
				<-returns
			}
			return saved, err
		}})
	t.Cleanup(func() { slow.Store(false); close(returns) })
	d.offer(1)
	n.awaitAllocatable(t, 1)
	slow.Store(true)
	o := resource.Options{Sharing: resource.Sharing{Mode: resource.TimeSliced,
		Rules: []resource.SharingRule{{Name: gpu, Replicas: 2}}}}
	d.Apply(resource.New(inventory.Snapshot{GPUs: gpus(1)}, o), asEnvironment, 1)
	<-begun
	if _, err := n.Admit(t.Context(), standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 1}); err != nil {
		t.Fatal(err)
	}
	c.Step(time.Minute)
	returns <- struct{}{}
	<-begun // the first reading has been taken in
	if holds := d.Offered().Value().Holds; len(holds) != 1 || !strings.Contains(holds[0].Reason, "may have allocated it") {
		t.Errorf("the holds are %+v, though a pod has the GPU", holds)
	}
}

// noPodResources is an account on a node where kubelet cannot be asked who holds devices.
type noPodResources struct{ *kubelet.PodResources }

func (noPodResources) Held(context.Context) ([]kubelet.HeldDevice, error) {
	return nil, kubelet.ErrNoPodResources
}
