package serve_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/quiet"
)

// until moves the clock on, second by second, until done holds, and returns by how much.
func until(t *testing.T, c *clocktesting.FakeClock, what string, done func() bool) time.Duration {
	t.Helper()
	began := c.Now()
	poll.Until(t, what, func() bool {
		if done() {
			return true
		}
		quiet.Wait(20 * time.Millisecond) // the clock does not run ahead of answers that take long
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

// A countedAccount counts how often it was asked who holds devices. Its clock is faster than
// kubelet's, which refuses questions that come too fast; it asks again then.
type countedAccount struct {
	serve.Accountant
	asked    atomic.Int64
	compared atomic.Int64 // how often it was asked what kubelet counts
}

func (a *countedAccount) Held(ctx context.Context) ([]kubelet.HeldDevice, error) {
	defer a.asked.Add(1)
	return insist(func() ([]kubelet.HeldDevice, error) { return a.Accountant.Held(ctx) })
}

func (a *countedAccount) Allocatable(ctx context.Context) (map[string][]string, error) {
	defer a.compared.Add(1)
	return insist(func() (map[string][]string, error) { return a.Accountant.Allocatable(ctx) })
}

// insist asks again until kubelet does not refuse the question as one that comes too fast.
func insist[T any](ask func() (T, error)) (T, error) {
	for {
		answer, err := ask()
		if status.Code(errors.Unwrap(err)) != codes.ResourceExhausted {
			return answer, err
		}
		time.Sleep(time.Millisecond)
	}
}

// pass moves the clock on, second by second, with a reading of kubelet's accounts in each.
func (a *countedAccount) pass(t *testing.T, c *clocktesting.FakeClock, seconds int) {
	t.Helper()
	for range seconds {
		asked := a.asked.Load()
		c.Step(time.Second)
		poll.Until(t, "a look at the holders", func() bool { return a.asked.Load() > asked })
	}
}

func TestADeviceNobodyHoldsIsDroppedAfterTenSeconds(t *testing.T) {
	t.Parallel()
	for _, podResources := range []bool{true, false} {
		t.Run(fmt.Sprint("PodResources ", podResources), func(t *testing.T) {
			t.Parallel()
			c := clocktesting.NewFakeClock(time.Now())
			n := newNode(t)
			if !podResources {
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
				poll.Until(t, "a look at the holders", func() bool { return account.asked.Load() > asked || dropped() })
			}
			if took := c.Since(began); took < 10*time.Second || took > 20*time.Second {
				t.Errorf("dropped after %v, want 10 s to 20 s", took)
			}
			if got := n.count(standin.Registering, mark); got != 0 {
				t.Errorf("%d registrations on the way, want none", got)
			}
			asked := account.asked.Load()
			for range 5 {
				c.Step(time.Second)
			}
			if got := account.asked.Load(); got > asked+1 {
				t.Errorf("kubelet was asked %d times who holds devices although none departs", got-asked)
			}
		})
	}
}

// A pod holds a GPU on a node with a Topology Manager policy, and the configuration begins to share
// it. Whatever keeps kubelet's accounts from telling of the pod, its device stays listed, so that
// kubelet does not crash when it admits the pod again.
func TestADeviceThatAPodHoldsIsNeverDropped(t *testing.T) {
	t.Parallel()
	pod := standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 1, SingleNode: true}
	tests := map[string]struct {
		init      bool
		noAccount bool
		// happens is what keeps the accounts from telling of the pod, and takes its time.
		happens func(t *testing.T, n *node, pass func(seconds int))
	}{
		"the API server is away while kubelet restarts": {happens: func(t *testing.T, n *node, pass func(int)) {
			n.SetPodsKnown(false)
			check(t, n.Restart())
			pass(60)
		}},
		"kubelet is down for two minutes": {happens: func(t *testing.T, n *node, pass func(int)) {
			n.Stop()
			pass(120)
			check(t, n.Resume())
			pass(60)
		}},
		"a plain init container is the holder": {init: true, happens: func(_ *testing.T, _ *node,
			pass func(int)) {
			pass(120)
		}},
		"there is no PodResources": {noAccount: true,
			happens: func(_ *testing.T, _ *node, pass func(int)) { pass(120) }},
		"there is no PodResources, and kubelet restarts without the API server": {noAccount: true,
			happens: func(t *testing.T, n *node, pass func(int)) {
				n.SetPodsKnown(false)
				check(t, n.Restart())
				pass(60)
			}},
		"what kubelet saved is damaged, and PodResources tells of no init container": {init: true,
			happens: func(t *testing.T, n *node, pass func(int)) {
				path := filepath.Join(n.dir, "kubelet_internal_checkpoint")
				for range 60 { // kubelet writes it again and again, as the list is sent again
					text, err := os.ReadFile(path)
					check(t, err)
					check(t, os.WriteFile(path, bytes.Replace(text, []byte("GPU-"), []byte("GPU+"), 1), 0o600))
					pass(1)
				}
			}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bothVersions(t, func(t *testing.T, v standin.Version) {
				c := clocktesting.NewFakeClock(time.Now())
				n := newNode(t)
				if test.noAccount {
					n.podResources = ""
				}
				n.startKubelet(t, v)
				account := &countedAccount{Accountant: n.account(t, c)}
				d := n.startDaemonWith(t, c, account)
				d.offer(1)
				n.awaitAllocatable(t, 1)
				pod := pod
				pod.Init = test.init
				if _, err := n.Admit(t.Context(), pod); err != nil {
					t.Fatal(err)
				}
				d.Apply(resource.New(inventory.Snapshot{GPUs: gpus(3)[1:]}, resource.Options{}), asEnvironment, 2)
				n.awaitAllocatable(t, 2)
				test.happens(t, n, func(seconds int) { account.pass(t, c, seconds) })
				n.SetPodsKnown(true)
				n.await(t, "served", func() bool { return n.Allocatable(gpu) == 2 })
				if healthy, listed := n.Devices(gpu)[id(0)]; !listed || healthy {
					t.Fatalf("the pod's device is listed %v, Healthy %v, want it listed as Unhealthy", listed, healthy)
				}
				var failed *standin.PodError
				if _, err := n.Admit(t.Context(), pod); errors.Is(err, standin.ErrCrash) {
					t.Fatal("kubelet crashed")
				} else if errors.As(err, &failed) && failed.Reason == standin.TopologyAffinity {
					t.Errorf("the pod that runs was refused: %v", err)
				}
				n.Remove("p")
				if !test.noAccount { // asked through PodResources, kubelet sees that the pod has ended
					until(t, c, "dropped", func() bool { return n.Capacity(gpu) == 2 })
				}
			})
		})
	}
}

// sharedBy returns options by which each GPU has so many replicas.
func sharedBy(replicas int) resource.Options {
	if replicas == 1 {
		return resource.Options{}
	}
	rule := resource.SharingRule{Name: gpu, Replicas: replicas}
	return resource.Options{Sharing: resource.Sharing{Mode: resource.TimeSliced, Rules: []resource.SharingRule{rule}}}
}

func TestNothingIsDroppedWhereNoAccountCanBeRead(t *testing.T) {
	t.Parallel()
	c := clocktesting.NewFakeClock(time.Now())
	n := newNode(t)
	n.podResources = ""
	n.startKubelet(t, standin.V137)
	account := &countedAccount{Accountant: n.account(t, c)}
	path := filepath.Join(n.dir, "kubelet_internal_checkpoint")
	d := n.startSetOn(t, serve.Collaborators{Accountant: account, Clock: c,
		Checkpoint: func() (kubelet.Checkpoint, error) { return kubelet.Checkpoint{}, os.Remove(path + ".missing") }})
	d.offer(2)
	n.awaitAllocatable(t, 2)
	d.offer(1)
	n.awaitAllocatable(t, 1)
	account.pass(t, c, 120)
	if n.Capacity(gpu) != 2 {
		t.Errorf("capacity = %d after 2 minutes without an account, want 2", n.Capacity(gpu))
	}
	d.status(t, "one device waits for the account", func(s serve.Status) bool {
		return len(s.Retiring) == 1 && s.Retiring[0].ID == id(1) && strings.Contains(s.Retiring[0].Waiting, "no such file")
	})
}

// A badAccount is a PodResources service as a test wants it.
type badAccount struct {
	serve.Accountant
	answer func(ctx context.Context) error // of the question what kubelet counts; nil has it answered
}

func (a badAccount) Allocatable(ctx context.Context) (map[string][]string, error) {
	if err := a.answer(ctx); err != nil {
		return nil, err
	}
	all, err := a.Accountant.Allocatable(ctx)
	for resource, ids := range all {
		all[resource] = ids[:len(ids)/2]
	}
	return all, err
}

func (a badAccount) Held(ctx context.Context) ([]kubelet.HeldDevice, error) {
	if err := a.answer(ctx); err != nil {
		return nil, err
	}
	return nil, nil
}

// However PodResources answers a daemon that starts, the devices of the one before it stay listed,
// with their NUMA nodes.
func TestWhatPodResourcesAnswersAtTheStartLosesNothing(t *testing.T) {
	t.Parallel()
	tests := map[string]func(ctx context.Context) error{
		"too many questions": func(context.Context) error { return status.Error(codes.ResourceExhausted, "rejected by rate limit") },
		"late":               func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
		"half":               func(context.Context) error { return nil },
	}
	for name, answer := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bothVersions(t, func(t *testing.T, v standin.Version) {
				n, before := serving(t, v, clock.RealClock{}, 8)
				pod := standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 4, SingleNode: true}
				if _, err := n.Admit(t.Context(), pod); err != nil {
					t.Fatal(err)
				}
				before.stop()
				n.awaitEnd(t)
				mark := n.Mark()
				d := n.startDaemonWith(t, clock.RealClock{}, badAccount{Accountant: n.account(t, clock.RealClock{}),
					answer: answer})
				d.offerUnder(2, 1)
				n.await(t, "a list", func() bool { return n.count(standin.Listed, mark) > 0 && n.Allocatable(gpu) == 1 })
				if got := n.Capacity(gpu); got != 8 {
					t.Errorf("%d devices are listed, want the 8 of before", got)
				}
				n.SetPodsKnown(false)
				check(t, n.Restart())
				n.await(t, "served again", func() bool { return n.Allocatable(gpu) == 1 })
				n.SetPodsKnown(true)
				var failed *standin.PodError
				if _, err := n.Admit(t.Context(), pod); !errors.As(err, &failed) || failed.Reason != standin.UnexpectedAdmission {
					t.Errorf("the pod's admission after kubelet's restart: %v, want %s, which a running container is spared", err,
						standin.UnexpectedAdmission)
				}
			})
		})
	}
}

