package cluster

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// A pauseRig is a node with the DaemonSets of NVIDIA's operator at an API server, and the task that has them go on.
type pauseRig struct {
	t      *testing.T
	server *apiserver.Server
	*Cluster
	daemon daemon.View
	stop   func()
}

func newPauseRig(t *testing.T) *pauseRig {
	t.Helper()
	t.Parallel()
	server, err := apiserver.Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	r := &pauseRig{t: t, server: server, daemon: daemon.View{
		Configs: feed.New(config.Config{MIG: config.MIG{Enabled: true, PauseClients: true}}), MIG: feed.New(mig.Status{}),
	}}
	r.set(map[string]string{"dcgm": deployed, "dcgm-exporter": deployed, "nvsm": "false", "driver": deployed, "mig-manager": pausedForMIG})
	for uid, selects := range map[string]map[string]string{
		"dcgm": {deployLabels + "dcgm": deployed}, "driver": {deployLabels + "driver": deployed}, "nvsm": {deployLabels + "nvsm": deployed},
		"both": {deployLabels + "dcgm-exporter": deployed, deployLabels + "dcgm": deployed}, "other": {"zone": "a"},
	} {
		r.pod(uid, "DaemonSet", selects)
	}
	r.pod("web", "ReplicaSet", map[string]string{deployLabels + "dcgm": deployed})
	r.start()
	t.Cleanup(func() { r.stop() })
	return r
}

// pod adds a pod of the node.
func (r *pauseRig) pod(uid, kind string, selects map[string]string) {
	r.t.Helper()
	err := r.server.AddPod(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "gpu-operator", Name: uid + "-x", UID: types.UID(uid),
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: kind, Name: uid, UID: "o", Controller: new(true)}},
		},
		Spec: corev1.PodSpec{NodeName: "n", NodeSelector: selects},
	})
	if err != nil {
		r.t.Fatal(err)
	}
}

// start starts the task, as a process does.
func (r *pauseRig) start() {
	r.Cluster = &Cluster{
		client:        kubeapi.New(kubeapi.Options{Kubeconfig: r.server.Kubeconfig(), Node: "n", Version: "v1"}),
		pauseRequests: labelPatience, lastRequests: labelPatience,
	}
	c := r.Cluster
	watching, end := context.WithCancel(context.Background())
	ctx, cancel := context.WithCancel(context.Background())
	var observing, running sync.WaitGroup
	observing.Go(func() { c.client.Watch(watching, hasty{}) })
	running.Go(func() { c.resumeClients(ctx, r.daemon, hasty{}) })
	r.stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
		end()
		observing.Wait()
	})
	r.until("the node is known", func() bool { return c.client.Nodes().Value().UID != "" })
}

// set sets deploy labels of the node.
func (r *pauseRig) set(values map[string]string) {
	r.t.Helper()
	err := r.server.ChangeNode("n", func(n *corev1.Node) {
		if n.Labels == nil {
			n.Labels = map[string]string{"zone": "a"}
		}
		for name, value := range values {
			n.Labels[deployLabels+name] = value
		}
	})
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *pauseRig) until(what string, holds func() bool) {
	r.t.Helper()
	for deadline := time.Now().Add(labelPatience); !holds(); <-time.After(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			r.t.Fatalf("not within %v: %s; the node has %v", labelPatience, what, r.has())
		}
	}
}

// has are the deploy labels of the node.
func (r *pauseRig) has() map[string]string {
	n, err := r.server.Node("n")
	if err != nil {
		return map[string]string{"error": err.Error()}
	}
	found := map[string]string{}
	for key, value := range n.Labels {
		if name, ok := strings.CutPrefix(key, deployLabels); ok {
			found[name] = value
		}
	}
	return found
}

// labels are the deploy labels of the node, with these values of those that are paused here.
func labelsWith(dcgm, exporter string) map[string]string {
	return map[string]string{"dcgm": dcgm, "dcgm-exporter": exporter, "nvsm": "false", "driver": deployed, "mig-manager": pausedForMIG}
}

func (r *pauseRig) shows(dcgm, exporter string) {
	r.t.Helper()
	want := labelsWith(dcgm, exporter)
	r.until(dcgm+" "+exporter, func() bool { return cmp.Equal(want, r.has()) })
}

// resumes has the owner say whether DaemonSets go on.
func (r *pauseRig) resumes(now bool) { r.daemon.MIG.Publish(mig.Status{Resume: now}) }

// TestPause: labels are paused by which DaemonSets of these pods select the node, and no others; never one of what clients need.
func TestPause(t *testing.T) {
	r := newPauseRig(t)
	for _, uid := range []string{"driver", "other", "web"} {
		if err := r.Pause(t.Context(), []string{uid}); err == nil || !strings.Contains(err.Error(), "pod gpu-operator/"+uid+"-x is of no DaemonSet") {
			t.Errorf("%s: %v", uid, err)
		}
	}
	if err := r.Pause(t.Context(), []string{"gone", "nvsm"}); err != nil {
		t.Errorf("a pod that is gone, and one whose label is not true: %v", err)
	}
	r.shows(deployed, deployed)
	if err := r.Pause(t.Context(), []string{"dcgm"}); err != nil {
		t.Error(err)
	}
	r.shows(pausedForMIG, deployed)
	if err := r.Pause(t.Context(), []string{"both", "web"}); err == nil || !strings.Contains(err.Error(), "gpu-operator/web-x") {
		t.Errorf("one that can be paused and one that cannot: %v", err)
	}
	r.shows(pausedForMIG, pausedForMIG)
	writes := r.server.Writes()
	if err := r.Pause(t.Context(), []string{"dcgm", "both"}); err != nil || r.server.Writes() != writes {
		t.Errorf("paused again: %v, %d writes", err, r.server.Writes()-writes)
	}
	r.resumes(true)
	r.shows(deployed, deployed)
}

