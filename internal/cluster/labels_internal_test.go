package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// labelPatience is how long a test waits for what takes milliseconds.
const labelPatience = time.Minute

// A hasty clock goes a thousand times as fast as others.
type hasty struct{ clock.RealClock }

const haste = 1000

var hastySince = time.Now()

func (h hasty) After(d time.Duration) <-chan time.Time { return h.RealClock.After(d / haste) }

func (h hasty) Now() time.Time { return hastySince.Add(time.Since(hastySince) * haste) }

// A labelRig is a node with an API server, and the tasks that label it.
type labelRig struct {
	t      *testing.T
	server *apiserver.Server
	api    kubernetes.Interface
	daemon daemon.View
	log    ktesting.Underlier
	stop   func()
}

// newLabelRig starts an API server with a node that has labels, and the tasks.
func newLabelRig(t *testing.T, way config.LabelsOutput, before map[string]string) *labelRig {
	t.Helper()
	server, err := apiserver.Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	if err := server.ChangeNode("n", func(n *corev1.Node) { n.Labels = before }); err != nil {
		t.Fatal(err)
	}
	rest, err := clientcmd.BuildConfigFromFlags("", server.Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	api, err := kubernetes.NewForConfig(rest)
	if err != nil {
		t.Fatal(err)
	}
	now := config.Config{Namespace: "gpu", Features: config.Features{Labels: way}}
	r := &labelRig{t: t, server: server, api: api, daemon: daemon.View{
		Config: config.Config{PodName: "p"}, Configs: feed.New(now), Labels: feed.New[map[string]string](nil), Unlabeled: feed.New[error](nil),
	}}
	r.start()
	t.Cleanup(func() { r.stop() })
	return r
}

// start starts the tasks, as a process does.
func (r *labelRig) start() {
	c := &Cluster{client: kubeapi.New(kubeapi.Options{Kubeconfig: r.server.Kubeconfig(), Node: "n", Version: "v1"})}
	logger := ktesting.NewLogger(r.t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	r.log = logger.GetSink().(ktesting.Underlier)
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), logger))
	var running sync.WaitGroup
	running.Go(func() { c.client.Watch(ctx, hasty{}) })
	running.Go(func() { c.labelNode(ctx, r.daemon, hasty{}) })
	running.Go(func() { c.labelFeature(ctx, r.daemon, hasty{}) })
	r.stop = func() { cancel(); running.Wait() }
}

// until waits for a condition; what says what did not come true.
func (r *labelRig) until(what string, holds func() bool) {
	r.t.Helper()
	for deadline := time.Now().Add(labelPatience); !holds(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			r.t.Fatalf("%s: not within %v; requests %v, log:\n%s", what, labelPatience, r.server.Requests(), r.log.GetBuffer().String())
		}
	}
}

func (r *labelRig) labels() map[string]string {
	r.t.Helper()
	n, err := r.server.Node("n")
	if err != nil {
		r.t.Fatal(err)
	}
	return n.Labels
}

func (r *labelRig) untilLabels(when string, want map[string]string) {
	r.t.Helper()
	for deadline := time.Now().Add(labelPatience); !maps.Equal(want, r.labels()); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			r.t.Fatalf("%s (-want +got):\n%s\nlog:\n%s", when, cmp.Diff(want, r.labels()), r.log.GetBuffer().String())
		}
	}
}

// settled waits until nothing was written for a while, and returns how many writes there were.
func (r *labelRig) settled() int {
	for writes := r.server.Writes(); ; {
		<-time.After(150 * time.Millisecond) // a writer that fails goes on after 5 min, which are 300 ms here
		now := r.server.Writes()
		if now == writes {
			return writes
		}
		writes = now
	}
}

// patch is another program that changes labels of the node; a value of null removes one.
func (r *labelRig) patch(manager, labels string) {
	r.t.Helper()
	body := `{"metadata":{"labels":` + labels + `}}`
	_, err := r.api.CoreV1().Nodes().Patch(r.t.Context(), "n", types.MergePatchType, []byte(body), metav1.PatchOptions{FieldManager: manager})
	if err != nil {
		r.t.Fatal(err)
	}
}

