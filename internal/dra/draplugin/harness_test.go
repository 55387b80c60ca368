package draplugin_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/draplugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet/plugins"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// patience limits every wait for an expected event.
const patience = time.Minute

// claims prepares and reads claims as a test wants.
type claims struct {
	prepare func(context.Context, dra.Claim) error
	read    func(context.Context, string) error

	mu       sync.Mutex // guards all following fields
	prepared map[string]bool
	uids     map[string]string // at the API server, by name; the name itself if there is none
}

func (c *claims) Prepare(ctx context.Context, uid string,
	read func(context.Context) (dra.Claim, error)) ([]dra.Prepared, error) {
	claim, err := read(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the claim: %w", err)
	}
	if claim.UID != uid {
		return nil, fmt.Errorf("its UID is %s, and not %s", claim.UID, uid)
	}
	if c.prepare != nil {
		if err := c.prepare(ctx, claim); err != nil {
			return nil, err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.prepared == nil {
		c.prepared = map[string]bool{}
	}
	c.prepared[claim.UID] = true
	var devices []dra.Prepared
	for _, r := range claim.Results {
		devices = append(devices, dra.Prepared{Requests: []string{r.Request}, Pool: r.Pool, Device: r.Device,
			ShareID:      r.ShareID,
			CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=" + claim.UID + "-" + r.Device}})
	}
	return devices, nil
}

func (c *claims) Unprepare(_ context.Context, uid, _, _ string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.prepared, uid)
	return nil
}

func (c *claims) Claim(ctx context.Context, namespace, name string) (dra.Claim, error) {
	if c.read != nil {
		if err := c.read(ctx, name); err != nil {
			return dra.Claim{}, err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	uid := name
	if other, ok := c.uids[name]; ok {
		uid = other
	}
	return dra.Claim{UID: uid, Namespace: namespace, Name: name,
		Results: []dra.Result{{Request: "gpu", Pool: "node-1", Device: "gpu-0", ShareID: "s"}}}, nil
}

func (c *claims) isPrepared(uid string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.prepared[uid]
}

// claim returns a claim as named by the kubelet; its name is its UID.
func claim(uid string) *drav1.Claim { return &drav1.Claim{Namespace: "default", Name: uid, Uid: uid} }

// A node is a plugin folder, and the surroundings of the drivers on the node.
type node struct {
	dir       string
	claims    *claims
	pools     *feed.Feed[dra.Pool]
	snapshots *feed.Feed[inventory.Snapshot]
}

// newNode returns a node with two healthy GPUs.
func newNode(t *testing.T) *node {
	t.Helper()
	dir := loopback.Folder(t)
	n := &node{dir: dir, claims: &claims{}, pools: feed.New(dra.Pool{}), snapshots: feed.New(inventory.Snapshot{})}
	n.publish(inventory.Health{State: inventory.Healthy})
	return n
}

// publish publishes two GPUs, the first with the given health.
func (n *node) publish(health inventory.Health) {
	gpus := []inventory.GPU{{UUID: "GPU-0", Health: health},
		{UUID: "GPU-1", Index: 1, Health: inventory.Health{State: inventory.Healthy}}}
	n.snapshots.Publish(inventory.Snapshot{GPUs: gpus})
	n.pools.Publish(dra.New(n.snapshots.Value(), "node-1", dra.Numbers{"GPU-0": 0, "GPU-1": 1}, dra.All(gpus), nil))
}

// A driver is a running driver.
type driver struct {
	*draplugin.Plugin
	stop   func()
	logged func() string
}

// start runs a driver until the test ends, or stop is called.
func (n *node) start(t *testing.T, c clock.WithTicker) *driver {
	t.Helper()
	return n.startProcess(t, draplugin.Options{Claims: n.claims, Reader: n.claims, Clock: c})
}

// startProcess runs the driver of a process, with separate claims.
func (n *node) startProcess(t *testing.T, o draplugin.Options) *driver {
	t.Helper()
	o.RegistryDir, o.Pools, o.Snapshots = n.dir, n.pools, n.snapshots
	s := draplugin.New(o)
	log := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.Verbosity(2), ktesting.BufferLogs(true)))
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), log))
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	d := &driver{Plugin: s, logged: log.GetSink().(ktesting.Underlier).GetBuffer().String, stop: sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("Run returned %v", err)
			}
		case <-time.After(patience):
			t.Error("Run did not return")
		}
	})}
	t.Cleanup(d.stop)
	return d
}

// startKubelet starts a kubelet. The test may stop the kubelet early.
func (n *node) startKubelet(t *testing.T, services ...string) *plugins.Kubelet {
	t.Helper()
	k := plugins.Start(plugins.Options{Dir: n.dir, Services: services})
	t.Cleanup(k.Stop)
	return k
}

// await waits until a driver's status is as wanted.
func (d *driver) await(t *testing.T, what string, wanted func(draplugin.Status) bool) draplugin.Status {
	t.Helper()
	return poll.Latest(t, what, d.Status(), wanted)
}

func (d *driver) awaitRegistered(t *testing.T) {
	t.Helper()
	d.await(t, "registered", func(s draplugin.Status) bool { return s.Registered })
}

// awaitCalled waits until the kubelet is connected to the last driver to register, and calls the
// driver.
func awaitCalled(t *testing.T, k *plugins.Kubelet) {
	t.Helper()
	poll.Until(t, "kubelet calls the driver that registered last", func() bool {
		registered := k.Registered()
		return k.Called(dra.Driver) == registered[len(registered)-1]
	})
}

// sockets returns the names of the sockets in the folder.
func (n *node) sockets(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir(n.dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// prepare has kubelet prepare claims, and returns the errors in the answers by UID; "" for none.
func prepare(t *testing.T, k *plugins.Kubelet, uids ...string) map[string]string {
	t.Helper()
	var asked []*drav1.Claim
	for _, uid := range uids {
		asked = append(asked, claim(uid))
	}
	answers, err := k.Prepare(t.Context(), dra.Driver, asked...)
	if err != nil {
		t.Fatal(err)
	}
	said := map[string]string{}
	for uid, a := range answers {
		said[uid] = a.GetError()
		if a.GetError() == "" && len(a.GetDevices()) == 0 {
			said[uid] = "no devices"
		}
	}
	return said
}

func (n *node) socket(name string) string { return filepath.Join(n.dir, name) }

func removeFile(t *testing.T, path string) {
	t.Helper()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
}
