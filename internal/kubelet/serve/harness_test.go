package serve_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/quiet"
)

const gpu = "nvidia.com/gpu"

// patience bounds every wait for something that must happen.
const patience = poll.Limit

func TestMain(m *testing.M) {
	_ = flag.Set("test.parallel", "16") // nodes mostly wait
	os.Exit(m.Run())
}

// A node is a directory with a stand-in kubelet, or room for one.
type node struct {
	*standin.Kubelet
	dir          string
	podResources string
}

// newNode returns a node on which no kubelet runs yet.
func newNode(t *testing.T) *node {
	t.Helper()
	root, err := os.MkdirTemp("", "n")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	n := &node{dir: filepath.Join(root, "d"), podResources: filepath.Join(root, "p.sock")}
	if err := os.Mkdir(n.dir, 0o750); err != nil {
		t.Fatal(err)
	}
	return n
}

// startKubelet starts the node's first kubelet.
func (n *node) startKubelet(t *testing.T, v standin.Version) {
	t.Helper()
	n.startKubeletWith(t, standin.Options{Version: v})
}

// startKubeletWith does so with options of a test's own, but for the paths.
func (n *node) startKubeletWith(t *testing.T, o standin.Options) {
	t.Helper()
	o.Dir, o.PodResourcesSocket = n.dir, n.podResources
	k, err := standin.Start(o)
	if err != nil {
		t.Fatal(err)
	}
	n.Kubelet = k
	t.Cleanup(k.Stop)
}

// A daemon is Servers with the collaborators that the real one has.
type daemon struct {
	*serve.Servers
	kubelet   *feed.Feed[uint64]
	sockets   *feed.Feed[[]string]
	inspector *inspector
	log       func() string // what it logged until now
	stop      func()
}

// startDaemon runs Servers on the node until the test ends, or stop is called. A clock that is not
// the real one may be faster than kubelet, which refuses questions that come too fast.
func (n *node) startDaemon(t *testing.T, c clock.WithTicker) *daemon {
	t.Helper()
	var account serve.Accountant = n.account(t, c)
	if _, is := c.(clock.RealClock); !is {
		account = &countedAccount{Accountant: account}
	}
	return n.startDaemonWith(t, c, account)
}

// serving returns a node on which kubelet counts so many devices, all healthy, of a daemon that
// goes by c.
func serving(t *testing.T, v standin.Version, c clock.WithTicker, devices int) (*node, *daemon) {
	t.Helper()
	n := newNode(t)
	n.startKubelet(t, v)
	d := n.startDaemon(t, c)
	d.offer(devices)
	n.awaitAllocatable(t, devices)
	return n, d
}

// account returns kubelet's own account for a daemon that goes by c. Questions that wait until
// kubelet has allocated come without a step.
func (n *node) account(t *testing.T, c clock.PassiveClock) *kubelet.PodResources {
	t.Helper()
	if _, is := c.(clock.RealClock); is {
		return n.accountBy(t, nil)
	}
	return n.accountBy(t, quiet.Ticking(c))
}

func (n *node) accountBy(t *testing.T, c clock.Clock) *kubelet.PodResources {
	t.Helper()
	account := kubelet.NewPodResources(n.podResources, c)
	t.Cleanup(func() { _ = account.Close() })
	return account
}

// startDaemonWith does so with another account than kubelet's own.
func (n *node) startDaemonWith(t *testing.T, c clock.WithTicker, account serve.Accountant) *daemon {
	t.Helper()
	return n.startSetOn(t, serve.Collaborators{Accountant: account, Clock: c})
}

// startSetOn does so with collaborators of a test's own. Those that are left out are the real ones.
func (n *node) startSetOn(t *testing.T, c serve.Collaborators) *daemon {
	t.Helper()
	directory := n.directory(t)
	inspector := &inspector{}
	c.Inspector = inspector
	if c.Registrar == nil {
		c.Registrar = directory
	}
	if c.Checkpoint == nil {
		c.Checkpoint = directory.Checkpoint
	}
	if c.CheckpointVersion == nil {
		c.CheckpointVersion = directory.CheckpointVersion
	}
	d := n.startSet(t, c)
	d.inspector = inspector
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- directory.Watch(ctx, d.kubelet, d.sockets)
	}()
	t.Cleanup(func() {
		cancel()
		check(t, <-ended)
	})
	return d
}

// directory returns the node's directory as a daemon sees it.
func (n *node) directory(t *testing.T) *kubelet.Directory {
	t.Helper()
	directory, err := kubelet.NewDirectory(filepath.Join(n.dir, "kubelet.sock"), nil)
	if err != nil {
		t.Fatal(err)
	}
	return directory
}

