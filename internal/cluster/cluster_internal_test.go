package cluster

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/draslices"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/handover"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet/plugins"
)

// TestTheNodeIsWatchedWhileSomethingNeedsIt: a program that nothing was asked of asks the API server for nothing, and features can be
// switched while it runs.
func TestTheNodeIsWatchedWhileSomethingNeedsIt(t *testing.T) {
	t.Parallel()
	server, err := apiserver.Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	if err := server.ChangeNode("n", func(*corev1.Node) {}); err != nil {
		t.Fatal(err)
	}
	c := New()
	if chosen := c.Choose(t.Context(), config.Config{Kubeconfig: server.Kubeconfig(), NodeName: "n"}); chosen != nil {
		t.Errorf("a label chooses the configuration, and nobody wants that: %+v", chosen.Value())
	}
	configs := feed.New(config.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = c.watchNode(ctx, configs) // returns nil
	}()
	t.Cleanup(func() { cancel(); <-ended })

	until := func(what string, holds func() bool) {
		t.Helper()
		for late := time.Now().Add(patience); !holds(); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(late) {
				t.Fatalf("not within %v: %s", patience, what)
			}
		}
	}
	known := func(uid bool) func() bool { return func() bool { return (c.client.Nodes().Value().UID != "") == uid } }
	quiet := time.Now().Add(headStart / 5)
	until("nothing happens", func() bool { return time.Now().After(quiet) })
	if asked := server.Requests(); len(asked) > 0 {
		t.Errorf("nothing is switched on, and the API server was asked: %v", asked)
	}
	for range 2 {
		configs.Publish(config.Config{Features: config.Features{Events: true}})
		until("the node is watched", known(true))
		// What else changes does not end the watch.
		before := server.Requests()
		configs.Publish(config.Config{Features: config.Features{Events: true, Taint: true}})
		configs.Publish(config.Config{Features: config.Features{Condition: true}})
		if now := server.Requests(); !maps.Equal(before, now) {
			t.Errorf("another feature is another watch: %v before, %v now", before, now)
		}
		configs.Publish(config.Config{})
		until("the node is forgotten", known(false))
	}
	// A taint of an option that was turned off is to be removed yet.
	change := func(with func(*corev1.Node)) {
		t.Helper()
		if err := server.ChangeNode("n", with); err != nil {
			t.Fatal(err)
		}
	}
	change(func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: taintKey, Effect: taintEffect}} })
	configs.Publish(config.Config{Features: config.Features{Taint: true}})
	until("the node is watched", known(true))
	configs.Publish(config.Config{})
	quiet = time.Now().Add(headStart / 5)
	until("nothing happens", func() bool { return time.Now().After(quiet) })
	change(func(n *corev1.Node) { n.Labels = map[string]string{"turned": "off"} })
	until("the node with the taint is watched", func() bool { return c.client.Nodes().Value().Labels["turned"] == "off" })
	change(func(n *corev1.Node) { n.Spec.Taints = nil })
	until("the node is forgotten", known(false))
	if c.Problem() != nil {
		t.Errorf("nobody asks the API server, and it has the problem %v", c.Problem())
	}
}

