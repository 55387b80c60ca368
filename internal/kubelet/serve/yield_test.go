package serve_test

import (
	"context"
	"flag"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet/scenario"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

type device = pluginapi.Device

// A form is how many replicas each of eight GPUs has: two forms have no device in common.
type form int

const (
	whole  form = 1
	shared form = 5
	third  form = 3
)

// offerForm applies a plan of one resource with the devices of a form, the first GPU on another
// NUMA node if other.
func (d *daemon) offerForm(f form, other bool) {
	all := gpus(8)
	if other {
		all[0].NUMANode = 1
	}
	d.Apply(resource.New(inventory.Snapshot{GPUs: all}, sharedBy(int(f))), asEnvironment, 1)
}

// has reports whether kubelet has healthy devices, and all of one form.
func (n *node) has(f form) bool {
	healthy := 0
	for id, ok := range n.Devices(gpu) {
		_, planned := resource.New(inventory.Snapshot{GPUs: gpus(8)}, sharedBy(int(f))).Resources[0].Device(id)
		if ok && !planned {
			return false
		}
		if ok {
			healthy++
		}
	}
	return healthy == 8*int(f)
}

// churn starts and ends pods until it is stopped, and returns why pods failed.
func (n *node) churn(t *testing.T) (stop func() []error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var pods sync.WaitGroup
	var mu sync.Mutex
	var failed []error
	admitted := 0
	for worker := range 4 {
		pods.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				pod := fmt.Sprintf("pod-%d-%d", worker, i)
				_, err := n.Admit(context.WithoutCancel(ctx), standin.Container{Pod: pod, Name: "c", Resource: gpu, Count: 1})
				mu.Lock()
				if admitted++; err != nil {
					failed = append(failed, fmt.Errorf("%s %s: %w", time.Now().Format("05.000"), pod, err))
				}
				mu.Unlock()
				select {
				case <-ctx.Done():
				case <-time.After(5 * time.Millisecond):
				}
				n.Remove(pod)
			}
		})
	}
	return func() []error {
		cancel()
		pods.Wait()
		t.Logf("%d of %d pods failed", len(failed), admitted)
		return failed
	}
}

// Each takes more than 20 s: a device of an earlier process counts as held for 10 s, and leaves the
// list 10 s after that.
var rollOuts = flag.Int("rollouts", 1, "roll-outs of a change of names")

// TestDaemonsWithDifferentListsTakeTurns rolls a change of names out, in one direction and then in
// the other one, with the next daemon there before the last one ends. Both have something new to
// say all the time.
func TestDaemonsWithDifferentListsTakeTurns(t *testing.T) { // not beside other tests: what it measures needs a processor
	if testing.Short() {
		t.Skip("a roll-out takes 20 s: make test-all runs it")
	}
	bothVersions(t, func(t *testing.T, v standin.Version) {
		n := newNode(t)
		n.startKubelet(t, v)
		forms := []form{whole, shared}
		if v == standin.V137 {
			slices.Reverse(forms) // so that one roll-out at each kubelet has both directions
		}
		formOf := func(i int) form { return forms[i%2] }
		speaks := func(d *daemon, f form) (quiet func()) {
			ctx, cancel := context.WithCancel(t.Context())
			var speaking sync.WaitGroup
			speaking.Go(func() {
				for i := 0; ctx.Err() == nil; i++ {
					mark := n.Mark()
					d.offerForm(f, i%2 == 0)
					// No faster than kubelet takes lists in: they would queue.
					for late := time.Now().Add(time.Second); ctx.Err() == nil && n.count(standin.Listed, mark) == 0 &&
						time.Now().Before(late); {
						select {
						case <-ctx.Done():
						case <-time.After(3 * time.Millisecond):
						}
					}
				}
			})
			return func() { cancel(); speaking.Wait() }
		}
		earlier := n.startDaemon(t, clock.RealClock{})
		quiet := speaks(earlier, formOf(0))
		n.await(t, "the first daemon's devices", func() bool { return n.has(formOf(0)) })
		stop := n.churn(t)
		for i := range *rollOuts {
			f, mark := formOf(i+1), n.Mark()
			later := n.startDaemon(t, clock.RealClock{})
			silent := speaks(later, f)
			n.await(t, "the later daemon's devices", func() bool { return n.listedAnew(mark) && n.has(f) })
			earlier.status(t, "silent", func(s serve.Status) bool { return s.Phase == serve.PhaseYielding })
			mark = n.Mark()
			n.await(t, "lists that were on their way", func() bool { return n.count(standin.Allocated, mark) > 3 })
			endpoint := n.registeredLast()
			mark = n.Mark()
			n.await(t, "ten pods", func() bool { return n.count(standin.Allocated, mark) > 10 })
			for _, e := range n.Events(mark) {
				if e.Kind == standin.Listed && e.Endpoint != endpoint {
					t.Errorf("the earlier daemon sent a list: %v", e)
				}
			}
			mark = n.Mark()
			earlier.stop()
			quiet()
			if v == standin.V136 { // it has forgotten the later daemon
				n.await(t, "the later daemon again", func() bool { return n.listedAnew(mark) })
			}
			earlier, quiet = later, silent
			n.await(t, "the later daemon's devices", func() bool { return n.has(f) })
		}
		quiet()
		const most = 3 // of some hundred for each roll-out
		raced := 0
		for _, err := range stop() {
			// Kubelet chose a replica at the moment at which it gave the GPU to another pod once more in its
			// old form: ADR 17. On a slow machine the later process may not know such a replica at all:
			// TestADeviceThatOnlyTheEarlierProcessKnowsIsNotGiven.
			unknown := strings.Contains(err.Error(), "unknown device") && strings.Contains(err.Error(), "::")
			if unknown || strings.Contains(err.Error(), "is not healthy: its GPU may still be in use as") {
				if raced++; raced <= most {
					t.Log(err)
					continue
				}
			}
			t.Error(err)
		}
		if crashes := n.count(standin.Crash, 0); crashes > 0 {
			t.Errorf("kubelet would have crashed %d times", crashes)
		}
	})
}

