package offer_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/edits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/offer"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

const gpu = "nvidia.com/gpu"

// A node has a stand-in kubelet and two GPUs, of which daemons offer what a test wants.
type node struct {
	*standin.Kubelet
	dir       string
	clock     *clocktesting.FakeClock
	directory *kubelet.Directory
	account   *account
	configs   *feed.Feed[config.Config]
	snapshots *feed.Feed[inventory.Snapshot]
	offered   *feed.Feed[resource.Plan]
	daemon    *plugin.Set
	unread    bool // what kubelet has saved cannot be read
}

func newNode(t *testing.T, podResources bool) *node {
	t.Helper()
	root, err := os.MkdirTemp("", "n")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	n := &node{dir: filepath.Join(root, "d"), clock: clocktesting.NewFakeClock(time.Now())}
	socket := ""
	if podResources {
		socket = filepath.Join(root, "p.sock")
	}
	if n.Kubelet, err = standin.Start(standin.Options{Dir: n.dir, PodResourcesSocket: socket}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Stop)
	if n.directory, err = kubelet.NewDirectory(n.Socket(), nil); err != nil {
		t.Fatal(err)
	}
	n.account = &account{PodResources: kubelet.NewPodResources(socket, n.clock)}
	t.Cleanup(func() { _ = n.account.Close() })
	n.configs, n.snapshots, n.offered = feed.New(whole()), feed.New(gpus()), feed.New(resource.Plan{})
	return n
}

// start runs a daemon until the test ends or the returned function is called.
func (n *node) start(t *testing.T) (stop func()) {
	t.Helper()
	c := plugin.Collaborators{Registrar: n.directory, Accountant: n.account, Checkpoint: n.directory.Checkpoint,
		Presence: feed.New(plugin.Presence{}), Clock: n.clock}
	if n.unread {
		c.Checkpoint = nil
	}
	n.daemon = plugin.NewSet(c)
	loop := &offer.Loop{Configs: n.configs, Snapshots: n.snapshots, Set: n.daemon, MPS: noMPS{}, Offered: n.offered}
	ctx, cancel := context.WithCancel(context.Background())
	var tasks errgroup.Group
	tasks.Go(func() error { return n.daemon.Run(ctx) })
	tasks.Go(func() error { return loop.Run(ctx) })
	tasks.Go(func() error {
		return n.directory.Watch(ctx, func(s kubelet.State) {
			c.Presence.Publish(plugin.Presence{Incarnation: s.Incarnation, Sockets: s.Sockets})
		})
	})
	ended := false
	stop = func() {
		cancel()
		if err := tasks.Wait(); err != nil && !ended {
			t.Error(err)
		}
		ended = true
	}
	t.Cleanup(stop)
	return stop
}

// noMPS is what asks MPS control daemons where nothing is shared by MPS.
type noMPS struct{}

func (noMPS) Follow([]string)                        {}
func (noMPS) Asked(string) bool                      { return true }
func (noMPS) Unready() *feed.Feed[map[string]string] { return new(feed.Feed[map[string]string]) }

func gpus() inventory.Snapshot {
	s := inventory.Snapshot{Generation: 1}
	for i := range 2 {
		s.GPUs = append(s.GPUs, inventory.GPU{UUID: fmt.Sprintf("GPU-%d", i), Index: i, Health: inventory.Health{State: inventory.Healthy}})
	}
	return s
}

// partitioned returns a snapshot in which GPU 0 has a MIG device.
func partitioned() inventory.Snapshot {
	s := gpus()
	s.Generation = 2
	s.GPUs[0].MIG = inventory.MIGEnabled
	s.GPUs[0].MIGDevices = []inventory.MIGDevice{{UUID: "MIG-0", Profile: "1g.10gb", Health: inventory.Health{State: inventory.Healthy}}}
	return s
}

func whole() config.Config {
	return config.Config{WaitForRelease: true, Resource: resource.Options{MIG: resource.MIGMixed},
		Edits: edits.Options{Strategies: []edits.Strategy{edits.EnvVar}}}
}

// shared is a configuration by which GPUs have two replicas, under another name if one is given.
func shared(rename string) config.Config {
	c := whole()
	c.Resource.Sharing = resource.Sharing{Mode: resource.TimeSliced,
		Rules: []resource.SharingRule{{Name: gpu, Replicas: 2, Rename: rename}}}
	return c
}