// Where kubelet's checkpoint cannot be read, PodResources tells a daemon that starts which devices
// the one beside it listed, and the NUMA nodes of those that pods hold. A PodResources that does
// not answer is not waited for: pods that come before the registration fail.
func TestWithoutACheckpointPodResourcesTellsWhatWasListed(t *testing.T) {
	t.Parallel()
	for name, answers := range map[string]bool{"it answers": true, "it does not answer": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bothVersions(t, func(t *testing.T, v standin.Version) {
				n, _ := serving(t, v, clock.RealClock{}, 8)
				got, err := n.Admit(t.Context(), standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 4, SingleNode: true})
				check(t, err)
				var account serve.Accountant = &countedAccount{Accountant: n.account(t, clock.RealClock{})}
				// the answer has a second, and a slow machine takes longer
				var c clock.WithTicker = clocktesting.NewFakeClock(time.Now())
				if !answers {
					c = clock.RealClock{}
					account = badAccount{Accountant: account,
						answer: func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }}
				}
				mark := n.Mark()
				d := n.startSetOn(t, serve.Collaborators{Accountant: account, Clock: c,
					Checkpoint: func() (kubelet.Checkpoint, error) { return kubelet.Checkpoint{}, errors.New("of a later kubelet") }})
				d.offerUnder(2, 1)
				n.await(t, "the later daemon's list",
					func() bool { return n.count(standin.Listed, mark) > 0 && n.Allocatable(gpu) == 1 })
				if !answers {
					return
				}
				listed := map[string]*device{}
				for _, e := range n.Events(mark) {
					if e.Kind == standin.Listed {
						clear(listed)
					}
					for _, d := range e.Devices {
						listed[d.GetID()] = d
					}
				}
				if len(listed) != 8 {
					t.Errorf("%d devices are listed, want the 8 of before", len(listed))
				}
				for _, id := range got.IDs {
					if nodes := listed[id].GetTopology().GetNodes(); len(nodes) != 1 {
						t.Errorf("%s, which a pod holds, is listed with the NUMA nodes %v", id, nodes)
					}
				}
			})
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
	n.awaitEnd(t)
	mark := n.Mark()
	n.startDaemonWith(t, c, &countedAccount{Accountant: n.account(t, c)}).offer(7)
	n.await(t, "a list", func() bool { return n.count(standin.Listed, mark) > 0 && n.Allocatable(gpu) == 7 })
	if healthy, listed := n.Devices(gpu)[id(7)]; !listed || healthy {
		t.Errorf("the device that a pod still holds is listed=%v healthy=%v, want listed as Unhealthy", listed, healthy)
	}
	n.Remove("p")
	until(t, c, "dropped", func() bool { return n.Capacity(gpu) == 7 })
}

