package cluster_test

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

const (
	countLabel   = "nvidia.com/gpu.count"
	productLabel = "nvidia.com/gpu.product"
	namespace    = "gpu"
	ourFeatures  = "gpu-node-agent-" + nodeName
)

// ways are the two in which labels are written, with what reads them.
var ways = map[config.LabelsOutput]func(*stage) map[string]string{
	config.LabelsNode:        func(s *stage) map[string]string { return s.node().Labels },
	config.LabelsNodeFeature: func(s *stage) map[string]string { return s.feature(ourFeatures) },
}

// labeler starts a process that labels the node in a way. The node has these labels before.
func (s *stage) labeler(way config.LabelsOutput, before map[string]string) *process {
	s.Helper()
	s.change(func(n *corev1.Node) { n.Labels = before })
	return s.new(config.Config{
		Startup: config.Startup{PodName: "p", Namespace: namespace},
		Live:    config.Live{Features: config.Features{Labels: way}},
	}).start()
}

// label has labels be wanted.
func (p *process) label(labels map[string]string) { p.Labels.Publish(labels) }

func (s *stage) untilLabels(when string, read func(*stage) map[string]string, want map[string]string) {
	s.Helper()
	s.until(fmt.Sprint(when, ": labels ", want), func() bool { return maps.Equal(want, read(s)) })
}

// feature returns the labels of a NodeFeature; nil if there is none.
func (s *stage) feature(name string) map[string]string {
	object, err := s.server.NodeFeature(namespace, name)
	if err != nil {
		return nil
	}
	spec, _ := object.Object["spec"].(map[string]any)
	given, _ := spec["labels"].(map[string]any)
	found := map[string]string{}
	for key, value := range given {
		found[key] = fmt.Sprint(value)
	}
	return found
}

// patch is another program that changes labels of the node; a value of null removes one.
func (s *stage) patch(manager, labels string) {
	s.Helper()
	c, err := clientcmd.BuildConfigFromFlags("", s.server.Kubeconfig())
	if err != nil {
		s.Fatal(err)
	}
	c.Dial = s.server.Dial
	api, err := kubernetes.NewForConfig(c)
	if err != nil {
		s.Fatal(err)
	}
	body := []byte(`{"metadata":{"labels":` + labels + `}}`)
	o := metav1.PatchOptions{FieldManager: manager}
	if _, err := api.CoreV1().Nodes().Patch(s.Context(), nodeName, types.MergePatchType, body, o); err != nil {
		s.Fatal(err)
	}
}

// discovery is gpu-feature-discovery, which writes these labels into its object.
func (s *stage) discovery(labels map[string]string) {
	s.Helper()
	theirs := kubeapi.New(kubeapi.Options{Kubeconfig: s.server.Kubeconfig(), Node: nodeName, Dial: s.server.Dial})
	if err := theirs.ApplyNodeFeature(s.Context(), namespace, kubeapi.DiscoveryPrefix, labels, nil); err != nil {
		s.Fatal(err)
	}
}

