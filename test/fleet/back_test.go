package fleet

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/draplugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/owner"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/pool"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// configured is the time in which the kubelets of all nodes bring a new configuration file to their
// pods.
const configured = time.Minute

// TestGoingBack has the device plugin of all nodes get all GPUs back from Dynamic Resource
// Allocation, by a new configuration file, in a cluster with eight claims for each node. The claims
// are for other nodes, so that none of these nodes has to wait for a pod. 99 of 100 answers to
// another client are to take no longer than a second meanwhile.
func TestGoingBack(t *testing.T) {
	if *kubernetesDir == "" {
		t.Skip("needs -kubernetes: see make fleet")
	}
	admin, processes := startAPIServer(t)
	createNodes(t, admin)
	createClaims(t, admin, 8**nodeCount)
	machine := scanned(t, "dgx-h100")
	machine.Generation = 1
	var made, back atomic.Int64
	var seen counters
	counted := func(verb, resource string, code int) {
		seen.count(verb, resource, code)
		if resource == "resourceslices" && verb == http.MethodPost && code == http.StatusCreated {
			made.Add(1)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	nodes := make([]*returning, *nodeCount)
	for i := range nodes {
		nodes[i] = newReturning(nodeFiles(t, i), nodeName(i), machine)
	}
	measured(t, "published", processes, &made, *nodeCount, *limit, func() { // which TestPublishing measures
		for _, n := range nodes {
			running.Go(func() { n.run(ctx, counted, &back) })
		}
	})
	t.Logf("before, %s", bystanderFor(ctx, admin, 20*time.Second))
	var others bystander
	asking, enough := context.WithCancel(ctx)
	running.Go(func() { others.ask(asking, admin) })
	measured(t, "got their GPUs back", processes, &back, *nodeCount, *limit, func() {
		for i, n := range nodes {
			running.Go(func() { n.goBack(ctx, configured*time.Duration(i)/time.Duration(len(nodes))) })
		}
	})
	enough()
	t.Log(&others)
	t.Logf("requests of the nodes, by verb, resource and answer: %s", seen.String())
	if p99 := others.quantile(0.99); p99 > wanted {
		t.Errorf("p99 of the answers to another client is %v, want %v", p99, wanted)
	}
	left, err := admin.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(left.Items) > 0 {
		t.Errorf("%d slices are left", len(left.Items))
	}
}

// createClaims makes claims, each of which was given a GPU of a node that is none of the fleet's.
func createClaims(t *testing.T, admin *kubernetes.Clientset, count int) {
	t.Helper()
	each(t, count, func(i int) error {
		all := admin.ResourceV1().ResourceClaims(namespace)
		claim := &resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("claim-%06d", i)},
			Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
				Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com"},
			}}}},
		}
		claim, err := all.Create(t.Context(), claim, metav1.CreateOptions{})
		if err != nil {
			return err
		}
		claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{
				Request: "gpu", Driver: dra.Driver, Pool: fmt.Sprintf("other-%05d", i/8), Device: fmt.Sprintf("gpu-%d", i%8),
			}},
		}}
		claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: claim.Name,
			UID: claim.UID}}
		_, err = all.UpdateStatus(t.Context(), claim, metav1.UpdateOptions{})
		return err
	})
}

// A returning node publishes its GPUs, and takes them back when its configuration says so.
type returning struct {
	config  config.Config
	configs *feed.Feed[config.Config]
	owners  *feed.Feed[dra.Owners]
	devices *pool.Devices
	gpus    int
}

func newReturning(kubeconfig, name string, machine inventory.Snapshot) *returning {
	dir := filepath.Dir(kubeconfig)
	c := config.Config{
		Startup: config.Startup{Kubeconfig: kubeconfig, NodeName: name, StateDir: dir},
		Live:    config.Live{DRA: config.DRA{Mode: config.DRAAll}},
	}
	r := &returning{config: c, configs: feed.New(c), owners: feed.New(dra.Owners(nil)), gpus: len(machine.GPUs)}
	r.devices = pool.New(pool.Options{
		StateDir: dir, Node: name, Snapshots: feed.New(machine), Configs: r.configs, Owners: r.owners,
	})
	return r
}

// goBack has the device plugin be given all GPUs after a time.
func (r *returning) goBack(ctx context.Context, after time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(after):
		c := r.config
		c.DRA.Mode = config.DRAOff
		r.configs.Publish(c)
	}
}

// run does what gpu-node-agent does with the GPUs until ctx ends. When the device plugin has all of
// them, it is counted.
func (r *returning) run(ctx context.Context, counted func(verb, resource string, code int), back *atomic.Int64) {
	own := cluster.New(cluster.Options{})
	own.Choose(ctx, r.config.Startup)
	own.Observation(r.configs, "second boot") // its tasks are not what is measured
	own.Count(counted)
	arbiter := owner.New(owner.Options{
		Devices: r.devices, Offered: r.owners, Records: feed.New(map[string][]claims.Holder{}),
		List: func(ctx context.Context, gpus []string) (map[string][]string, error) {
			return own.ClaimsOf(ctx, r.config.NodeName, gpus, r.devices.GPU)
		},
	})
	var tasks sync.WaitGroup
	tasks.Go(func() { _ = arbiter.Run(ctx) }) // all end with ctx
	tasks.Go(func() { _ = r.devices.Run(ctx) })
	tasks.Go(func() {
		own.PublishSlices(ctx, r.devices, feed.New(draplugin.Status{Registered: true, Registrations: 1}))
	})
	for told := false; ctx.Err() == nil; {
		owners, changed := r.owners.Latest()
		has := len(owners) == r.gpus && owners.AllPlugin()
		if has && !told {
			back.Add(1)
		}
		told = told || has
		feed.WaitAny(ctx, changed)
	}
	tasks.Wait()
}