// TestLabelsOfTheNode: they appear, change, go with what they tell of, and are not written when they are as they are to be.
func TestLabelsOfTheNode(t *testing.T) {
	t.Parallel()
	r := newLabelRig(t, config.LabelsNode, map[string]string{"zone": "a"})
	r.daemon.Labels.Publish(map[string]string{"nvidia.com/gpu.count": "8", "nvidia.com/mig-1g.10gb.count": "7"})
	r.untilLabels("first labels", map[string]string{"zone": "a", "nvidia.com/gpu.count": "8", "nvidia.com/mig-1g.10gb.count": "7"})
	if writes := r.settled(); writes != 1 {
		t.Errorf("%d writes for the first labels, want 1", writes)
	}
	r.daemon.Labels.Publish(map[string]string{"nvidia.com/gpu.count": "8"})
	r.untilLabels("a kind of GPU is gone", map[string]string{"zone": "a", "nvidia.com/gpu.count": "8"})
	r.stop()
	before := r.settled()
	r.start()
	r.until("the node is watched again", func() bool { return strings.Contains(fmt.Sprint(r.server.Requests()), "watch") })
	r.patch("kubelet", `{"zone":"b"}`)
	if writes := r.settled() - before; writes != 1 { // the patch
		t.Errorf("%d writes after a restart, want none", writes-1)
	}
	r.patch("kubectl", `{"nvidia.com/gpu.count":null}`)
	r.untilLabels("somebody removed a label", map[string]string{"zone": "b", "nvidia.com/gpu.count": "8"})
	r.daemon.Labels.Publish(nil)
	before = r.settled()
	r.daemon.Configs.Publish(config.Config{})
	r.daemon.Labels.Publish(map[string]string{"nvidia.com/gpu.count": "1"})
	if writes := r.settled() - before; writes != 0 {
		t.Errorf("%d writes while labels are off", writes)
	}
}

// TestLabelsOfOthers: labels that others own are left to them, which is said once, and taken over when they let them go.
func TestLabelsOfOthers(t *testing.T) {
	t.Parallel()
	r := newLabelRig(t, config.LabelsNode, map[string]string{"nvidia.com/gpu.product": "theirs", "nvidia.com/mig-2g.20gb.count": "3"})
	want := map[string]string{"nvidia.com/gpu.product": "ours", "nvidia.com/gpu.count": "8", "nvidia.com/gpu.present": "true"}
	r.patch("gpu-operator", `{"nvidia.com/gpu.present":"true"}`)
	r.daemon.Labels.Publish(want)
	r.untilLabels("beside another program", map[string]string{
		"nvidia.com/gpu.product": "theirs", "nvidia.com/mig-2g.20gb.count": "3", "nvidia.com/gpu.count": "8", "nvidia.com/gpu.present": "true",
	})
	settled := r.settled()
	for i := range 5 {
		r.patch("kubelet", fmt.Sprintf(`{"zone":"%d"}`, i))
	}
	if writes := r.settled() - settled; writes != 5 {
		t.Errorf("%d writes beside labels that belong to others, want none", writes-5)
	}
	if log := r.log.GetBuffer().String(); strings.Count(log, "belongs to another program") != 1 || !strings.Contains(log, `label="nvidia.com/gpu.product"`) {
		t.Errorf("log:\n%s", log)
	}
	r.patch("nfd", `{"nvidia.com/gpu.product":"changed"}`)
	r.until("the owner changed its label", func() bool { return r.labels()["nvidia.com/gpu.product"] == "changed" })
	r.settled()
	r.patch("nfd", `{"nvidia.com/gpu.product":null,"nvidia.com/mig-2g.20gb.count":null}`)
	want = maps.Clone(want)
	want["zone"] = "4"
	r.untilLabels("the owner let go", want)
	if r.daemon.Unlabeled.Value() != nil {
		t.Errorf("problem: %v", r.daemon.Unlabeled.Value())
	}
}

// TestLabelsOfAnotherNode: a node that was deleted is not made by the write, and one that has its name since gets the labels.
func TestLabelsOfAnotherNode(t *testing.T) {
	t.Parallel()
	r := newLabelRig(t, config.LabelsNode, nil)
	r.daemon.Labels.Publish(map[string]string{"nvidia.com/gpu.count": "8"})
	r.untilLabels("the first node", map[string]string{"nvidia.com/gpu.count": "8"})
	if err := r.server.DeleteNode("n"); err != nil {
		t.Fatal(err)
	}
	r.daemon.Labels.Publish(map[string]string{"nvidia.com/gpu.count": "7"})
	r.settled()
	if n, err := r.server.Node("n"); err == nil {
		t.Errorf("the write made a node: %v", n)
	}
	if err := r.server.ChangeNode("n", func(n *corev1.Node) { n.Labels = map[string]string{"zone": "c"} }); err != nil {
		t.Fatal(err)
	}
	r.untilLabels("the second node", map[string]string{"zone": "c", "nvidia.com/gpu.count": "7"})
}