// TestProcess: the tasks of one process together, at an API server and a kubelet. The node is labelled, its label chooses the configuration
// file, and its GPU is in a slice; the size of the cluster is saved. When claims are switched off, the GPU goes back to the device plugin, and
// kubelet forgets the driver.
func TestProcess(t *testing.T) {
	s := newStage(t)
	s.change(func(n *corev1.Node) { n.Labels = map[string]string{testLabel: "a"} })
	short, err := os.MkdirTemp("", "r") // the path of a socket has 107 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(short) })
	registry := filepath.Join(short, "plugins_registry")
	if err := os.Mkdir(registry, 0o700); err != nil {
		t.Fatal(err)
	}
	state, files := t.TempDir(), t.TempDir()
	for _, name := range []string{"a", "b"} {
		if err := os.WriteFile(filepath.Join(files, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	start := config.Config{
		Kubeconfig: s.server.Kubeconfig(), NodeName: nodeName, StateDir: state, NodeConfig: config.NodeConfig{Dir: files, Label: testLabel},
		Features: config.Features{Labels: config.LabelsNode}, DRA: config.DRA{Mode: config.DRAAll}, KubeletRoot: short,
	}
	configs, snapshots, owners, offered := feed.New(start), feed.New(snapshotOf(1)), feed.New(dra.Owners(nil)), feed.New(dra.Owners(nil))
	var counted atomic.Int32
	d := daemon.View{
		Config: start, Configs: configs, ConfigErrors: feed.New[error](nil), Snapshots: snapshots, Offered: feed.New(resource.Plan{}),
		Labels: feed.New(map[string]string{"nvidia.com/gpu.count": "1"}), Unlabeled: feed.New[error](nil),
		APIRequested: func(string, string, int) { counted.Add(1) },
		DRA: &daemon.DRA{
			Owners: owners, Offered: offered, Claims: claims.New(claims.Options{}), Driver: feed.New(status.DRADriver{}),
			Devices: draslices.New(t.Context(), draslices.Options{
				StateDir: state, Node: nodeName, Snapshots: snapshots, Configs: configs, Owners: owners, Divisions: feed.New(dra.Divisions{}),
			}),
		},
	}
	d.DRA.Claims.InUse().Publish(map[string][]claims.Holder{})
	d.DRA.Arbiter = handover.New(handover.Options{
		Configs: configs, Snapshots: snapshots, Owners: owners, Offered: offered, Published: d.DRA.Devices.Published(), Records: d.DRA.Claims.InUse(),
	})
	c := New()
	chosen := c.Choose(t.Context(), start)
	if chosen == nil || chosen.Value() != (config.Chosen{File: filepath.Join(files, "a")}) {
		t.Fatalf("chosen is %+v", chosen)
	}
	tasks := append(c.Observation(configs, "boot"), c.Outputs(d)...)
	var ready func(context.Context) (bool, string)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	offers := func(ctx context.Context) error { // as the device plugin does
		for ctx.Err() == nil {
			now, changed := owners.Latest()
			offered.Publish(now)
			feed.AnyOf(ctx, changed)
		}
		return nil
	}
	for _, task := range append(tasks, daemon.Task{Run: d.DRA.Devices.Run}, daemon.Task{Run: d.DRA.Arbiter.Run}, daemon.Task{Run: offers}) {
		if task.Ready != nil {
			ready = task.Ready
		}
		running.Go(func() {
			if err := task.Run(ctx); err != nil {
				t.Errorf("%s: %v", task.Name, err)
			}
		})
	}
	driver := func(registered bool) func() bool {
		return func() bool { return d.DRA.Driver.Value().Registered == registered }
	}
	s.until("the node is labelled", func() bool {
		n, err := s.server.Node(nodeName)
		return err == nil && n.Labels["nvidia.com/gpu.count"] == "1"
	})
	s.until("the size of the cluster is saved", func() bool {
		size, err := readSize(state)
		return err == nil && size != nil && *size == clusterSize{sizeVersion, 1, "boot"}
	})
	if now, _ := ready(ctx); now || len(s.server.Slices()) > 0 {
		t.Errorf("without a kubelet: ready %v, slices %v", now, s.server.Slices())
	}
	k := plugins.Start(plugins.Options{Dir: registry})
	t.Cleanup(k.Stop)
	s.untilPool("1: 0")
	s.until("the driver is registered", driver(true))
	s.until("the process is ready", func() bool { now, _ := ready(ctx); return now })
	s.change(func(n *corev1.Node) { n.Labels[testLabel] = "b" })
	s.until("the other file is chosen", func() bool { return chosen.Value().File == filepath.Join(files, "b") })
	if counted.Load() == 0 || c.Problem() != nil {
		t.Errorf("%d requests are counted; the problem is %v", counted.Load(), c.Problem())
	}

	off := start
	off.DRA.Mode = config.DRAOff
	configs.Publish(off)
	s.until("the GPU is the device plugin's", func() bool { return owners.Value()["GPU-0"] == dra.OwnedByPlugin })
	s.until("kubelet forgets the driver", func() bool { return len(k.Registered()) == 0 })
	s.until("and that is told", driver(false))
	if now, why := ready(ctx); !now || why != "" || s.pool() != "none" {
		t.Errorf("without claims: ready %v (%s), pool %s", now, why, s.pool())
	}
}
