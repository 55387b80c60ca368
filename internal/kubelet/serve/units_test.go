package serve_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

const mem = "volcano.sh/gpu-mem.1Gi"

// A unitNode is a node with GPUs in units of 1 GiB, and what its pods hold.
type unitNode struct {
	*node
	clock *clocktesting.FakeClock
	gpus  int
	size  int                 // units of a GPU
	pods  map[string][]string // the IDs of units, by pod
	waits bool                // changes that take devices away wait for ApproveShrink

	// For daemons that startDaemon started.
	unreadable atomic.Bool  // kubelet's checkpoint
	unasked    atomic.Bool  // PodResources does not answer who holds devices
	accounts   sync.RWMutex // locked while nobody is told who holds devices
	waiting    atomic.Int32 // how many questions wait for that
	readings   atomic.Int32 // how many readings of both accounts there were
}

// startDaemon runs Servers on the node until the test ends, or stop is called.
func (n *unitNode) startDaemon(t *testing.T, c clock.WithTicker) *daemon {
	t.Helper()
	directory := n.directory(t)
	return n.startSetOn(t, serve.Collaborators{Accountant: unitAccount{&countedAccount{Accountant: n.account(t, c)}, n},
		Clock: c,
		Checkpoint: func() (kubelet.Checkpoint, error) {
			defer n.await()()
			if n.unreadable.Load() {
				return kubelet.Checkpoint{}, errors.New("it cannot be read")
			}
			return directory.Checkpoint()
		}})
}

// await waits until it is told who holds devices. It is until the function that await returns is
// called.
func (n *unitNode) await() (told func()) {
	n.waiting.Add(1)
	defer n.waiting.Add(-1)
	n.accounts.RLock()
	return n.accounts.RUnlock
}

// awaitReadings waits for further readings of both accounts.
func (n *unitNode) awaitReadings(t *testing.T, count int32) {
	t.Helper()
	last := n.readings.Load() + count
	until(t, n.clock, "readings", func() bool { return n.readings.Load() >= last })
}

// A unitAccount answers as the node's fields say.
type unitAccount struct {
	*countedAccount
	node *unitNode
}

func (a unitAccount) Held(ctx context.Context) ([]kubelet.HeldDevice, error) {
	defer a.node.readings.Add(1)
	defer a.node.await()()
	if a.node.unasked.Load() {
		return nil, errors.New("kubelet is busy")
	}
	return a.countedAccount.Held(ctx)
}

// Allocatable is not answered: no list waits for a comparison, which waits for the clock, and the
// clock runs ahead of kubelet.
func (a unitAccount) Allocatable(context.Context) (map[string][]string, error) {
	return nil, errors.New("kubelet is not asked here")
}

// units returns the plan of a node whose first GPUs are in units, and the others are shared by four
// or whole.
func units(gpus, gib, inUnits int, rules resource.Units) resource.Plan {
	var all []inventory.GPU
	o := resource.Options{Units: rules, Sharing: resource.Sharing{RenameByDefault: true}}
	if rules.Name == "" {
		o.Units.Name = mem
	}
	capability := inventory.ComputeCapability{Major: 9}
	if !rules.MPS {
		capability.Major = 6
	}
	for i := range gpus {
		all = append(all, inventory.GPU{UUID: id(i), Index: i, Minor: i, NUMANode: i / 2,
			Health:      inventory.Health{State: inventory.Healthy},
			MemoryBytes: uint64(gib+1) << 30, ComputeCapability: capability})
		s := resource.Selector{Where: "x", Devices: []resource.Ref{resource.Ref(fmt.Sprint(i))}, Replicas: 1}
		switch {
		case i < inUnits:
			s.Units, s.Replicas = true, 0
		case i == inUnits:
			s.Replicas = 4
		}
		o.Selectors = append(o.Selectors, s)
	}
	return resource.New(inventory.Snapshot{GPUs: all}, o)
}

var byMPS = resource.Units{ReserveMiB: 1024, MPS: true}

func (n *unitNode) apply(d *daemon, rules resource.Units) {
	o := serve.Options{Edits: containeredits.Options{Strategies: []containeredits.Strategy{containeredits.EnvVar},
		MPSRoot: "/run/mps"}, AnnounceShrink: n.waits}
	d.Apply(units(n.gpus+2, n.size, n.gpus, rules), o, 1)
}

// free returns how many units of each GPU no pod holds.
func (n *unitNode) free() []int {
	free := slices.Repeat([]int{n.size}, n.gpus)
	for _, ids := range n.pods {
		for _, unit := range ids {
			free[gpuOf(unit)]--
		}
	}
	return free
}

