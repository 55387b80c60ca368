package devicemanager

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/edits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	daemonkubelet "github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// The tests here run what the daemon serves GPUs with against kubelet's own device manager. The figures they log are
// those of docs and `make bench`; only what must hold on any machine is asserted.

const (
	gpus = 8

	drops    = 300
	restarts = 50
	upgrades = 10

	// patience bounds one round: the daemon's own patience with a registration that does not hold is seconds.
	patience = 30 * time.Second
	// lookEvery is how often allocatable is looked at, and so what a figure can be too high by.
	lookEvery = 200 * time.Microsecond
)

func TestDaemonIsBackAfterDroppedStreams(t *testing.T) {
	n := newNode(t)
	startDaemon(t, n)
	n.await(t, gpus)
	var took []time.Duration
	for round := range drops {
		began := time.Now()
		if n.DropStream(resource.WholeGPU) == 0 {
			t.Fatalf("round %d: there was no stream", round)
		}
		n.await(t, gpus)
		took = append(took, time.Since(began))
		n.admitOne(t, fmt.Sprint("pod-", round))
	}
	report(t, fmt.Sprintf("stream dropped → full list, %d rounds", drops), took)
}

func TestDaemonIsBackAfterRestarts(t *testing.T) {
	n := newNode(t)
	startDaemon(t, n)
	n.await(t, gpus)
	var took []time.Duration
	for round := range restarts {
		began := time.Now()
		if err := n.Restart(); err != nil {
			t.Fatal(err)
		}
		n.await(t, gpus)
		took = append(took, time.Since(began))
		n.admitOne(t, fmt.Sprint("pod-", round))
	}
	report(t, fmt.Sprintf("kubelet restarted → full list, %d rounds", restarts), took)
}

// A rolling upgrade overlaps two daemons. On 1.37 allocatable never falls; on 1.36, where the end of the old stream can
// disconnect the new client, it comes back.
func TestDaemonsOverlap(t *testing.T) {
	n := newNode(t)
	stop := startDaemon(t, n)
	n.await(t, gpus)
	var away []time.Duration
	lowest := gpus
	for round := range upgrades {
		stopNext := startDaemon(t, n)
		n.settle(t)
		began := time.Now()
		stop()
		stop = stopNext
		fell, back := n.watch(t, 500*time.Millisecond)
		lowest = min(lowest, fell)
		if fell < gpus {
			away = append(away, back.Sub(began))
		}
		n.await(t, gpus)
		n.admitOne(t, fmt.Sprint("pod-", round))
	}
	if version == kubelet.V137 && lowest < gpus {
		t.Errorf("allocatable fell to %d in an upgrade", lowest)
	}
	if len(away) > 0 {
		report(t, fmt.Sprintf("old daemon stopped → full list, in %d of %d upgrades", len(away), upgrades), away)
	}
}

func newNode(t *testing.T) *node {
	t.Helper()
	klog.SetLogger(klog.New(nil))
	root, err := os.MkdirTemp("", "k")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	return startNode(t, filepath.Join(root, "device-plugins"), filepath.Join(root, "pod-resources.sock"))
}

// startDaemon serves GPUs on the node until the test ends or the function that it returns is called.
func startDaemon(t *testing.T, n *node) (stop func()) {
	t.Helper()
	directory, err := daemonkubelet.NewDirectory(filepath.Join(n.dir, "kubelet.sock"), clock.RealClock{})
	if err != nil {
		t.Fatal(err)
	}
	account := daemonkubelet.NewPodResources(n.podResourcesSocket, nil)
	presence := feed.New(plugin.Presence{})
	set := plugin.NewSet(plugin.Collaborators{
		Registrar: directory, Accountant: account, Presence: presence, Clock: clock.RealClock{},
	})
	var snapshot inventory.Snapshot
	for i := range gpus {
		snapshot.GPUs = append(snapshot.GPUs, inventory.GPU{
			UUID:  fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i),
			Index: i, Minor: i, NUMANode: i / 4, Health: inventory.Health{State: inventory.Healthy},
		})
	}
	options := plugin.Options{Edits: edits.Options{Strategies: []edits.Strategy{edits.EnvVar}}}
	set.Apply(resource.New(snapshot, resource.Options{}), options, 1)

	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 2)
	go func() {
		ended <- directory.Watch(ctx, func(s daemonkubelet.State) {
			presence.Publish(plugin.Presence{Incarnation: s.Incarnation, Sockets: s.Sockets})
		})
	}()
	go func() { ended <- set.Run(ctx) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		for range cap(ended) {
			if err := <-ended; err != nil {
				t.Errorf("daemon: %v", err)
			}
		}
		_ = account.Close() // its connection alone
	}
	t.Cleanup(stop)
	return stop
}

// await waits until so many GPUs are allocatable.
func (n *node) await(t *testing.T, count int) {
	t.Helper()
	deadline, look := time.NewTimer(patience), time.NewTicker(lookEvery)
	defer deadline.Stop()
	defer look.Stop()
	for n.Resources()[resource.WholeGPU].Allocatable != count {
		select {
		case <-deadline.C:
			t.Fatalf("allocatable has not come to %d: the node shows %v", count, n.Resources())
		case <-look.C:
		}
	}
}

// watch looks at allocatable until it has been whole for so long, and returns the lowest it was and when it was whole
// again.
func (n *node) watch(t *testing.T, quiet time.Duration) (lowest int, whole time.Time) {
	t.Helper()
	deadline, look := time.NewTimer(patience), time.NewTicker(lookEvery)
	defer deadline.Stop()
	defer look.Stop()
	lowest, whole = gpus, time.Now()
	for time.Since(whole) < quiet {
		select {
		case <-deadline.C:
			t.Fatalf("allocatable does not stay whole: the node shows %v", n.Resources())
		case <-look.C:
		}
		if now := n.Resources()[resource.WholeGPU].Allocatable; now < gpus {
			lowest, whole = min(lowest, now), time.Now()
		}
	}
	return lowest, whole
}

// settle waits until the second daemon has its socket, and a while for it to be registered.
func (n *node) settle(t *testing.T) {
	t.Helper()
	entries := func() int {
		sockets, err := filepath.Glob(filepath.Join(n.dir, "*.sock"))
		if err != nil {
			t.Fatal(err)
		}
		return len(sockets)
	}
	deadline, look := time.NewTimer(patience), time.NewTicker(lookEvery)
	defer deadline.Stop()
	defer look.Stop()
	for entries() < 3 { // kubelet's, and two daemons'
		select {
		case <-deadline.C:
			t.Fatal("the second daemon has no socket")
		case <-look.C:
		}
	}
	n.watch(t, 200*time.Millisecond)
}

// admitOne admits a pod with one GPU, and ends it.
func (n *node) admitOne(t *testing.T, pod string) {
	t.Helper()
	c := kubelet.Container{Pod: pod, Name: "main", Resource: resource.WholeGPU, Count: 1}
	got, err := n.Admit(t.Context(), c)
	if err != nil || len(got.IDs) != 1 || got.Response.GetEnvs()["NVIDIA_VISIBLE_DEVICES"] != got.IDs[0] {
		t.Fatalf("%s: %v, %v; want one GPU and its name in the environment", pod, got, err)
	}
	n.Remove(pod)
}

func report(t *testing.T, what string, took []time.Duration) {
	t.Helper()
	slices.Sort(took)
	t.Logf("kubelet %s: %s: median %v, worst %v", version, what,
		took[len(took)/2].Round(10*time.Microsecond), took[len(took)-1].Round(10*time.Microsecond))
}