// health is what kubelet lists of the resources: Healthy devices, and after them the others, each in order.
func (n *node) health(resources ...string) string {
	var healthy, not []string
	for _, name := range resources {
		for id, ok := range n.Devices(name) {
			if ok {
				healthy = append(healthy, id)
			} else {
				not = append(not, id)
			}
		}
	}
	return listed(healthy, not)
}

func listed(healthy, not []string) string {
	slices.Sort(healthy)
	slices.Sort(not)
	return strings.Join(slices.Compact(healthy), " ") + " | " + strings.Join(slices.Compact(not), " ")
}

// await waits until kubelet lists what it should, without a step of the clock.
func (n *node) await(t *testing.T, want string, resources ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := n.WaitFor(ctx, func() bool { return n.health(resources...) == want }); err != nil {
		t.Fatalf("kubelet lists %s, want %s", n.health(resources...), want)
	}
}

// until moves the clock on, second by second, until kubelet lists what it should.
func (n *node) until(t *testing.T, want string, resources ...string) (seconds int) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for n.health(resources...) != want {
		if time.Now().After(deadline) {
			t.Fatalf("kubelet lists %s, want %s", n.health(resources...), want)
		}
		n.clock.Step(time.Second)
		seconds++
		time.Sleep(20 * time.Millisecond)
	}
	return seconds
}

// pass lets some seconds go by, with a reading of kubelet's accounts in each.
func (n *node) pass(t *testing.T, seconds int) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for range seconds {
		before := n.account.asked.Load()
		n.clock.Step(time.Second)
		for n.account.asked.Load() == before {
			if time.Now().After(deadline) {
				t.Fatal("kubelet's accounts are not read")
			}
			time.Sleep(time.Millisecond)
		}
	}
}

// settle lets a second go by, with a reading of kubelet's accounts if somebody waits for one.
func (n *node) settle() {
	before := n.account.asked.Load()
	n.clock.Step(time.Second)
	waits := slices.ContainsFunc(n.daemon.Status(), func(s plugin.Status) bool { return len(s.Departing) > 0 })
	for patience := time.Now().Add(20 * time.Millisecond); waits && n.account.asked.Load() == before && time.Now().Before(patience); {
		time.Sleep(time.Millisecond)
	}
}

// An account is kubelet's own, and counts how often it was asked who holds devices.
type account struct {
	*kubelet.PodResources
	asked atomic.Int64
}

func (a *account) Held(ctx context.Context) ([]kubelet.HeldDevice, error) {
	defer a.asked.Add(1)
	return a.PodResources.Held(ctx)
}

func (n *node) admit(t *testing.T, pod, resource string) string {
	t.Helper()
	got, err := n.Admit(t.Context(), standin.Container{Pod: pod, Name: "c", Resource: resource, Count: 1})
	if err != nil {
		t.Fatal(err)
	}
	return got.IDs[0]
}

// other returns the number of the GPU that an ID does not name.
func other(id string) string {
	if strings.Contains(id, "0") {
		return "1"
	}
	return "0"
}