// gpuOf returns the index of a unit's GPU.
func gpuOf(unit string) int {
	var i int
	_, _ = fmt.Sscanf(unit, "GPU-%08d", &i)
	return i
}

func (n *unitNode) held() int {
	held := 0
	for _, ids := range n.pods {
		held += len(ids)
	}
	return held
}

// settle waits until what is offered beside what pods hold is free on one GPU, the emptiest. Until
// a list has come after the end of a pod, a scheduler counts its units as free, too.
func (n *unitNode) settle(t *testing.T) {
	t.Helper()
	until(t, n.clock, fmt.Sprintf("%d held and %v free", n.held(), n.free()), func() bool {
		held, offered := map[string]bool{}, make([]int, n.gpus)
		for _, ids := range n.pods {
			for _, unit := range ids {
				held[unit] = true
			}
		}
		for unit, healthy := range n.Devices(mem) {
			if healthy && !held[unit] {
				offered[gpuOf(unit)]++
			}
			if !healthy && held[unit] {
				return false
			}
		}
		total := 0
		for _, count := range offered {
			total += count
		}
		return total == slices.Max(n.free()) && slices.Max(offered) == total
	})
}

// awaitLists waits until kubelet has a list of each resource from a life that was registered since
// a mark.
func (n *unitNode) awaitLists(t *testing.T, mark int) {
	t.Helper()
	until(t, n.clock, "lists of all resources", func() bool {
		registered, listed := map[string]bool{}, map[string]bool{}
		for _, e := range n.Events(mark) {
			registered[e.Endpoint] = registered[e.Endpoint] || e.Kind == standin.Registered
			listed[e.Resource] = listed[e.Resource] || e.Kind == standin.Listed && registered[e.Endpoint]
		}
		return listed[mem] && listed["nvidia.com/gpu"] && listed["nvidia.com/gpu.shared"]
	})
}

// admit admits a pod and checks what it was given, from outside.
func (n *unitNode) admit(t *testing.T, pod string, count int) {
	t.Helper()
	got, err := n.Admit(t.Context(), standin.Container{Pod: pod, Name: "c", Resource: mem, Count: count})
	if err != nil {
		t.Fatalf("a pod of %d of %v free, %d offered: %v", count, n.free(), n.Allocatable(mem)-n.held(), err)
	}
	for other, ids := range n.pods {
		for _, unit := range got.IDs {
			if slices.Contains(ids, unit) {
				t.Fatalf("unit %s is given to %s and %s", unit, other, pod)
			}
		}
	}
	n.pods[pod] = got.IDs
	i := gpuOf(got.IDs[0])
	for _, unit := range got.IDs {
		if gpuOf(unit) != i {
			t.Fatalf("%s was given units of two GPUs: %q", pod, got.IDs)
		}
	}
	env := got.Response.GetEnvs()
	if env["NVIDIA_VISIBLE_DEVICES"] != id(i) || env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] != fmt.Sprintf("0=%dM",
		count<<10) ||
		env["CUDA_MPS_PIPE_DIRECTORY"] != "/mps/pipe" {
		t.Fatalf("%s with %d units of %s: %v", pod, count, id(i), env)
	}
}

// newUnitNode returns a node that is served.
func newUnitNode(t *testing.T, v standin.Version, gpus, size int) (*unitNode, *daemon) {
	t.Helper()
	n := &unitNode{node: newNode(t), gpus: gpus, size: size}
	d := n.serve(t, v)
	return n, d
}

// serve starts the kubelet of a node and a daemon, and waits until all GPUs are offered.
func (n *unitNode) serve(t *testing.T, v standin.Version) *daemon {
	t.Helper()
	n.clock, n.pods = clocktesting.NewFakeClock(time.Now()), map[string][]string{}
	n.startKubelet(t, v)
	d := n.startDaemon(t, n.clock)
	n.apply(d, byMPS)
	n.settle(t)
	until(t, n.clock, "the other GPUs", func() bool {
		return n.Allocatable("nvidia.com/gpu") == 1 && n.Allocatable("nvidia.com/gpu.shared") == 4
	})
	return d
}