// TestPausedLabelsOfOthers: a label that somebody changes meanwhile stays as that one wants it, and the rest goes on.
func TestPausedLabelsOfOthers(t *testing.T) {
	r := newPauseRig(t)
	if err := r.Pause(t.Context(), []string{"both"}); err != nil {
		t.Fatal(err)
	}
	r.set(map[string]string{"dcgm": "false"})
	r.resumes(true)
	r.shows("false", deployed)
	// The API server knows what this process does not yet: nothing is overwritten.
	node, err := r.client.Get(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r.set(map[string]string{"dcgm-exporter": "paused-for-driver-upgrade"})
	for _, swap := range [][2]string{{deployed, pausedForMIG}, {pausedForMIG, deployed}} {
		_, err := r.client.SwapLabels(t.Context(), node.UID, []string{deployLabels + "dcgm-exporter"}, swap[0], swap[1])
		if !kubeapi.IsCode(err, 422) {
			t.Errorf("from %s to %s: %v", swap[0], swap[1], err)
		}
	}
	r.set(map[string]string{"dcgm-exporter": deployed})
	if _, err := r.client.SwapLabels(t.Context(), "another node", []string{deployLabels + "dcgm-exporter"}, deployed, pausedForMIG); err == nil {
		t.Error("a node of that name with another UID was changed")
	}
	r.shows("false", deployed)
}

// TestPausedIsRemembered: what an earlier process has paused goes on when this one says so, and not before; a process that ends has what it
// has paused go on.
func TestPausedIsRemembered(t *testing.T) {
	r := newPauseRig(t)
	if err := r.Pause(t.Context(), []string{"dcgm"}); err != nil {
		t.Fatal(err)
	}
	r.stop()
	r.shows(deployed, deployed) // there may be no next process
	r.set(map[string]string{"dcgm": pausedForMIG})
	r.start() // after a kill
	<-time.After(50 * time.Millisecond)
	r.shows(pausedForMIG, deployed)
	r.resumes(true)
	r.shows(deployed, deployed)
	r.resumes(false)
	r.set(map[string]string{"dcgm": pausedForMIG})
	r.stop() // not by this process
	r.shows(pausedForMIG, deployed)
}

// TestPauseIsOff: without the option nothing is set back. It may be switched off while something is paused.
func TestPauseIsOff(t *testing.T) {
	r := newPauseRig(t)
	if err := r.Pause(t.Context(), []string{"dcgm"}); err != nil {
		t.Fatal(err)
	}
	r.daemon.Configs.Publish(config.Config{MIG: config.MIG{Enabled: true}})
	// The watch may tell of the labels after the request has changed them.
	r.until("the node is watched, with a paused DaemonSet", func() bool { return r.needed(r.daemon.Configs.Value()) })
	r.resumes(true)
	r.shows(deployed, deployed)
	r.stop()
	r.set(map[string]string{"dcgm": pausedForMIG})
	r.start()
	<-time.After(50 * time.Millisecond)
	r.shows(pausedForMIG, deployed)
}

// TestPausedThroughFaultsOfTheAPIServer: whatever it does meanwhile, DaemonSets go on.
func TestPausedThroughFaultsOfTheAPIServer(t *testing.T) {
	for _, fault := range apiserver.Faults() {
		t.Run(fault.Name, func(t *testing.T) {
			r := newPauseRig(t)
			if err := r.Pause(t.Context(), []string{"both"}); err != nil {
				t.Fatal(err)
			}
			if err := fault.Begin(r.server); err != nil {
				t.Fatal(err)
			}
			r.resumes(true)
			<-time.After(20 * time.Millisecond)
			if err := fault.End(r.server); err != nil {
				t.Fatal(err)
			}
			r.shows(deployed, deployed)
		})
	}
}

// TestPauseThatFails: nothing is paused while the node is not known or the API server refuses a request, and each problem is told.
func TestPauseThatFails(t *testing.T) {
	r := newPauseRig(t)
	unknown := New()
	unknown.client = kubeapi.New(kubeapi.Options{Kubeconfig: r.server.Kubeconfig(), Node: "n"})
	if err := unknown.Pause(t.Context(), []string{"dcgm"}); err == nil || !strings.Contains(err.Error(), "has not told of the node") {
		t.Errorf("before the node is known: %v", err)
	}
	for what, only := range map[string]func(apiserver.Request) bool{
		"pods are not listed":    func(q apiserver.Request) bool { return q.Resource == "pods" },
		"nothing can be written": apiserver.Request.IsWrite,
	} {
		r.server.SetFault(apiserver.Fault{Status: 500, Only: only})
		err := r.Pause(t.Context(), []string{"dcgm", "web"})
		if err == nil || strings.Contains(err.Error(), "web-x") != (what == "nothing can be written") || r.ours {
			t.Errorf("%s: %v, paused: %v", what, err, r.ours)
		}
	}
	r.shows(deployed, deployed)
	r.server.SetFault(apiserver.Fault{})
	if err := r.Pause(t.Context(), []string{"dcgm"}); err != nil {
		t.Fatal(err)
	}
	r.server.SetFault(apiserver.Fault{Status: 403})
	r.resumes(true)
	r.stop() // it does not wait until that is over
	r.server.SetFault(apiserver.Fault{})
	r.shows(pausedForMIG, deployed)
}

// TestWithoutMIG: a program that changes no layouts has nothing to follow.
func TestWithoutMIG(t *testing.T) {
	t.Parallel()
	c := New()
	c.followLayout(t.Context(), daemon.View{}, hasty{})
	c.resumeClients(t.Context(), daemon.View{}, hasty{})
}