func TestAGPUThatAPodHoldsIsNotGivenInAnotherForm(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		to      config.Config
		name    string // of the resource after it
		suffix  []string
		allowed bool
	}{
		"shared":                              {to: shared(""), name: gpu, suffix: []string{"::0", "::1"}},
		"shared under another name":           {to: shared(gpu + ".shared"), name: gpu + ".shared", suffix: []string{"::0", "::1"}},
		"shared, and the setting allows that": {to: shared(""), name: gpu, suffix: []string{"::0", "::1"}, allowed: true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, true)
			n.start(t)
			n.await(t, "GPU-0 GPU-1 | ", gpu)
			held := n.admit(t, "p", gpu)
			free := "GPU-" + other(held)
			n.clock.Step(20 * time.Second) // it was given long ago
			test.to.WaitForRelease = !test.allowed
			n.configs.Publish(test.to)
			ids := func(device string) string {
				var all []string
				for _, s := range test.suffix {
					all = append(all, device+s)
				}
				return strings.Join(all, " ")
			}
			both := []string{gpu}
			if test.name != gpu {
				both = append(both, test.name)
			}
			if test.allowed {
				n.await(t, ids("GPU-0")+" "+ids("GPU-1")+" | GPU-0 GPU-1", both...)
				return
			}
			// The GPU that nobody holds changes at once: the clock does not move.
			n.await(t, listed(strings.Fields(ids(free)), append(strings.Fields(ids(held)), "GPU-0", "GPU-1")), both...)
			r, _ := n.offered.Value().Resource(test.name)
			d, _ := r.Device(held + "::0")
			if want := "its GPU is not free yet as nvidia.com/gpu " + held + ": pod default/p holds it"; d.Healthy || d.Reason != want {
				t.Errorf("the device is Healthy %v with reason %q, want %q", d.Healthy, d.Reason, want)
			}
			for range 2 { // so many replicas are free
				n.admit(t, fmt.Sprint("other", n.Mark()), test.name)
			}
			var refused *standin.PodError
			if _, err := n.Admit(t.Context(), standin.Container{Pod: "q", Name: "c", Resource: test.name, Count: 1}); !errors.As(err, &refused) {
				t.Errorf("a third pod was admitted: %v", err)
			}
			n.pass(t, 100)
			if got := n.health(both...); strings.Contains(strings.Split(got, "|")[0], held) {
				t.Errorf("kubelet lists %s while the pod holds the GPU", got)
			}
			n.Remove("p")
			n.until(t, ids("GPU-0")+" "+ids("GPU-1")+" | ", both...)
		})
	}
}

func TestAWholeGPUAndItsMIGDevicesWaitForEachOther(t *testing.T) {
	t.Parallel()
	const mig = "nvidia.com/mig-1g.10gb"
	n := newNode(t, true)
	n.start(t)
	n.await(t, "GPU-0 GPU-1 | ", gpu)
	if n.admit(t, "p", gpu) != "GPU-0" {
		n.admit(t, "p0", gpu)
	}
	n.clock.Step(20 * time.Second)
	n.snapshots.Publish(partitioned())
	n.await(t, "GPU-1 | GPU-0 MIG-0", gpu, mig)
	n.pass(t, 60)
	n.await(t, "GPU-1 | GPU-0 MIG-0", gpu, mig)
	n.Remove("p")
	n.Remove("p0")
	n.until(t, "GPU-1 MIG-0 | ", gpu, mig)
	n.admit(t, "q", mig)
	n.clock.Step(20 * time.Second)
	back := gpus()
	back.Generation = 3
	n.snapshots.Publish(back)
	n.await(t, "GPU-1 | GPU-0 MIG-0", gpu, mig)
	n.pass(t, 60)
	n.await(t, "GPU-1 | GPU-0 MIG-0", gpu, mig)
	n.Remove("q")
	n.until(t, "GPU-0 GPU-1 | ", gpu, mig)
}

// Kubelet asks for a device, and for that of another plugin after it, before it says anywhere that a pod holds it.
func TestAGPUThatKubeletHasJustAskedForWaits(t *testing.T) {
	t.Parallel()
	n := newNode(t, true)
	n.start(t)
	n.await(t, "GPU-0 GPU-1 | ", gpu)
	id := n.admit(t, "p", gpu)
	n.Remove("p") // as if kubelet did not say so yet
	n.configs.Publish(shared(""))
	free := "GPU-" + other(id)
	n.await(t, listed([]string{free + "::0", free + "::1"}, []string{"GPU-0", "GPU-1", id + "::0", id + "::1"}), gpu)
	if seconds := n.until(t, "GPU-0::0 GPU-0::1 GPU-1::0 GPU-1::1 | ", gpu); seconds < 10 {
		t.Errorf("free after %d s, want 10", seconds)
	}
}