// A later process may have read kubelet's checkpoint before the earlier one offered a device.
// Kubelet chooses that device, and then has the list of the later process, which lacks it: kubelet
// crashes if anybody gives it now. So the pod is refused, and the next one gets a device.
func TestADeviceThatOnlyTheEarlierProcessKnowsIsNotGiven(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		n := newNode(t)
		n.startKubelet(t, v)
		n.startDaemon(t, clock.RealClock{}).offerForm(shared, false)
		n.await(t, "the earlier daemon's devices", func() bool { return n.has(shared) })
		n.WhileAllocating(func(standin.Moment) {
			n.WhileAllocating(nil)
			mark := n.Mark()
			n.startSetOn(t, serve.Collaborators{Accountant: n.account(t, clock.RealClock{}), Clock: clock.RealClock{},
				Checkpoint: func() (kubelet.Checkpoint, error) { return kubelet.Checkpoint{}, nil }}).offerForm(whole, false)
			n.await(t, "the later daemon's list", func() bool { return n.listedAnew(mark) && n.has(whole) })
		})
		pod := standin.Container{Pod: "pod", Name: "c", Resource: gpu, Count: 1}
		if _, err := n.Admit(t.Context(), pod); err == nil || !strings.Contains(err.Error(), "unknown device") {
			t.Errorf("the pod whose device only the earlier process knows: %v; want that the device is unknown", err)
		}
		if _, err := n.Admit(t.Context(), pod); err != nil {
			t.Errorf("the next pod: %v", err)
		}
		if crashes := n.count(standin.Crash, 0); crashes > 0 {
			t.Errorf("kubelet would have crashed %d times", crashes)
		}
	})
}

// registeredLast returns the endpoint that registered last.
func (n *node) registeredLast() (endpoint string) {
	for _, e := range n.Events(0) {
		if e.Kind == standin.Registered {
			endpoint = e.Endpoint
		}
	}
	return endpoint
}

// A laterServer is a server of a process of this program that started later, and does what a test
// tells it.
type laterServer struct {
	*scenario.Plugin
	name string
}

// later starts one on the node. It has one device, and does not register.
func (n *node) later(t *testing.T) laterServer {
	t.Helper()
	name := filepath.Base(n.directory(t).NewEndpoint(gpu))
	p, err := scenario.StartPlugin(n.dir, name, gpu, scenario.Script{})
	check(t, err)
	t.Cleanup(p.Stop)
	p.Send(&device{ID: "LATER-0", Health: pluginapi.Healthy})
	return laterServer{p, name}
}

func yielding(s serve.Status) bool { return s.Phase == serve.PhaseYielding }
func agreed(s serve.Status) bool   { return s.Phase == serve.PhaseServing && s.Agreed }

func TestTheEarlierServesAgainWhenTheLaterEnds(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		n, d := serving(t, v, clock.RealClock{}, 2)
		later := n.later(t)
		check(t, later.Register(t.Context()))
		d.status(t, "silent", yielding)
		n.awaitAllocatable(t, 1)
		mark := n.Mark()
		d.offer(3)
		if _, err := n.Admit(t.Context(), standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 1}); err != nil {
			t.Errorf("a pod is refused: %v", err)
		}
		n.Remove("p")
		if n.count(standin.Listed, mark)+n.count(standin.Registering, mark) > 0 {
			t.Errorf("kubelet saw %v of the earlier one", n.Events(mark))
		}
		later.Stop()
		n.await(t, "the earlier one's devices, of a new life",
			func() bool { return n.listedAnew(mark) && n.Allocatable(gpu) == 3 })
		d.status(t, "agreed", agreed)
		_, err := n.Admit(t.Context(), standin.Container{Pod: "q", Name: "c", Resource: gpu, Count: 3})
		check(t, err)
	})
}