// The list that kubelet knows is nearly as long as kubelet accepts, and a configuration replaces it
// by another such list: the two do not fit together. Kubelet gets as much of the new one as fits,
// and the rest once devices were dropped.
func TestDepartingDevicesCountInWhatFitsIntoAList(t *testing.T) {
	t.Parallel()
	const replicas = 2000 // a little over 1,000 bytes each, and kubelet accepts 4 MiB
	shared := func(uuid string, replicas int) resource.Plan {
		g := gpus(1)
		g[0].UUID += strings.Repeat(uuid, 1000)
		return resource.New(inventory.Snapshot{GPUs: g}, resource.Options{Sharing: resource.Sharing{Mode: resource.TimeSliced,
			Rules: []resource.SharingRule{{Name: gpu, Replicas: replicas}}}})
	}
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprint("restart ", restart), func(t *testing.T) {
			t.Parallel()
			c := clocktesting.NewFakeClock(time.Now())
			n, d := serving(t, standin.V137, c, 1)
			d.Apply(shared("a", replicas), asEnvironment, 2)
			n.awaitAllocatable(t, replicas)
			pod := standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 1}
			got, err := n.Admit(t.Context(), pod)
			if err != nil {
				t.Fatal(err)
			}
			mark := n.Mark()
			if restart {
				d.stop()
				n.awaitEnd(t)
				d = n.startDaemon(t, c)
			}
			d.Apply(shared("b", 2*replicas-100), asEnvironment, 3)
			n.await(t, "a list of both", func() bool {
				return n.Capacity(gpu) > replicas+replicas/2 && n.Allocatable(gpu) > replicas/2 &&
					n.Allocatable(gpu) < 2*replicas-100
			})
			if healthy, listed := n.Devices(gpu)[got.IDs[0]]; healthy || !listed {
				t.Errorf("the pod's device is Healthy %v and listed %v", healthy, listed)
			}
			n.Remove("p")
			until(t, c, "all of the new list", func() bool { return n.Allocatable(gpu) == 2*replicas-100 && n.Capacity(gpu) == 2*replicas-100 })
			for _, e := range n.Events(mark) {
				if e.Kind == standin.StreamEnded && status.Code(e.Err) == codes.ResourceExhausted {
					t.Error("kubelet refused a list")
				}
			}
			if n.count(standin.Crash, 0) > 0 {
				t.Error("kubelet crashed")
			}
		})
	}
}