// Labels appear, change, go with what they tell of, and are not written when they are as they are
// to be.
func TestLabelsOfTheNode(t *testing.T) {
	onStage(t, func(s *stage) {
		p, read := s.labeler(config.LabelsNode, map[string]string{"zone": "a"}), ways[config.LabelsNode]
		if n := s.writes(func() {
			p.label(map[string]string{countLabel: "8", "nvidia.com/mig-1g.10gb.count": "7", "nvidia.com/gpu.mode": ""})
			s.pass(time.Hour)
		}); n != 1 {
			s.Errorf("%d writes for the first labels", n)
		}
		s.untilLabels("first", read, map[string]string{
			"zone": "a", countLabel: "8", "nvidia.com/mig-1g.10gb.count": "7", "nvidia.com/gpu.mode": "",
		})
		p.label(map[string]string{countLabel: "8"})
		s.untilLabels("a kind of GPU is gone", read, map[string]string{"zone": "a", countLabel: "8"})
		p.stop()
		s.pass(time.Minute)
		if n := s.writes(func() { p.start(); s.patch("kubelet", `{"zone":"b"}`); s.pass(time.Hour) }); n != 1 { // the patch
			s.Errorf("%d writes after a restart", n-1)
		}
		s.patch("kubectl", `{"`+countLabel+`":null}`)
		if s.pass(4 * time.Second); s.node().Labels[countLabel] != "" { // it may be the next version of this program
			s.Error("what another program did is undone at once")
		}
		s.untilLabels("somebody removed a label", read, map[string]string{"zone": "b", countLabel: "8"})
		p.label(nil)
		if n := s.writes(func() {
			s.pass(time.Minute)
			p.configure(func(c *config.Config) { c.Features.Labels = config.LabelsOff })
			p.label(map[string]string{countLabel: "1"})
			s.pass(time.Hour)
		}); n != 0 {
			s.Errorf("%d writes while labels are not known or off", n)
		}
	})
}

// Labels that others own are left to them, which is said once, and taken over when they let them
// go.
func TestLabelsOfOthers(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.labeler(config.LabelsNode, map[string]string{productLabel: "theirs", "nvidia.com/mig-2g.20gb.count": "3"})
		read := ways[config.LabelsNode]
		want := map[string]string{productLabel: "ours", countLabel: "8", "nvidia.com/gpu.present": "true"}
		s.patch("gpu-operator", `{"nvidia.com/gpu.present":"true"}`)
		p.label(want)
		s.untilLabels("beside another program", read, map[string]string{
			productLabel: "theirs", "nvidia.com/mig-2g.20gb.count": "3", countLabel: "8", "nvidia.com/gpu.present": "true",
		})
		if n := s.writes(func() {
			for i := range 5 {
				s.patch("kubelet", fmt.Sprintf(`{"zone":"%d"}`, i))
				s.pass(time.Minute)
			}
		}); n != 5 {
			s.Errorf("%d writes beside labels that belong to others", n-5)
		}
		if n := p.logged("belongs to another program"); n != 1 || p.logged(`label="`+productLabel+`"`) != 1 {
			s.Errorf("it is logged %d times", n)
		}
		s.patch("nfd", `{"`+productLabel+`":"changed"}`)
		if s.pass(10 * time.Minute); s.node().Labels[productLabel] != "changed" {
			s.Errorf("the owner changed its label, and it is %q", s.node().Labels[productLabel])
		}
		s.patch("nfd", `{"`+productLabel+`":null,"nvidia.com/mig-2g.20gb.count":null}`)
		want = maps.Clone(want)
		want["zone"] = "4"
		s.untilLabels("the owner let go", read, want)
		if problem := p.LabelsProblem.Value(); problem != nil {
			s.Errorf("problem: %v", problem)
		}
	})
}