// A process that is killed leaves its socket behind, which refuses connections.
func TestTheSocketOfADeadLaterProcessSilencesNobody(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		n, d := serving(t, v, clock.RealClock{}, 2)
		path := n.directory(t).NewEndpoint(gpu)
		listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		check(t, err)
		listener.SetUnlinkOnClose(false)
		d.status(t, "silent", yielding)
		check(t, listener.Close())
		d.status(t, "agreed", agreed)
		// So it is for a process that starts then, and for a new life.
		mark := n.Mark()
		n.DropStream(gpu)
		n.await(t, "registered again", func() bool { return n.listedAnew(mark) && n.Allocatable(gpu) == 2 })
	})
}

// Kubelet may never take the later process's registration. The earlier one's stream is as good as
// before.
func TestALaterProcessThatIsNotRegisteredCostsTheEarlierNothing(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		n, d := serving(t, v, clock.RealClock{}, 2)
		d.status(t, "agreed", agreed)
		mark := n.Mark()
		later := n.later(t)
		d.status(t, "silent", yielding)
		d.offer(3)
		later.Stop()
		n.awaitAllocatable(t, 3)
		for _, e := range n.Events(mark) {
			if e.Kind != standin.Listed {
				t.Errorf("kubelet saw %v", e)
			}
		}
	})
}

// Neither sockets of other resources in the kubelet's folder nor a plugin that registers and ends change
// more than the list.
func TestServersOfOtherResourcesAreNoRivals(t *testing.T) {
	t.Parallel()
	n, d := serving(t, standin.V137, clock.RealClock{}, 2)
	directory := n.directory(t)
	for _, resource := range []string{"nvidia.com/gpu.shared", "example.com/gpu", "nvidia.com/mig-1g.10gb"} {
		p, err := scenario.StartPlugin(n.dir, filepath.Base(directory.NewEndpoint(resource)), resource, scenario.Script{})
		check(t, err)
		t.Cleanup(p.Stop)
	}
	poll.Until(t, "seen", func() bool { return len(d.sockets.Value()) == 4 })
	d.status(t, "agreed", agreed)
	mark := n.Mark()
	theirs, err := scenario.StartPlugin(n.dir, "rdma.sock", "example.com/rdma", scenario.Script{})
	check(t, err)
	t.Cleanup(theirs.Stop)
	theirs.Send(&device{ID: "rdma", Health: pluginapi.Healthy})
	check(t, theirs.Register(t.Context()))
	d.offer(3)
	n.awaitAllocatable(t, 3)
	theirs.Stop()
	d.offer(2)
	n.awaitAllocatable(t, 2)
	d.status(t, "serving", func(s serve.Status) bool { return s.Phase == serve.PhaseServing })
	for _, e := range n.Events(mark) {
		if e.Resource == gpu && e.Kind != standin.Listed {
			t.Errorf("the kubelet saw %v", e)
		}
	}
}

// Each daemon has a life at the new kubelet; in the end the list is the latest's, and it is the one
// that is asked.
func TestTheLatestServesAfterARestartOfKubelet(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		n := newNode(t)
		n.startKubelet(t, v)
		var daemons []*daemon
		forms := []form{whole, shared, third}
		for _, f := range forms {
			mark := n.Mark()
			d := n.startDaemon(t, clock.RealClock{})
			d.offerForm(f, false)
			n.await(t, "its list", func() bool { return n.listedAnew(mark) })
			daemons = append(daemons, d)
		}
		pods := 0
		settled := func() {
			t.Helper()
			latest := daemons[len(daemons)-1]
			latest.status(t, "agreed", agreed)
			for _, d := range daemons[:len(daemons)-1] {
				d.status(t, "silent", yielding)
			}
			n.await(t, "the latest's devices", func() bool { return n.has(forms[len(daemons)-1]) })
			poll.Until(t, "a pod gets a device", func() bool { // one that kubelet admits before all have settled may not
				pods++
				pod := standin.Container{Pod: fmt.Sprint("pod-", pods), Name: "c", Resource: gpu, Count: 1}
				_, err := n.Admit(t.Context(), pod)
				n.Remove(pod.Pod)
				return err == nil
			})
		}
		settled()
		for range 5 {
			check(t, n.Restart())
			n.await(t, "devices", func() bool { return n.Allocatable(gpu) > 0 })
			settled()
		}
		daemons[2].stop()
		daemons = daemons[:2]
		settled()
	})
}