// A daemon that starts knows what pods hold from what kubelet has saved alone.
func TestAfterARestartAGPUThatAPodHoldsIsNotGivenInAnotherForm(t *testing.T) {
	t.Parallel()
	for _, name := range []string{gpu, gpu + ".shared"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, false)
			stop := n.start(t)
			n.await(t, "GPU-0 GPU-1 | ", gpu)
			pod := standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 1, SingleNode: true}
			got, err := n.Admit(t.Context(), pod)
			if err != nil {
				t.Fatal(err)
			}
			held, free := got.IDs[0], "GPU-"+other(got.IDs[0])
			stop()
			if name == gpu {
				n.configs.Publish(shared(""))
			} else {
				n.configs.Publish(shared(name))
			}
			mark := n.Mark()
			n.start(t)
			unhealthy := []string{held, held + "::0", held + "::1"}
			n.until(t, free+"::0 "+free+"::1 | "+strings.Join(unhealthy, " "), gpu, name)
			for _, e := range n.Events(mark) {
				for _, d := range e.Devices {
					if e.Kind == standin.Listed && strings.HasPrefix(d.GetID(), held) && d.GetHealth() == "Healthy" {
						t.Fatalf("%s was Healthy in a list", d.GetID())
					}
				}
			}
			n.SetPodsKnown(false)
			if err := n.Restart(); err != nil {
				t.Fatal(err)
			}
			n.until(t, free+"::0 "+free+"::1 | "+strings.Join(unhealthy, " "), gpu, name)
			n.SetPodsKnown(true)
			if _, err := n.Admit(t.Context(), pod); errors.Is(err, standin.ErrCrash) {
				t.Error("kubelet crashed when it admitted the pod again")
			}
		})
	}
}

func TestWithoutAnAccountAGPUIsGivenInAnotherFormWithAWarning(t *testing.T) {
	t.Parallel()
	n := newNode(t, false)
	n.unread = true
	n.start(t)
	n.await(t, "GPU-0 GPU-1 | ", gpu)
	n.clock.Step(20 * time.Second)
	n.configs.Publish(shared(""))
	n.await(t, " | GPU-0 GPU-0::0 GPU-0::1 GPU-1 GPU-1::0 GPU-1::1", gpu)
	if seconds := n.until(t, "GPU-0::0 GPU-0::1 GPU-1::0 GPU-1::1 | GPU-0 GPU-1", gpu); seconds < 10 {
		t.Errorf("offered after %d s without an account, want 10", seconds)
	}
	warns := func(w string) bool { return strings.Contains(w, "it cannot be told which devices pods hold") }
	if !slices.ContainsFunc(n.offered.Value().Warnings, warns) {
		t.Errorf("warnings: %q", n.offered.Value().Warnings)
	}
}

// Pods come and go while the configuration changes at any moment. No GPU is ever held in two forms.
func TestNoGPUIsEverHeldInTwoForms(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	n := newNode(t, true)
	n.start(t)
	n.await(t, "GPU-0 GPU-1 | ", gpu)
	forms := []config.Config{whole(), shared(""), shared(gpu + ".shared"), shared(gpu + ".other")}
	var pods []string
	admitted, changes := 0, 0
	names := []string{gpu, gpu, gpu + ".shared", gpu + ".other"} // of the forms
	form := 0
	for round := range 400 {
		switch random.IntN(16) {
		case 0:
			form = random.IntN(len(forms))
			n.configs.Publish(forms[form])
			changes++
		case 1, 2, 3, 4:
			if len(pods) > 0 {
				n.Remove(pods[0])
				pods = pods[1:]
			}
		case 5, 6, 7:
			for range 5 {
				n.settle()
			}
		default:
			c := standin.Container{Pod: fmt.Sprint("p", round), Name: "c", Resource: names[form], Count: 1}
			if random.IntN(4) == 0 {
				c.Resource = names[random.IntN(len(names))]
			}
			if _, err := n.Admit(t.Context(), c); err == nil {
				pods = append(pods, c.Pod)
				admitted++
			} else if errors.Is(err, standin.ErrCrash) {
				t.Fatal(err)
			}
		}
		saved, err := n.directory.Checkpoint()
		if err != nil {
			t.Fatal(err)
		}
		formOf := map[string]string{}
		for _, d := range saved.Held {
			uuid, replica, _ := strings.Cut(d.ID, "::")
			now := fmt.Sprintf("%s shared %v", d.Resource, replica != "")
			if !slices.Contains(pods, strings.TrimPrefix(d.Pod, "with UID ")) {
				continue // it has ended
			}
			if before, known := formOf[uuid]; known && before != now {
				t.Fatalf("round %d: %s is held as %s and as %s", round, uuid, before, now)
			}
			formOf[uuid] = now
		}
	}
	t.Logf("%d pods, %d changes", admitted, changes)
	if admitted < 5 || changes < 5 {
		t.Errorf("%d pods were admitted over %d changes; the test shows little", admitted, changes)
	}
}