// startSet runs Servers with collaborators of a test's own, whose feeds it makes, until the test
// ends, or stop is called.
func (n *node) startSet(t *testing.T, c serve.Collaborators) *daemon {
	t.Helper()
	c.Incarnation, c.Sockets = feed.New(uint64(0)), feed.New([]string(nil))
	set := serve.NewServers(c)
	log := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.Verbosity(2), ktesting.BufferLogs(true)))
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), log))
	ended := make(chan error, 1)
	go func() { ended <- set.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		for {
			select {
			case err := <-ended:
				if err != nil {
					t.Errorf("the daemon ended: %v", err)
				}
				return
			case <-time.After(time.Second): // one that ends between two registrations waits by its clock
				if fake, is := c.Clock.(*clocktesting.FakeClock); is {
					fake.Step(time.Second)
				}
			}
		}
	})
	t.Cleanup(stop)
	logged := func() string { return log.GetSink().(ktesting.Underlier).GetBuffer().String() }
	return &daemon{Servers: set, kubelet: c.Incarnation, sockets: c.Sockets, log: logged, stop: stop}
}

// An inspector says of every device what a test wants.
type inspector struct {
	mu      sync.Mutex // guards all following fields
	err     error
	devices []resource.Device // that it was asked about last
}

func (i *inspector) say(err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.err = err
}

func (i *inspector) Inspect(_ context.Context, devices []resource.Device) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.devices = devices
	return i.err
}

// offer applies a plan of one resource with n devices, those of the given indices unhealthy.
func (d *daemon) offer(n int, unhealthy ...int) { d.offerUnder(1, n, unhealthy...) }

func (d *daemon) offerUnder(epoch uint64, n int, unhealthy ...int) {
	all := gpus(n)
	for _, i := range unhealthy {
		all[i].Health = inventory.Health{State: inventory.Unhealthy, Reason: "XID 48", Remedy: inventory.RemedyReset}
	}
	d.Apply(resource.New(inventory.Snapshot{GPUs: all}, resource.Options{}), asEnvironment, epoch)
}

// gpus returns n healthy GPUs, four on each NUMA node.
func gpus(n int) []inventory.GPU {
	var all []inventory.GPU
	for i := range n {
		all = append(all, inventory.GPU{UUID: id(i), Index: i, Minor: i, NUMANode: i / 4,
			Health: inventory.Health{State: inventory.Healthy}})
	}
	return all
}

// listed counts the devices that the lists of all resources name.
func (d *daemon) listed() int {
	count := 0
	for _, s := range d.Status() {
		count += s.Devices
	}
	return count
}

var asEnvironment = serve.Options{Edits: containeredits.Options{Strategies: []containeredits.Strategy{containeredits.EnvVar}}}

func id(i int) string { return fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i) }

// await waits until done holds for the stand-in; it is asked after each of its events.
func (n *node) await(t *testing.T, what string, done func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := n.WaitFor(ctx, done); err != nil {
		var seen []string
		for _, e := range n.Events(0) {
			seen = append(seen, e.String())
		}
		t.Fatalf("never %s; kubelet saw:\n%s", what, strings.Join(seen, "\n"))
	}
}

func (n *node) awaitAllocatable(t *testing.T, want int) {
	t.Helper()
	n.await(t, fmt.Sprintf("%d allocatable", want), func() bool { return n.Allocatable(gpu) == want })
}

// awaitEnd waits until the kubelet has noticed the end of the only daemon: it has no device that it
// could give to a pod. Up to 1.36, it would take a later notice for the end of the next daemon.
func (n *node) awaitEnd(t *testing.T) {
	t.Helper()
	n.await(t, "nothing allocatable", n.OffersNothing)
}

// count counts the events of a kind since a mark.
func (n *node) count(kind standin.Kind, after int) int {
	count := 0
	for _, e := range n.Events(after) {
		if e.Kind == kind {
			count++
		}
	}
	return count
}

// listedAnew reports whether kubelet has a list from a life that it was registered with since a
// mark.
func (n *node) listedAnew(after int) bool {
	registered := map[string]bool{}
	for _, e := range n.Events(after) {
		switch e.Kind {
		case standin.Registered:
			registered[e.Endpoint] = true
		case standin.Listed:
			if registered[e.Endpoint] {
				return true
			}
		default:
		}
	}
	return false
}

// bothVersions runs a test against the rules of both kubelets.
func bothVersions(t *testing.T, test func(t *testing.T, v standin.Version)) {
	for _, v := range []standin.Version{standin.V136, standin.V137} {
		t.Run(string(v), func(t *testing.T) { t.Parallel(); test(t, v) })
	}
}

// sockets returns the names of the sockets in the node's directory, without kubelet's.
func (n *node) sockets(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir(n.dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		if e.Type()&os.ModeSocket != 0 && e.Name() != "kubelet.sock" {
			names = append(names, e.Name())
		}
	}
	return names
}

// oneGPU is a plan of one healthy GPU.
func oneGPU() resource.Plan {
	return resource.New(inventory.Snapshot{GPUs: []inventory.GPU{
		{UUID: id(0), Health: inventory.Health{State: inventory.Healthy}},
	}}, resource.Options{})
}