// Pods come and go on GPUs in units, beside a GPU that is shared and one that is whole. What the
// scheduler counts as free always fits on one GPU, so no pod fails; also while the daemon is
// replaced and kubelet restarts.
func TestPodsOfUnitsFit(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		random := rand.New(rand.NewPCG(3, uint64(len(v))))
		n, d := newUnitNode(t, v, 4, 8)
		others := func() {
			until(t, n.clock, "the other GPUs", func() bool {
				return n.Allocatable("nvidia.com/gpu") == 1 && n.Allocatable("nvidia.com/gpu.shared") == 4
			})
		}
		others()
		for i := range 24 {
			switch pod := fmt.Sprint("p", i); {
			case i%13 == 12:
				d.stop()
				n.awaitEnd(t)
				mark := n.Mark()
				d = n.startDaemon(t, n.clock)
				n.apply(d, byMPS)
				n.awaitLists(t, mark)
			case i%17 == 16:
				mark := n.Mark()
				if err := n.Restart(); err != nil {
					t.Fatal(err)
				}
				n.awaitLists(t, mark)
			case len(n.pods) > 0 && random.IntN(3) == 0:
				for pod := range n.pods {
					n.Remove(pod)
					delete(n.pods, pod)
					break
				}
			default:
				if free := n.Allocatable(mem) - n.held(); free > 0 {
					n.admit(t, pod, 1+random.IntN(free))
				}
				for _, other := range []string{"nvidia.com/gpu", "nvidia.com/gpu.shared"} {
					if _, err := n.Admit(t.Context(), standin.Container{Pod: pod + other, Name: "c", Resource: other,
						Count: 1}); err != nil {
						t.Fatal(err)
					}
					n.Remove(pod + other)
				}
			}
			n.settle(t)
			for _, s := range d.Status() {
				if s.Resource == mem && s.Healthy+s.Unoffered != s.Devices {
					t.Errorf("%d units Healthy and %d not offered of %d, and all GPUs are well", s.Healthy, s.Unoffered, s.Devices)
				}
			}
			others()
		}
		if n.count(standin.Crash, 0) != 0 {
			t.Error("kubelet crashed")
		}
	})
}

// A pausesClock notes how long is waited for.
type pausesClock struct {
	*clocktesting.FakeClock

	mu     sync.Mutex // guards pauses
	pauses []time.Duration
}

func (c *pausesClock) After(d time.Duration) <-chan time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pauses = append(c.pauses, d)
	return c.FakeClock.After(d)
}

// begun reports whether such a pause has begun since it was asked last.
func (c *pausesClock) begun(d time.Duration) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	begun := slices.Contains(c.pauses, d)
	c.pauses = nil
	return begun
}

// After a time without a change the accounts are read every 5 s. When a pod comes, they are read
// within a second, and not after what is left of the 5 s: until then the free units of another GPU
// are not offered.
func TestUnitsAfterAQuietTime(t *testing.T) {
	t.Parallel()
	c := &pausesClock{FakeClock: clocktesting.NewFakeClock(time.Now())}
	n := &unitNode{node: newNode(t), clock: c.FakeClock, gpus: 2, size: 16, pods: map[string][]string{}}
	n.startKubelet(t, standin.V137)
	n.apply(n.startDaemon(t, c), byMPS)
	n.settle(t)
	n.admit(t, "first", 2)
	until(t, n.clock, "a long pause", func() bool { return c.begun(5 * time.Second) })
	n.admit(t, "second", 3)
	poll.Until(t, "a short pause", func() bool { return c.begun(time.Second) })
	n.settle(t)
}

// A container may get more units than the init container of its pod had: the GPU stays offered
// between the two.
func TestUnitsOfAnInitContainer(t *testing.T) {
	t.Parallel()
	n, _ := newUnitNode(t, standin.V137, 2, 8)
	for round := range 4 {
		pod := fmt.Sprint("p", round)
		first, err := n.Admit(t.Context(), standin.Container{Pod: pod, Name: "init", Resource: mem, Count: 2, Init: true})
		if err != nil {
			t.Fatal(err)
		}
		n.admit(t, pod, 4)
		for _, unit := range first.IDs {
			if !slices.Contains(n.pods[pod], unit) {
				t.Errorf("unit %s of the init container is not one of %q", unit, n.pods[pod])
			}
		}
		n.settle(t)
	}
}