// TestLabelsThroughFaults: whatever the API server did, the labels are right afterwards, and few requests were made meanwhile.
func TestLabelsThroughFaults(t *testing.T) {
	t.Parallel()
	for _, way := range []config.LabelsOutput{config.LabelsNode, config.LabelsNodeFeature} {
		for _, fault := range apiserver.Faults() {
			if fault.Passes {
				continue
			}
			t.Run(way.String()+"/"+fault.Name, func(t *testing.T) {
				t.Parallel()
				r := newLabelRig(t, way, nil)
				has := func(count string) func() bool {
					return func() bool {
						if way == config.LabelsNode {
							return r.labels()["nvidia.com/gpu.count"] == count
						}
						return r.feature("gpu-node-agent-n")["nvidia.com/gpu.count"] == count
					}
				}
				r.daemon.Labels.Publish(map[string]string{"nvidia.com/gpu.count": "8"})
				r.until("labels before the fault", has("8"))
				if err := fault.Begin(r.server); err != nil {
					t.Fatal(err)
				}
				r.daemon.Labels.Publish(map[string]string{"nvidia.com/gpu.count": "7"})
				r.settled()
				if err := fault.End(r.server); err != nil {
					t.Fatal(err)
				}
				r.until("labels after the fault", has("7"))
				r.until("no problem after the fault", func() bool { return r.daemon.Unlabeled.Value() == nil })
			})
		}
	}
}

// feature returns the labels of a NodeFeature; nil if there is none.
func (r *labelRig) feature(name string) map[string]string {
	object, err := r.server.NodeFeature("gpu", name)
	if err != nil {
		return nil
	}
	spec, _ := object.Object["spec"].(map[string]any)
	found := map[string]string{}
	given, _ := spec["labels"].(map[string]any)
	for key, value := range given {
		found[key] = fmt.Sprint(value)
	}
	return found
}

// TestTheNextVersionLabels: in a roll-out two daemons want different labels. The one that yields writes none, and writes again when the
// other has gone.
func TestTheNextVersionLabels(t *testing.T) {
	t.Parallel()
	for _, way := range []config.LabelsOutput{config.LabelsNode, config.LabelsNodeFeature} {
		t.Run(way.String(), func(t *testing.T) {
			t.Parallel()
			r := newLabelRig(t, way, nil)
			r.stop()
			has := func() string {
				if way == config.LabelsNode {
					return r.labels()["nvidia.com/gpu.product"]
				}
				return r.feature("gpu-node-agent-n")["nvidia.com/gpu.product"]
			}
			var yields atomic.Bool
			r.daemon.Yields = yields.Load
			r.daemon.Labels.Publish(map[string]string{"nvidia.com/gpu.product": "old"})
			r.start()
			r.until("the old version labels", func() bool { return has() == "old" })

			next := *r
			next.daemon.Labels, next.daemon.Yields = feed.New(map[string]string{"nvidia.com/gpu.product": "new"}), nil
			yields.Store(true)
			before := r.server.Writes()
			next.start()
			r.until("the next version labels", func() bool { return has() == "new" })
			r.daemon.Labels.Publish(map[string]string{"nvidia.com/gpu.product": "older"})
			if writes := r.settled() - before; writes != 1 || has() != "new" {
				t.Errorf("%d writes and %s, want 1 and new", writes, has())
			}
			next.stop()
			yields.Store(false)
			r.until("the next version was rolled back", func() bool { return has() == "older" })
		})
	}
}

// TestNodeFeature: the object has the labels, the node's name and the DaemonSet as its owner; it is written when it differs.
func TestNodeFeature(t *testing.T) {
	t.Parallel()
	r := newLabelRig(t, config.LabelsOff, nil)
	if err := r.server.AddPod(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "gpu", Name: "p", OwnerReferences: []metav1.OwnerReference{
		{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "ds", UID: "u"},
	}}}); err != nil {
		t.Fatal(err)
	}
	r.daemon.Configs.Publish(config.Config{Namespace: "gpu", Features: config.Features{Labels: config.LabelsNodeFeature}})
	r.daemon.Labels.Publish(map[string]string{"nvidia.com/gpu.count": "8"})
	r.until("the object", func() bool { return r.feature("gpu-node-agent-n")["nvidia.com/gpu.count"] == "8" })
	object, err := r.server.NodeFeature("gpu", "gpu-node-agent-n")
	if err != nil {
		t.Fatal(err)
	}
	owners := object.GetOwnerReferences()
	if len(owners) != 1 || owners[0].Kind != "DaemonSet" || owners[0].UID != "u" || object.GetLabels()["nfd.node.kubernetes.io/node-name"] != "n" {
		t.Errorf("owners %v, labels %v", owners, object.GetLabels())
	}
	if writes := r.settled(); writes != 1 {
		t.Errorf("%d writes, want 1", writes)
	}
	r.daemon.Labels.Publish(map[string]string{"nvidia.com/gpu.present": "true"})
	r.until("other labels", func() bool {
		return maps.Equal(r.feature("gpu-node-agent-n"), map[string]string{"nvidia.com/gpu.present": "true"})
	})
	before := r.settled()
	r.stop()
	r.start()
	r.patch("kubelet", `{"zone":"b"}`)
	if writes := r.settled() - before; writes != 1 { // the patch
		t.Errorf("%d writes after a restart, want none", writes-1)
	}
	if labels := r.labels(); len(labels) != 1 {
		t.Errorf("the node itself was labeled: %v", labels)
	}
}