// Labels that stay with an owner that is gone are told by the problem that status and the metric
// have, and by an Event, with the command that repairs it; run, it gives them to this program.
// Nothing is taken over before, and what a program that still runs writes again is its own.
func TestLabelsOfRemovedOwner(t *testing.T) {
	onStage(t, func(s *stage) {
		const revision = "nvidia.com/cuda.driver-version.revision"
		s.change(func(n *corev1.Node) { n.Labels = map[string]string{} })
		p := s.new(config.Config{Live: config.Live{Features: config.Features{Labels: config.LabelsNode, Events: true}}})
		read := p.Status
		p.Status = func(ctx context.Context) (status.Status, error) {
			now, err := read(ctx)
			if problem := p.LabelsProblem.Value(); problem != nil {
				now.LabelsError = problem.Error()
			}
			return now, err
		}
		p.gpus(gpu(0, good))
		p.label(map[string]string{countLabel: "8"})
		p.start()
		s.untilLabels("first", ways[config.LabelsNode], map[string]string{countLabel: "8"})
		s.patch("nfd-master", `{"`+productLabel+`":"H100","`+revision+`":"05","nvidia.com/mig-1g.10gb.count":"7"}`)
		p.label(map[string]string{countLabel: "8", productLabel: "H100", revision: "05", "nvidia.com/mig-1g.10gb.count": "7"})
		s.pass(time.Minute)
		if problem := p.LabelsProblem.Value(); problem != nil {
			s.Errorf("labels are as they are wanted, and the problem is: %v", problem)
		}
		p.label(map[string]string{countLabel: "8", productLabel: "H100", revision: "09"})
		const command = "kubectl label node " + nodeName + " " + revision + "- nvidia.com/mig-1g.10gb.count-"
		const told = "labels written by nfd-master have other values than wanted; if that program no longer runs, run: " + command
		s.until("the problem is told", func() bool { return fmt.Sprint(p.LabelsProblem.Value()) == told })
		if n := s.writes(func() { s.pass(time.Hour) }); n != 1 || s.node().Labels[revision] != "05" {
			s.Errorf("%d writes, want that of the Event; the revision is %q", n, s.node().Labels[revision])
		}
		if events := s.server.Events(); len(events) != 1 || events[0].Reason != "LabelsWithheld" ||
			!strings.HasSuffix(events[0].Note, command) {
			s.Errorf("Events %v", events)
		}
		p.stop()
		if s.pass(time.Minute); p.LabelsProblem.Value() != nil {
			s.Errorf("a process that does not lead tells: %v", p.LabelsProblem.Value())
		}
		p.start()
		s.until("the problem is told again", func() bool { return fmt.Sprint(p.LabelsProblem.Value()) == told })
		s.patch("kubectl-label", `{"`+revision+`":null,"nvidia.com/mig-1g.10gb.count":null}`)
		s.untilLabels("after the command", ways[config.LabelsNode],
			map[string]string{countLabel: "8", productLabel: "H100", revision: "09"})
		s.until("no problem", func() bool { return p.LabelsProblem.Value() == nil })
		s.patch("nfd-master", `{"`+revision+`":"07"}`)
		s.until("it still runs", func() bool { return strings.Contains(fmt.Sprint(p.LabelsProblem.Value()), "by nfd-master") })
		if s.pass(time.Hour); s.node().Labels[revision] != "07" {
			s.Errorf("the revision of an owner that runs is %q", s.node().Labels[revision])
		}
		p.label(nil)
		s.until("nothing is wanted", func() bool { return p.LabelsProblem.Value() == nil })
	})
}

// A node that was deleted is not made by a write, and one that has its name since gets the labels.
func TestLabelsOfAnotherNode(t *testing.T) {
	onStage(t, func(s *stage) {
		p, read := s.labeler(config.LabelsNode, nil), ways[config.LabelsNode]
		p.label(map[string]string{countLabel: "8"})
		s.untilLabels("the first node", read, map[string]string{countLabel: "8"})
		if err := s.server.DeleteNode(nodeName); err != nil {
			s.Fatal(err)
		}
		p.label(map[string]string{countLabel: "7"})
		s.pass(10 * time.Minute)
		if n, err := s.server.Node(nodeName); err == nil {
			s.Errorf("the write made a node: %v", n)
		}
		s.change(func(n *corev1.Node) { n.Labels = map[string]string{"zone": "c"} })
		s.untilLabels("the second node", read, map[string]string{"zone": "c", countLabel: "7"})
	})
}

// Whatever the API server did, the object is right afterwards, and there is no problem.
func TestNodeFeatureThroughFaults(t *testing.T) {
	throughFaults(t, func(s *stage, fault apiserver.NamedFault) {
		p, read := s.labeler(config.LabelsNodeFeature, nil), ways[config.LabelsNodeFeature]
		p.label(map[string]string{countLabel: "8"})
		s.untilLabels("before the fault", read, map[string]string{countLabel: "8"})
		if n := s.writes(func() { s.during(fault, func() { p.label(map[string]string{countLabel: "7"}) }) }); n > 60 {
			s.Errorf("%d writes during the fault", n)
		}
		s.untilLabels("after the fault", read, map[string]string{countLabel: "7"})
		s.until("no problem", func() bool { return p.LabelsProblem.Value() == nil })
	})
}

