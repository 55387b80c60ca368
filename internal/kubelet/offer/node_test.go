package offer_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/offer"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/quiet"
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
	daemon    *serve.Servers
	unread    bool // kubelet's checkpoint cannot be read
	specs     offer.Specs
	mps       offer.MPS
	mig       *feed.Feed[map[string]resource.GPUHold]
	owners    *feed.Feed[dra.Owners]
	followed  *feed.Feed[dra.Owners]
	pulse     supervise.Pulse
	log       klog.Logger
}

func newNode(t *testing.T, podResources bool) *node {
	t.Helper()
	root := loopback.Folder(t)
	n := &node{dir: filepath.Join(root, "d"), clock: clocktesting.NewFakeClock(time.Now()), mps: noMPS{},
		mig: feed.New(map[string]resource.GPUHold(nil)), owners: feed.New(ofPlugin()), log: klog.Background()}
	socket := ""
	if podResources {
		socket = filepath.Join(root, "p.sock")
	}
	var err error
	if n.Kubelet, err = standin.Start(standin.Options{Dir: n.dir, PodResourcesSocket: socket}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Stop)
	if n.directory, err = kubelet.NewDirectory(n.Socket(), nil); err != nil {
		t.Fatal(err)
	}
	n.account = &account{PodResources: kubelet.NewPodResources(socket, quiet.Ticking(n.clock))}
	t.Cleanup(func() { _ = n.account.Close() })
	n.configs, n.snapshots = feed.New(whole()), feed.New(gpus())
	return n
}

// start runs a daemon until the test ends or the returned function is called.
func (n *node) start(t *testing.T) (stop func()) {
	t.Helper()
	c := serve.Collaborators{Registrar: n.directory, Accountant: n.account, Checkpoint: n.directory.Checkpoint,
		Incarnation: feed.New(uint64(0)), Sockets: feed.New([]string(nil)), Clock: n.clock}
	if n.unread {
		c.Checkpoint = nil
	}
	n.daemon = serve.NewServers(c)
	loop := &offer.Loop{
		Configs: n.configs, Snapshots: n.snapshots, Set: n.daemon, Specs: n.specs, MPS: n.mps, MIG: n.mig, Owners: n.owners,
		Followed: n.followed, Proofs: noProofs{}, Driver: feed.New(driverchange.Status{}),
		Clock: n.clock, Pulse: supervise.NewPulse(),
	}
	n.pulse = loop.Pulse
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), n.log))
	var tasks errgroup.Group
	tasks.Go(func() error { return n.daemon.Run(ctx) })
	tasks.Go(func() error { return loop.Run(ctx) })
	tasks.Go(func() error {
		return n.directory.Watch(ctx, c.Incarnation, c.Sockets)
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
func (noMPS) HasResult(string) bool                  { return true }
func (noMPS) Unready() *feed.Feed[map[string]string] { return new(feed.Feed[map[string]string]) }

// noProofs requires no proof of CUDA.
type noProofs struct{}

func (noProofs) Unproven(inventory.Snapshot) map[string]string { return nil }
func (noProofs) Changed() <-chan struct{}                      { return nil }

// ofPlugin returns the owners of GPUs that the device plugin owns.
func ofPlugin() dra.Owners {
	owners := dra.Owners{}
	for _, uuid := range []string{"GPU-0", "GPU-1", "a", "b"} {
		owners[uuid] = dra.OwnedByPlugin
	}
	return owners
}

func gpus() inventory.Snapshot {
	s := inventory.Snapshot{Generation: 1}
	for i := range 2 {
		s.GPUs = append(s.GPUs, inventory.GPU{UUID: fmt.Sprintf("GPU-%d", i), Index: i,
			Health: inventory.Health{State: inventory.Healthy}})
	}
	return s
}

// partitioned returns a snapshot in which GPU 0 has a MIG device.
func partitioned() inventory.Snapshot {
	s := gpus()
	s.Generation = 2
	s.GPUs[0].MIG = inventory.MIGEnabled
	s.GPUs[0].MIGDevices = []inventory.MIGDevice{{UUID: "MIG-0", Profile: "1g.10gb",
		Health: inventory.Health{State: inventory.Healthy}}}
	return s
}

func whole() config.Config {
	return config.Config{Live: config.Live{Resource: resource.Options{MIG: resource.MIGMixed},
		Edits: containeredits.Options{Strategies: []containeredits.Strategy{containeredits.EnvVar}}}}
}

// shared is a configuration by which GPUs have two replicas, under another name if one is given.
func shared(rename string) config.Config {
	c := whole()
	c.Resource.Sharing = resource.Sharing{Mode: resource.TimeSliced,
		Rules: []resource.SharingRule{{Name: gpu, Replicas: 2, Rename: rename}}}
	return c
}

// health is what kubelet lists of the resources: Healthy devices, and after them the others, each
// in order.
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
	deadline := time.Now().Add(3 * time.Minute)
	for n.health(resources...) != want {
		if time.Now().After(deadline) {
			t.Fatalf("kubelet lists %s, want %s", n.health(resources...), want)
		}
		n.clock.Step(time.Second)
		seconds++
		time.Sleep(20 * time.Millisecond)
		quiet.Wait(time.Second) // else a slow machine has it later than it is
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
	waits := slices.ContainsFunc(n.daemon.Status(), func(s serve.Status) bool { return len(s.Retiring) > 0 })
	for patience := time.Now().Add(20 * time.Millisecond); waits && n.account.asked.Load() == before &&
		time.Now().Before(patience); {
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