// TestNodeFeatureIsNotServed: without node-feature-discovery the problem is told, and ends when it is installed.
func TestNodeFeatureIsNotServed(t *testing.T) {
	t.Parallel()
	r := newLabelRig(t, config.LabelsOff, nil)
	r.server.SetNodeFeaturesServed(false)
	r.daemon.Configs.Publish(config.Config{Namespace: "gpu", Features: config.Features{Labels: config.LabelsNodeFeature}})
	r.daemon.Labels.Publish(map[string]string{"nvidia.com/gpu.count": "8"})
	r.until("the problem is told", func() bool {
		err := r.daemon.Unlabeled.Value()
		return err != nil && strings.Contains(err.Error(), "NodeFeature gpu/gpu-node-agent-n")
	})
	r.server.SetNodeFeaturesServed(true)
	r.until("the object", func() bool { return r.feature("gpu-node-agent-n")["nvidia.com/gpu.count"] == "8" })
	r.until("the problem is over", func() bool { return r.daemon.Unlabeled.Value() == nil })
}

// TestNodeFeatureWithoutPatch: the account of NVIDIA's chart and operator may create and update the object, and not patch it.
func TestNodeFeatureWithoutPatch(t *testing.T) {
	t.Parallel()
	r := newLabelRig(t, config.LabelsOff, nil)
	r.daemon.Configs.Publish(config.Config{Namespace: "gpu", Features: config.Features{Labels: config.LabelsNodeFeature}})
	r.server.SetFault(apiserver.Fault{Status: http.StatusForbidden, Only: func(q apiserver.Request) bool { return q.Verb == "apply" }})
	for _, count := range []string{"8", "7"} {
		r.daemon.Labels.Publish(map[string]string{"nvidia.com/gpu.count": count})
		r.until("the object has the labels", func() bool { return r.feature("gpu-node-agent-n")["nvidia.com/gpu.count"] == count })
	}
	r.until("there is no problem", func() bool { return r.daemon.Unlabeled.Value() == nil })
}

// TestNodeFeatureOfDiscovery: beside the object of NVIDIA's program nothing is written, and that is told.
func TestNodeFeatureOfDiscovery(t *testing.T) {
	t.Parallel()
	r := newLabelRig(t, config.LabelsOff, nil)
	theirs := kubeapi.New(kubeapi.Options{Kubeconfig: r.server.Kubeconfig(), Node: "n"})
	if err := theirs.ApplyNodeFeature(t.Context(), "gpu", kubeapi.DiscoveryPrefix, map[string]string{"nvidia.com/gpu.count": "8"}, nil); err != nil {
		t.Fatal(err)
	}
	r.daemon.Configs.Publish(config.Config{Namespace: "gpu", Features: config.Features{Labels: config.LabelsNodeFeature}})
	r.daemon.Labels.Publish(map[string]string{"nvidia.com/gpu.count": "8"})
	r.until("the problem is told", func() bool {
		err := r.daemon.Unlabeled.Value()
		return err != nil && strings.Contains(err.Error(), "gpu-feature-discovery")
	})
	if writes := r.settled(); writes != 1 || r.feature("gpu-node-agent-n") != nil {
		t.Errorf("%d writes, want the one of the other program", writes)
	}
	if err := theirs.ApplyNodeFeature(t.Context(), "gpu", kubeapi.DiscoveryPrefix, nil, nil); err != nil {
		t.Fatal(err)
	}
	r.until("the other program is gone", func() bool { return r.feature("gpu-node-agent-n")["nvidia.com/gpu.count"] == "8" })
	r.until("the problem is over", func() bool { return r.daemon.Unlabeled.Value() == nil })
}