// The object has the labels, the node's name and the DaemonSet as its owner; it is written when it
// differs.
func TestNodeFeature(t *testing.T) {
	onStage(t, func(s *stage) {
		if err := s.server.AddPod(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "p",
			OwnerReferences: []metav1.OwnerReference{
				{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "ds", UID: "u"},
			}}}); err != nil {
			s.Fatal(err)
		}
		p, read := s.labeler(config.LabelsNodeFeature, nil), ways[config.LabelsNodeFeature]
		if n := s.writes(func() { p.label(map[string]string{countLabel: "8"}); s.pass(30 * time.Minute) }); n != 1 {
			s.Errorf("%d writes", n)
		}
		s.untilLabels("first", read, map[string]string{countLabel: "8"})
		object, err := s.server.NodeFeature(namespace, ourFeatures)
		if err != nil {
			s.Fatal(err)
		}
		owners := object.GetOwnerReferences()
		if len(owners) != 1 || owners[0].Kind != "DaemonSet" || owners[0].UID != "u" ||
			object.GetLabels()["nfd.node.kubernetes.io/node-name"] != nodeName {
			s.Errorf("owners %v, labels %v", owners, object.GetLabels())
		}
		p.label(map[string]string{"nvidia.com/gpu.present": "true"})
		s.untilLabels("others", read, map[string]string{"nvidia.com/gpu.present": "true"})
		p.stop()
		if n := s.writes(func() { p.start(); s.pass(time.Hour) }); n != 0 || len(s.node().Labels) > 0 {
			s.Errorf("%d writes after a restart; the node has the labels %v", n, s.node().Labels)
		}
	})
}

// Who owns the pod is read once, also where that is not allowed.
func TestOwnersOfNodeFeature(t *testing.T) {
	onStage(t, func(s *stage) {
		s.server.SetFault(apiserver.Fault{Status: http.StatusForbidden,
			Only: func(q apiserver.Request) bool { return q.Resource == "pods" }})
		p := s.labeler(config.LabelsNodeFeature, nil)
		for _, count := range []string{"8", "7", "6"} {
			p.label(map[string]string{countLabel: count})
			s.untilLabels("without the right", ways[config.LabelsNodeFeature], map[string]string{countLabel: count})
		}
		if n := s.server.Requests()[apiserver.Request{Verb: "get", Resource: "pods"}]; n != 1 {
			s.Errorf("the pod is read %d times", n)
		}
	})
}

// What keeps an object from being written is told, and is over with its reason.
func TestUnwritableNodeFeature(t *testing.T) {
	for name, tt := range map[string]struct {
		begin, end func(*stage)
		problem    string
	}{
		"without node-feature-discovery": {
			func(s *stage) { s.server.SetNodeFeaturesServed(false) }, func(s *stage) { s.server.SetNodeFeaturesServed(true) },
			"NodeFeature " + namespace + "/" + ourFeatures,
		},
		"without the right to read it": {
			func(s *stage) {
				s.server.SetFault(apiserver.Fault{Status: http.StatusForbidden, Only: func(q apiserver.Request) bool {
					return q.Verb == "get" && q.Resource == "nodefeatures"
				}})
			}, func(s *stage) { s.server.SetFault(apiserver.Fault{}) }, "403",
		},
		"beside NVIDIA's program": {
			func(s *stage) { s.discovery(map[string]string{countLabel: "8"}) }, func(s *stage) { s.discovery(nil) },
			"gpu-feature-discovery",
		},
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				tt.begin(s)
				p := s.labeler(config.LabelsNodeFeature, nil)
				p.label(map[string]string{countLabel: "8"})
				s.until("the problem is told", func() bool { return strings.Contains(fmt.Sprint(p.LabelsProblem.Value()), tt.problem) })
				if s.pass(time.Minute); s.feature(ourFeatures) != nil {
					s.Errorf("the object is written: %v", s.feature(ourFeatures))
				}
				tt.end(s)
				s.untilLabels("afterwards", ways[config.LabelsNodeFeature], map[string]string{countLabel: "8"})
				s.until("no problem", func() bool { return p.LabelsProblem.Value() == nil })
			})
		})
	}
}