// In a roll-out to units of another size, both sizes are asked for all the time: what pods are
// given of a GPU is never more than it has, and it is given in one size alone until no pod holds it
// so.
func TestUnitsOfAnotherSizeInARollOut(t *testing.T) {
	t.Parallel()
	for name, v := range map[string]standin.Version{"1.36": standin.V136, "1.37": standin.V137} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const small = "volcano.sh/gpu-mem.256Mi"
			n, first := newUnitNode(t, v, 2, 8)
			n.admit(t, "a", 3)
			n.settle(t)
			mib := map[string]int{n.pods["a"][0][:12]: 3 << 10} // by GPU
			sizes, next := map[string]map[string]bool{n.pods["a"][0][:12]: {mem: true}}, 0
			ask := func(resource string, size int) {
				next++
				got, err := n.Admit(t.Context(), standin.Container{Pod: fmt.Sprint("p", next), Name: "c", Resource: resource,
					Count: 1})
				if err != nil {
					return // it has none, or the GPU is given in the other size
				}
				gpu := got.IDs[0][:12]
				if mib[gpu] += size; mib[gpu] > n.size<<10 {
					t.Fatalf("GPU %s has %d MiB, and %d are given", gpu, n.size<<10, mib[gpu])
				}
				if sizes[gpu] == nil {
					sizes[gpu] = map[string]bool{}
				}
				if sizes[gpu][resource] = true; len(sizes[gpu]) > 1 {
					t.Fatalf("GPU %s is given in units of two sizes", gpu)
				}
			}
			second := n.startDaemon(t, n.clock)
			other := byMPS
			other.Name = small
			n.apply(second, other)
			for range 40 {
				ask(small, 256)
				ask(mem, 1024)
				n.clock.Step(250 * time.Millisecond)
			}
			var stopped atomic.Bool
			go func() { first.stop(); stopped.Store(true) }()
			until(t, n.clock, "the end of the first daemon", stopped.Load)
			for range 60 {
				ask(mem, 1024)
				ask(small, 256)
				n.clock.Step(250 * time.Millisecond)
			}
			n.Remove("a")
			for i := range next {
				n.Remove(fmt.Sprint("p", i+1))
			}
			until(t, n.clock, "both GPUs in units of the new size", func() bool {
				free := 0
				for _, healthy := range n.Devices(small) {
					if healthy {
						free++
					}
				}
				return free == 32 && n.Allocatable(mem) == 0
			})
		})
	}
}

// A pod that the scheduler sent by an old count, and for which no GPU has enough, fails with the
// reason.
func TestUnitsThatNoGPUHas(t *testing.T) {
	t.Parallel()
	n, d := newUnitNode(t, standin.V137, 2, 8)
	n.admit(t, "a", 3)
	n.settle(t)
	sum := byMPS
	sum.Fit = resource.FitSum
	n.apply(d, sum)
	until(t, n.clock, "all units", func() bool { return n.Allocatable(mem) == 16 })
	n.admit(t, "b", 5)
	n.admit(t, "c", 2)
	_, err := n.Admit(t.Context(), standin.Container{Pod: "d", Name: "c", Resource: mem, Count: 6 + 1})
	if err == nil || !strings.Contains(err.Error(), standin.UnexpectedAdmission) {
		t.Errorf("a pod for which no GPU has enough: %v", err)
	}
}

// A GPU has no more containers than its MPS server has clients: 16 before Volta.
func TestContainersOfAGPUInUnits(t *testing.T) {
	t.Parallel()
	n, d := newUnitNode(t, standin.V137, 1, 20)
	counted := byMPS
	counted.MPS = false
	n.apply(d, counted)
	admit := func(pod string) error {
		got, err := n.Admit(t.Context(), standin.Container{Pod: pod, Name: "c", Resource: mem, Count: 1})
		if err == nil {
			n.pods[pod] = got.IDs
		}
		return err
	}
	for i := range 16 {
		if err := admit(fmt.Sprint("p", i)); err != nil {
			t.Fatal(err)
		}
	}
	err := admit("one more") // where the list did not say so before
	if err == nil || !strings.Contains(err.Error(), "16 containers have units of GPU") &&
		!strings.Contains(err.Error(), "Available: 0") {
		t.Errorf("one more container: %v", err)
	}
	until(t, n.clock, "nothing is free", func() bool { return n.Allocatable(mem) == 16 })
	n.Remove("p0")
	delete(n.pods, "p0")
	n.settle(t)
}

// TestUnitsWhileOneAccountIsSilent: kubelet's other account says which units containers hold.
func TestUnitsWhileOneAccountIsSilent(t *testing.T) {
	t.Parallel()
	for name, silence := range map[string]func(*unitNode) *atomic.Bool{
		"the checkpoint": func(n *unitNode) *atomic.Bool { return &n.unreadable },
		"PodResources":   func(n *unitNode) *atomic.Bool { return &n.unasked },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, d := newUnitNode(t, standin.V137, 2, 8)
			n.admit(t, "before", 1)
			n.settle(t)
			silence(n).Store(true)
			n.awaitReadings(t, 3)
			n.admit(t, "a", 7)
			n.awaitReadings(t, 3)
			n.apply(d, byMPS) // as after a look at the GPUs
			n.settle(t)
			n.admit(t, "b", slices.Max(n.free()))
			for _, pod := range []string{"before", "a"} {
				n.Remove(pod)
				delete(n.pods, pod)
			}
			silence(n).Store(false)
			n.settle(t)
		})
	}
}
