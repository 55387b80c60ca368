package fleet

import (
	"context"
	"net/http"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/draplugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/pool"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// TestPublishing has all nodes publish eight GPUs at once. Then a tenth of them has a fault at the
// same moment: each writes once, and at once, so that there is no limit for the answers.
func TestPublishing(t *testing.T) {
	if *kubernetesDir == "" {
		t.Skip("needs -kubernetes: see make fleet")
	}
	admin, processes := startAPIServer(t)
	createNodes(t, admin)
	machine := scanned(t, "dgx-h100")
	machine.Generation = 1 // as the monitor has it after its first look
	nodes := make([]*publishing, *nodeCount)
	for i := range nodes {
		nodes[i] = &publishing{kubeconfig: nodeFiles(t, i), name: nodeName(i), snapshots: feed.New(machine)}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	var others bystander
	running.Go(func() { others.ask(ctx, admin) })
	var seen counters
	var made, changed atomic.Int64
	counted := func(verb, resource string, code int) {
		seen.count(verb, resource, code)
		switch {
		case resource != "resourceslices":
		case verb == http.MethodPost && code == http.StatusCreated:
			made.Add(1)
		case verb == http.MethodPut && code == http.StatusOK:
			changed.Add(1)
		}
	}
	measured(t, "published", processes, &made, *nodeCount, wanted, func() {
		for _, n := range nodes {
			running.Go(func() { n.run(ctx, counted) })
		}
	})
	fault := machine
	fault.Generation, fault.GPUs = machine.Generation+1, append([]inventory.GPU(nil), machine.GPUs...)
	fault.GPUs[3].Health = inventory.Health{State: inventory.Unhealthy, XID: 79, Since: time.Unix(1_700_000_000, 0),
		Remedy: inventory.RemedyReset}
	measured(t, "showed a fault", processes, &changed, *nodeCount/10, *limit, func() {
		for i := 0; i < *nodeCount; i += 10 {
			nodes[i].snapshots.Publish(fault)
		}
	})
	t.Log(&others)
	t.Logf("requests of the nodes, by verb, resource and answer: %s", seen.String())
	if made.Load() > int64(*nodeCount) || changed.Load() > int64(*nodeCount/10) {
		t.Errorf("%d slices were made and %d changed, for %d nodes", made.Load(), changed.Load(), *nodeCount)
	}
	slice, err := admin.ResourceV1().ResourceSlices().Get(t.Context(), nodeName(0)+"-gpu.nvidia.com-0",
		metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	want := published(t, nodeName(0), fault)[0]
	same(t, "published", want, slice)
}

// A publishing node publishes its devices.
type publishing struct {
	kubeconfig, name string
	snapshots        *feed.Feed[inventory.Snapshot]
}

// run publishes until ctx ends.
func (p *publishing) run(ctx context.Context, counted func(verb, resource string, code int)) {
	c := config.Config{
		Startup: config.Startup{
			Kubeconfig: p.kubeconfig,
			NodeName:   p.name,
			StateDir:   filepath.Dir(p.kubeconfig),
		},
		Live: config.Live{
			DRA: config.DRA{Mode: config.DRAAll},
		},
	}
	devices := pool.New(pool.Options{
		Node: p.name, Snapshots: p.snapshots, Configs: feed.New(c), Owners: feed.New(dra.All(p.snapshots.Value().GPUs)),
	})
	own := cluster.New(cluster.Options{})
	own.Choose(ctx, c.Startup)
	own.Observation(feed.New(c), "second boot") // its tasks are not what is measured
	own.Count(counted)
	var tasks sync.WaitGroup
	tasks.Go(func() { _ = devices.Run(ctx) }) // both end with ctx
	tasks.Go(func() {
		own.PublishSlices(ctx, devices, feed.New(draplugin.Status{Registered: true, Registrations: 1}))
	})
	tasks.Wait()
}

// measured begins something that all nodes do, waits until it is done by so many, and tells how
// long it took and how the API server answered. 99 of 100 answers are to take no longer than
// longest.
func measured(t *testing.T, what string, processes []process, done *atomic.Int64, want int, longest time.Duration,
	begin func()) {
	t.Helper()
	before, used := scrape(t), make([]time.Duration, len(processes))
	for i, p := range processes {
		used[i] = cpuTime(t, p.pid)
	}
	start := time.Now()
	begin()
	for time.Since(start) < *limit && done.Load() < int64(want) {
		select {
		case <-time.After(time.Second):
		case <-t.Context().Done():
			t.Fatal("interrupted")
		}
	}
	took := time.Since(start)
	after := scrape(t)
	t.Logf("%d of %d nodes %s after %v; load %s", done.Load(), want, what, took.Round(100*time.Millisecond), load(t))
	for i, p := range processes {
		cpu := cpuTime(t, p.pid) - used[i]
		t.Logf("%s used %v of CPU time, %v a node", p.name, cpu.Round(time.Second),
			(cpu / time.Duration(want)).Round(100*time.Microsecond))
	}
	if done.Load() < int64(want) {
		t.Errorf("only %d of %d nodes %s after %v", done.Load(), want, what, took)
	}
	for _, metric := range []string{
		"apiserver_request_duration_seconds", "apiserver_request_duration_seconds LIST", "apiserver_request_duration_seconds POST",
		"apiserver_request_duration_seconds PUT",
	} {
		d := after[metric].since(before[metric])
		if d.count() == 0 {
			continue
		}
		t.Logf("%s: %d, p50 %v, p99 %v", metric, d.count(), d.quantile(0.5), d.quantile(0.99))
		if p99 := d.quantile(0.99); p99 > longest {
			t.Errorf("p99 of %s is %v, want %v", metric, p99, longest)
		}
	}
}