// The account of NVIDIA's chart and operator may create and update the object, and not patch it.
func TestNodeFeatureWithoutPatch(t *testing.T) {
	onStage(t, func(s *stage) {
		s.server.SetFault(apiserver.Fault{Status: http.StatusForbidden,
			Only: func(q apiserver.Request) bool { return q.Verb == "apply" }})
		p := s.labeler(config.LabelsNodeFeature, nil)
		for _, count := range []string{"8", "7"} {
			p.label(map[string]string{countLabel: count})
			s.untilLabels("without the right to patch", ways[config.LabelsNodeFeature], map[string]string{countLabel: count})
		}
		s.until("no problem", func() bool { return p.LabelsProblem.Value() == nil })
	})
}

// As gpu-feature-discovery the object has that program's name, and labels of others in it are
// replaced; also where labels are written once.
func TestNodeFeatureOfDiscovery(t *testing.T) {
	onStage(t, func(s *stage) {
		const name = "nvidia-features-for-" + nodeName
		s.discovery(map[string]string{countLabel: "8"})
		p := s.new(config.Config{
			Startup: config.Startup{
				Namespace: namespace,
				PodName:   "p",
			},
			Live: config.Live{
				Features:  config.Features{Labels: config.LabelsNodeFeature},
				Discovery: config.Discovery{On: true},
			},
		})
		p.label(map[string]string{countLabel: "7"})
		p.start()
		s.until("the object is replaced", func() bool { return s.feature(name)[countLabel] == "7" })
		p.stop()
		s.server.SetFault(apiserver.Fault{Status: 500, Only: func(q apiserver.Request) bool { return q.Resource == "pods" }})
		once := func(count string) (n int, err error) {
			n = s.writes(func() { err = p.cluster.LabelOnce(s.Context(), p.Startup, map[string]string{countLabel: count}) })
			return n, err
		}
		if n, err := once("5"); err == nil || n > 0 {
			s.Errorf("while it cannot be known who owns the object: %v, %d writes", err, n)
		}
		s.server.SetFault(apiserver.Fault{})
		if n, err := once("6"); err != nil || n != 1 {
			s.Errorf("once: %v, %d writes", err, n)
		}
		if got := s.feature(name); !cmp.Equal(map[string]string{countLabel: "6"}, got) || s.feature(ourFeatures) != nil {
			s.Errorf("labels %v", got)
		}
	})
}

// A name that cannot be the value of a label is told once, and nothing is written.
func TestNodeFeatureOfALongName(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.labeler(config.LabelsNodeFeature, nil)
		p.configure(func(c *config.Config) { c.NodeName = strings.Repeat("n", 64) })
		if n := s.writes(func() { p.label(map[string]string{countLabel: "8"}); s.pass(time.Hour) }); n != 0 ||
			!strings.Contains(fmt.Sprint(p.LabelsProblem.Value()), "more than 63 bytes") ||
			p.logged("Labels are not written") != 1 {
			s.Errorf("%d writes; the problem is %v, logged %d times", n, p.LabelsProblem.Value(),
				p.logged("Labels are not written"))
		}
		p.configure(func(c *config.Config) { c.NodeName = nodeName })
		s.untilLabels("another name", ways[config.LabelsNodeFeature], map[string]string{countLabel: "8"})
		s.until("no problem", func() bool { return p.LabelsProblem.Value() == nil })
	})
}