// TestPaceOfWrites: writes that follow one another wait longer and longer, and one after a calm time waits not at all.
func TestPaceOfWrites(t *testing.T) {
	t.Parallel()
	l := &labeler{clock: &stepping{now: time.Now()}, waited: true}
	var waited []time.Duration
	for _, after := range []time.Duration{0, time.Second, 0, 0, 0, 0, 0, 0, 0, 2 * time.Minute, 0} {
		c := l.clock.(*stepping)
		c.now = c.now.Add(after)
		began := c.now
		if err := l.admit(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		waited = append(waited, c.now.Sub(began))
	}
	s := time.Second
	if want := []time.Duration{0, 0, 2 * s, 4 * s, 8 * s, 16 * s, 32 * s, 60 * s, 60 * s, 0, s}; !slices.Equal(waited, want) {
		t.Errorf("waited %v, want %v", waited, want)
	}
}

// A stepping clock goes on by what it is asked to wait.
type stepping struct {
	clock.RealClock
	now time.Time
}

func (s *stepping) Now() time.Time { return s.now }

func (s *stepping) After(d time.Duration) <-chan time.Time {
	s.now = s.now.Add(max(0, d))
	done := make(chan time.Time, 1)
	done <- s.now
	return done
}

// TestDiscoveryOwnsItsObject: as gpu-feature-discovery the object has that program's name, and labels of others in it are replaced.
func TestDiscoveryOwnsItsObject(t *testing.T) {
	t.Parallel()
	r := newLabelRig(t, config.LabelsOff, nil)
	theirs := kubeapi.New(kubeapi.Options{Kubeconfig: r.server.Kubeconfig(), Node: "n"})
	if err := theirs.ApplyNodeFeature(t.Context(), "gpu", kubeapi.DiscoveryPrefix, map[string]string{"nvidia.com/gpu.count": "8"}, nil); err != nil {
		t.Fatal(err)
	}
	now := config.Config{
		Namespace: "gpu", Features: config.Features{Labels: config.LabelsNodeFeature}, Discovery: config.Discovery{On: true},
	}
	r.daemon.Configs.Publish(now)
	r.daemon.Labels.Publish(map[string]string{"nvidia.com/gpu.count": "7"})
	r.until("the object is replaced", func() bool { return r.feature("nvidia-features-for-n")["nvidia.com/gpu.count"] == "7" })
	r.stop()
	c := &Cluster{client: theirs}
	counted := map[string]int{}
	c.Count(func(verb, resource string, _ int) { counted[verb+" "+resource]++ })
	now.PodName = "p"
	r.server.SetFault(apiserver.Fault{Status: 500, Only: func(q apiserver.Request) bool { return q.Resource == "pods" }})
	if err := c.LabelOnce(t.Context(), now, map[string]string{"nvidia.com/gpu.count": "5"}); err == nil || len(counted) != 1 {
		t.Errorf("while it cannot be known who owns the object: %v, requests %v", err, counted)
	}
	r.server.SetFault(apiserver.Fault{})
	if err := c.LabelOnce(t.Context(), now, map[string]string{"nvidia.com/gpu.count": "6"}); err != nil {
		t.Fatal(err)
	}
	if counted["GET pods"] != 2 {
		t.Errorf("requests %v", counted)
	}
	if got := r.feature("nvidia-features-for-n"); got["nvidia.com/gpu.count"] != "6" || r.feature("gpu-node-agent-n") != nil {
		t.Errorf("labels %v", got)
	}
}

// TestNodeFeatureOfALongName: a name that cannot be the value of a label is told, and nothing is asked of the API server.
func TestNodeFeatureOfALongName(t *testing.T) {
	t.Parallel()
	r := newLabelRig(t, config.LabelsNodeFeature, nil)
	r.daemon.Configs.Publish(config.Config{
		NodeName: strings.Repeat("n", 64), Namespace: "gpu", Features: config.Features{Labels: config.LabelsNodeFeature},
	})
	r.daemon.Labels.Publish(map[string]string{"nvidia.com/gpu.count": "8"})
	r.until("the problem is told", func() bool { return errors.Is(r.daemon.Unlabeled.Value(), errLongName) })
	if n := r.server.Writes(); n > 0 {
		t.Errorf("%d writes", n)
	}
	r.daemon.Configs.Publish(config.Config{NodeName: "n", Namespace: "gpu", Features: config.Features{Labels: config.LabelsNodeFeature}})
	r.until("the object is written", func() bool { return r.server.Writes() == 1 && r.daemon.Unlabeled.Value() == nil })
}
