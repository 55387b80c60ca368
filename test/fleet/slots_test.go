package fleet

import (
	"context"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
)

const (
	slotSpace  = "gpu-changes"
	slotNumber = 20
	// quietTime is how long no further node may take a slot while all slots belong to failed nodes. A
	// waiting node looks at the slots at least every 90 seconds.
	quietTime = 2 * time.Minute
	// changes are the nodes that change after the bad driver was replaced.
	changes = 5 * slotNumber
)

// TestSlots: all nodes want another driver, and the driver does not work. As many nodes as there are
// slots try it. After the driver was replaced by one that works and an operator has freed the slots, nodes change,
// never more at a time than there are slots.
func TestSlots(t *testing.T) {
	if *kubernetesDir == "" {
		t.Skip("needs -kubernetes: see make fleet")
	}
	admin, processes := startAPIServer(t)
	createNodes(t, admin)
	grantSlots(t, admin)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	var others bystander
	running.Go(func() { others.ask(ctx, admin) })
	var seen counters
	var r changing
	r.bad.Store(true)
	measured(t, "have tried the bad driver", processes, &r.failed, slotNumber, wanted, func() {
		for i := range *nodeCount {
			kubeconfig := nodeFiles(t, i)
			running.Go(func() { r.run(ctx, kubeconfig, nodeName(i), &seen) })
		}
	})
	select {
	case <-time.After(quietTime):
	case <-t.Context().Done():
		t.Fatal("interrupted")
	}
	if failed := r.failed.Load(); failed != slotNumber {
		t.Errorf("%d nodes have tried the bad driver, want %d", failed, slotNumber)
	}
	r.bad.Store(false)
	measured(t, "have changed", processes, &r.changed, changes, wanted, func() {
		leases := admin.CoordinationV1().Leases(slotSpace)
		all, err := leases.List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range all.Items { // as kubectl gpu rollout retry does
			if err := leases.Delete(ctx, l.Name, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	})
	if most := r.most.Load(); most > slotNumber {
		t.Errorf("%d nodes changed at the same time, want at most %d", most, slotNumber)
	}
	t.Log(&others)
	t.Logf("requests of the nodes, by verb, resource and answer: %s", seen.String())
}

// A changing fleet is to get another driver.
type changing struct {
	bad             atomic.Bool  // the driver does not work
	failed, changed atomic.Int64 // nodes
	busy, most      atomic.Int64 // nodes that change at the same time
}

// run is a node, until ctx ends.
func (r *changing) run(ctx context.Context, kubeconfig, name string, seen *counters) {
	c := config.Config{
		Startup: config.Startup{Kubeconfig: kubeconfig, NodeName: name, StateDir: filepath.Dir(kubeconfig)},
		Live: config.Live{Rollout: config.Rollout{Slots: slotNumber, Namespace: slotSpace},
			DriverChange: config.DriverChange{Version: "580.1"}},
	}
	d := viewOf(c, seen.count)
	state := d.DriverChange
	state.Publish(driverchange.Status{Known: true, Wanted: "580.1", State: driverchange.Waiting, NeedsSlot: true})
	own := cluster.New(cluster.Options{})
	own.Choose(ctx, c.Startup)
	var tasks sync.WaitGroup
	for _, task := range append(own.Observation(d.Configs, "second boot"), own.Outputs(d)...) {
		tasks.Go(func() { _ = task.Run(ctx) }) // they end with ctx
	}
	tasks.Go(func() { r.change(ctx, own, state) })
	tasks.Wait()
}

// change changes the driver of a node that has a slot, as driverswap does. A node that failed tries
// again when it has another slot.
func (r *changing) change(ctx context.Context, own *cluster.Cluster, state *feed.Feed[driverchange.Status]) {
	const name = "driver 580.1"
	failedAt := time.Time{} // of the slot
	for pause := time.Second; ctx.Err() == nil; {
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
		if own.RequestSlot(name) != nil || own.SlotSince().Equal(failedAt) {
			continue
		}
		busy := r.busy.Add(1)
		for most := r.most.Load(); busy > most && !r.most.CompareAndSwap(most, busy); most = r.most.Load() {
		}
		state.Publish(driverchange.Status{Known: true, Wanted: "580.1", State: driverchange.Changing, NeedsSlot: true})
		select {
		case <-time.After(3 * time.Second): // drivers take longer
		case <-ctx.Done():
		}
		r.busy.Add(-1)
		if r.bad.Load() {
			failedAt = own.SlotSince()
			r.failed.Add(1)
			state.Publish(driverchange.Status{Known: true, Wanted: "580.1", State: driverchange.Failed, Reason: "it finds no GPU",
				NeedsSlot: true})
			continue
		}
		r.changed.Add(1)
		state.Publish(driverchange.Status{Known: true, Wanted: "580.1", State: driverchange.Done})
		return
	}
}

// grantSlots gives the nodes' account the rights for slots.
func grantSlots(t *testing.T, admin *kubernetes.Clientset) {
	t.Helper()
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: slotSpace}}
	if _, err := admin.CoreV1().Namespaces().Create(t.Context(), space, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	name := metav1.ObjectMeta{Name: "gpu-device-plugin"}
	role := &rbacv1.Role{ObjectMeta: name, Rules: []rbacv1.PolicyRule{{APIGroups: []string{"coordination.k8s.io"},
		Resources: []string{"leases"}, Verbs: []string{"get", "list", "create", "update", "delete"}}}}
	if _, err := admin.RbacV1().Roles(slotSpace).Create(t.Context(), role, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	binding := &rbacv1.RoleBinding{ObjectMeta: name,
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name.Name},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: account}}}
	if _, err := admin.RbacV1().RoleBindings(slotSpace).Create(t.Context(), binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}
