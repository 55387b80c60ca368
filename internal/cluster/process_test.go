package cluster_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/owner"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/pool"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet/plugins"
)

// The tasks of one process together, at an API server and a kubelet on real sockets. The node is
// labelled, its label chooses the configuration file, and its GPUs are in a slice. When DRA is
// switched off, a GPU goes back to the device plugin as soon as no claim has it, and kubelet
// forgets the driver.
func TestProcess(t *testing.T) {
	t.Parallel()
	server, err := apiserver.Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	s := &stage{T: t, server: server, real: true}
	short, err := os.MkdirTemp("", "r") // the path of a socket has 107 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(short) })
	registry := filepath.Join(short, "plugins_registry")
	if err := os.Mkdir(registry, 0o700); err != nil {
		t.Fatal(err)
	}
	c := s.chooser()
	c.label("a")
	c.Startup.KubeletRoot = short
	c.configure(func(now *config.Config) {
		now.KubeletRoot, now.Features.Labels, now.DRA = short, config.LabelsNode, config.DRA{Mode: config.DRAAll}
	})
	c.Snapshots.Publish(snapshotOf(2))
	c.Labels.Publish(map[string]string{countLabel: "2"})
	owners, offered := feed.New(dra.Owners(nil)), feed.New(dra.Owners(nil))
	c.DRA = &daemon.DRA{
		Owners: owners, Offered: offered, Claims: claims.New(claims.Options{}), Driver: feed.New(status.DRADriver{}),
		Devices: pool.New(pool.Options{
			StateDir: c.state, Node: nodeName, Snapshots: c.Snapshots, Configs: c.Configs, Owners: owners,
			Divisions: feed.New(dra.Divisions{}),
		}),
	}
	c.DRA.Claims.InUse().Publish(map[string][]claims.Holder{})
	c.DRA.Arbiter = owner.New(owner.Options{
		Devices: c.DRA.Devices, Offered: offered, Records: c.DRA.Claims.InUse(),
		List: func(ctx context.Context, gpus []string) (map[string][]string, error) {
			return c.cluster.ClaimsOf(ctx, nodeName, gpus, c.DRA.Devices.GPU)
		},
	})
	c.start()
	var running sync.WaitGroup
	running.Go(func() { _ = c.DRA.Devices.Run(t.Context()) })
	running.Go(func() { _ = c.DRA.Arbiter.Run(t.Context()) })
	running.Go(func() { // as the device plugin does
		for t.Context().Err() == nil {
			now, changed := owners.Latest()
			offered.Publish(now)
			feed.WaitAny(t.Context(), changed)
		}
	})
	t.Cleanup(running.Wait)
	ready := func() bool { now, _ := c.ready(t.Context()); return now }
	s.until("the node is labelled", func() bool { return s.node().Labels[countLabel] == "2" })
	s.until("the size of the cluster is saved", func() bool { _, err := os.Stat(filepath.Join(c.state, "cluster.json")); return err == nil })
	if ready() || len(s.server.Slices()) > 0 || c.chosen.Value().File != filepath.Join(c.dir, "a") {
		t.Errorf("without a kubelet: ready %v, slices %v, chosen %+v", ready(), s.server.Slices(), c.chosen.Value())
	}
	k := plugins.Start(plugins.Options{Dir: registry})
	t.Cleanup(k.Stop)
	s.untilPool("1: 0 1")
	s.until("the driver is registered, and the process ready",
		func() bool { return c.DRA.Driver.Value().Registered && ready() })
	c.label("b")
	s.until("the other file is chosen", func() bool { return c.chosen.Value().File == filepath.Join(c.dir, "b") })
	if c.requests() == "" || c.cluster.Problem() != nil {
		t.Errorf("%s requests are counted; the problem is %v", c.requests(), c.cluster.Problem())
	}

	result := func(driver, pool, device string) resourceapi.DeviceRequestAllocationResult {
		return resourceapi.DeviceRequestAllocationResult{Request: "r", Driver: driver, Pool: pool, Device: device}
	}
	looks := result(dra.Driver, nodeName, "gpu-0")
	looks.AdminAccess = ptr.To(true)
	for name, results := range map[string][]resourceapi.DeviceRequestAllocationResult{
		"waits": nil, "looks": {looks}, "elsewhere": {result(dra.Driver, "node-2", "gpu-0")}, "unknown": {result(dra.Driver,
			nodeName, "gpu-7")},
		"has": {result("nic.example.com", nodeName, "gpu-0"), result(dra.Driver, nodeName, "gpu-1")},
	} {
		if err := s.server.ChangeClaim("ns", name, func(c *resourceapi.ResourceClaim) {
			if results != nil {
				c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}}
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	s.server.SetFault(apiserver.Fault{Status: 403, Only: func(r apiserver.Request) bool { return r.Verb == "list" && r.Resource == "resourceclaims" }})
	claimsOf := func() (map[string][]string, error) {
		return c.cluster.ClaimsOf(t.Context(), nodeName, []string{"GPU-0", "GPU-1"}, c.DRA.Devices.GPU)
	}
	if claimed, err := claimsOf(); len(claimed) > 0 || !errors.Is(err, owner.ErrNotListed) {
		t.Errorf("without a list: %v, error %v", claimed, err)
	}
	has, err := s.server.Claim("ns", "has")
	if err != nil {
		t.Fatal(err)
	}
	// What comes of the call is not looked at: the driver has read the claim.
	_, _ = k.Prepare(t.Context(), dra.Driver, &drav1.Claim{Uid: string(has.UID), Namespace: "ns", Name: "has"})
	claimed, err := claimsOf()
	if want := map[string][]string{"GPU-1": {"ns/has"}}; !reflect.DeepEqual(claimed, want) ||
		!errors.Is(err, owner.ErrNotListed) {
		t.Errorf("after kubelet has asked for a claim: %v, error %v, want %v", claimed, err, want)
	}
	s.server.SetFault(apiserver.Fault{})
	c.configure(func(now *config.Config) { now.DRA.Mode = config.DRAOff })
	s.until("the GPU that no claim has is the device plugin's",
		func() bool { return owners.Value()["GPU-0"] == dra.OwnedByPlugin })
	if owners.Value()["GPU-1"] == dra.OwnedByPlugin || len(k.Registered()) == 0 {
		t.Errorf("a claim has GPU-1, and it is %v; kubelet knows %v", owners.Value()["GPU-1"], k.Registered())
	}
	if err := s.server.DeleteClaim("ns", "has"); err != nil {
		t.Fatal(err)
	}
	s.until("the other one is, too", func() bool { return owners.Value()["GPU-1"] == dra.OwnedByPlugin })
	s.until("kubelet forgets the driver, and that is told",
		func() bool { return len(k.Registered()) == 0 && !c.DRA.Driver.Value().Registered })
	if _, why := c.ready(t.Context()); !ready() || why != "" || s.pool() != "none" {
		t.Errorf("without claims: %s, pool %s", why, s.pool())
	}
}

// Two processes of a node agree on who leads, by real sockets: the node has the labels of the one
// that does. The lead is handed over when the later one asks for it, and taken when that one ends.
func TestHandOver(t *testing.T) {
	t.Parallel()
	server, err := apiserver.Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	s := &stage{T: t, server: server, real: true}
	s.change(func(*corev1.Node) {})
	dir := t.TempDir()
	run := func(token, count string) (p *process, end func()) {
		p = s.new(config.Config{Live: config.Live{Features: config.Features{Labels: config.LabelsNode}}})
		p.label(map[string]string{countLabel: count})
		p.Lead = lead.New(lead.Options{Dir: dir, Name: token, Token: token})
		ctx, cancel := context.WithCancel(p.logging())
		p.connect(ctx)
		observation := append(p.cluster.Observation(p.Configs, "boot"), daemon.Task{Name: "lead", Run: p.Lead.Run})
		var running sync.WaitGroup
		running.Go(func() { _ = daemon.RunTasks(ctx, p.Lead, observation, p.cluster.Outputs(p.View)) })
		end = sync.OnceFunc(func() { cancel(); running.Wait() })
		t.Cleanup(end)
		return p, end
	}
	labelled := func(count string) func() bool { return func() bool { return s.node().Labels[countLabel] == count } }
	first, _ := run("1", "1")
	s.until("the first one labels the node", labelled("1"))
	second, end := run("2", "2")
	s.until("the second one waits", func() bool { return second.Lead.Statuses().Value().Name == "1" })
	first.label(map[string]string{countLabel: "11"})
	s.until("the first one still leads", labelled("11"))
	second.Lead.Ask()
	s.until("the lead is handed over", labelled("2"))
	first.label(map[string]string{countLabel: "12"})
	second.label(map[string]string{countLabel: "21"})
	s.until("the second one leads", labelled("21"))
	end()
	s.until("the first one leads again", labelled("12"))
}