// A pausedRegistrar registers only when the test allows it.
type pausedRegistrar struct {
	*kubelet.Directory
	locks  chan struct{} // has a value after each call of LockRegistrations began
	lock   chan struct{} // lets LockRegistrations continue; nil if it never waits
	called chan struct{} // has a value after each call of Register began
	goOn   chan struct{} // lets Register continue; closed when all calls may
	held   atomic.Int64  // locks that are not unlocked
}

func newPausedRegistrar(d *kubelet.Directory) *pausedRegistrar {
	return &pausedRegistrar{Directory: d, locks: make(chan struct{}, 9), called: make(chan struct{}, 9),
		goOn: make(chan struct{})}
}

func (r *pausedRegistrar) LockRegistrations(ctx context.Context) (unlock func(), locked bool) {
	r.locks <- struct{}{}
	if r.lock != nil {
		select {
		case <-r.lock:
		case <-ctx.Done():
		}
	}
	defer r.held.Add(1)
	inner, locked := r.Directory.LockRegistrations(ctx)
	return sync.OnceFunc(func() {
		inner()
		r.held.Add(-1)
	}), locked
}

func (r *pausedRegistrar) Register(
	ctx context.Context, incarnation uint64, resource, endpoint string, options *pluginapi.DevicePluginOptions,
) error {
	r.called <- struct{}{}
	select {
	case <-r.goOn:
	case <-ctx.Done():
		return ctx.Err()
	}
	return r.Directory.Register(ctx, incarnation, resource, endpoint, options)
}

// Where a kubelet comes for which two processes register at once, the earlier one must not be
// registered last: kubelet 1.36 would count the later one's devices and ask the earlier one, which
// ends.
func TestRegistrationsOfTwoProcessesFollowEachOther(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		n := newNode(t)
		n.startKubelet(t, v)
		start := func(devices int) (*daemon, *pausedRegistrar) {
			r := newPausedRegistrar(n.directory(t))
			d := n.startSetOn(t, serve.Collaborators{Registrar: r, Accountant: n.account(t, clock.RealClock{}),
				Clock: clock.RealClock{}})
			d.offer(devices)
			return d, r
		}
		earlier, first := start(2)
		<-first.called // it has seen no later process
		later, second := start(3)
		close(second.goOn)
		<-first.locks
		<-second.locks
		close(first.goOn)
		n.awaitAllocatable(t, 3)
		later.status(t, "agreed", agreed)
		earlier.status(t, "silent", yielding)
		var endpoints []string
		for _, e := range n.Events(0) {
			if e.Kind == standin.Registering {
				endpoints = append(endpoints, e.Endpoint)
			}
		}
		if first.held.Load() != 0 || second.held.Load() != 0 {
			t.Error("a process that serves keeps others from registering")
		}
		// The names of sockets are in the order in which processes started.
		if len(endpoints) != 2 || endpoints[0] >= endpoints[1] {
			t.Errorf("kubelet was called for %q, want the earlier process and then the later one", endpoints)
		}
		_, err := n.Admit(t.Context(), standin.Container{Pod: "pod", Name: "c", Resource: gpu, Count: 3})
		check(t, err)
	})
}

// The second resource of Servers begins its lives; those of the first go on.
func TestAResourceThatComesLaterStartsNoOtherAgain(t *testing.T) {
	t.Parallel()
	n, d := serving(t, standin.V137, clock.RealClock{}, 2)
	mark := n.Mark()
	const later = "nvidia.com/later"
	all := resource.New(inventory.Snapshot{GPUs: gpus(4)}, resource.Options{}).Resources[0]
	first, second := all, all
	first.Devices = all.Devices[:2]
	second.Name, second.Devices = later, all.Devices[2:]
	d.Apply(resource.Plan{Resources: []resource.Resource{first, second}}, asEnvironment, 1)
	n.await(t, "the second resource", func() bool { return n.Allocatable(later) == 2 })
	d.offer(2)
	mark2 := n.Mark()
	d.offer(2, 1)
	n.awaitAllocatable(t, 1)
	for _, e := range n.Events(mark) {
		if e.Resource == gpu && e.Kind == standin.Registering {
			t.Error("the first resource was registered again")
		}
	}
	if lists := slices.DeleteFunc(n.Events(mark2),
		func(e standin.Event) bool { return !standin.Is(standin.Listed, gpu)(e) }); len(lists) != 1 {
		t.Errorf("one change came in %d lists", len(lists))
	}
}
