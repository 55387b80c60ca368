package kubeapi_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

var when = time.Date(2026, 11, 22, 8, 0, 0, 123456000, time.UTC)

// cluster returns an API server with a node that has things of others, and a client for it.
func cluster(t *testing.T) (*apiserver.Server, *kubeapi.Client) {
	t.Helper()
	s, err := apiserver.Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	change(t, s, func(n *corev1.Node) {
		n.Labels = map[string]string{"zone": "a"}
		n.Spec.Taints = []corev1.Taint{{Key: "theirs", Value: "x", Effect: corev1.TaintEffectNoExecute}}
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue,
			Reason: "KubeletReady"}}
		n.Status.Phase = corev1.NodeRunning
	})
	return s, kubeapi.New(kubeapi.Options{Kubeconfig: s.Kubeconfig(), Node: nodeName, Version: "v1"})
}

func change(t *testing.T, s *apiserver.Server, with func(*corev1.Node)) {
	t.Helper()
	if err := s.ChangeNode(nodeName, with); err != nil {
		t.Fatal(err)
	}
}

func get(t *testing.T, s *apiserver.Server) *corev1.Node {
	t.Helper()
	n, err := s.Node(nodeName)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// Of the status, only the one condition changes.
func TestConditionPatch(t *testing.T) {
	t.Parallel()
	s, c := cluster(t)
	before := get(t, s)
	for i, status := range []string{"True", "False"} {
		n, err := c.PatchNode(t.Context(), kubeapi.Node{}, kubeapi.ConditionPatch{
			Type: "GPUHealthy", Status: status, Reason: "R", Message: "m", LastHeartbeatTime: when.Add(time.Hour),
			LastTransitionTime: when,
		})
		if err != nil {
			t.Fatal(err)
		}
		after := get(t, s)
		if len(after.Status.Conditions) != 2 || n.ResourceVersion != after.ResourceVersion || n.UID != string(after.UID) {
			t.Fatalf("write %d: %v, returned version %s of %s", i, after.Status.Conditions, n.ResourceVersion,
				after.ResourceVersion)
		}
		ours := after.Status.Conditions[1]
		if ours.Type == corev1.NodeReady {
			ours = after.Status.Conditions[0]
		}
		if string(ours.Status) != status || !ours.LastTransitionTime.Time.Equal(when.Truncate(time.Second)) ||
			!ours.LastHeartbeatTime.Time.Equal(when.Add(time.Hour).Truncate(time.Second)) {
			t.Errorf("write %d: %+v", i, ours)
		}
		after.Status.Conditions, after.ResourceVersion, after.ManagedFields = before.Status.Conditions, before.ResourceVersion, before.ManagedFields
		if diff := cmp.Diff(before, after); diff != "" {
			t.Errorf("write %d changed more (-before +after):\n%s", i, diff)
		}
	}
}

// A taint is added and removed beside other taints, also with the same key. Other taints keep all
// fields, and the patch of an older version of the Node is stale.
func TestTaintPatch(t *testing.T) {
	t.Parallel()
	s, c := cluster(t)
	change(t, s, func(n *corev1.Node) {
		n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: kubeapi.FewerDevices.String(),
			Effect: corev1.TaintEffectNoExecute})
	})
	before := get(t, s).Spec.Taints
	base, err := c.Get(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	tainted, err := c.PatchNode(t.Context(), base, kubeapi.TaintPatch{Taint: kubeapi.FewerDevices, Wanted: true, Now: when})
	if err != nil || !kubeapi.FewerDevices.IsOn(tainted) {
		t.Fatalf("the response has the taints %v: %v", tainted.Taints, err)
	}
	if after := get(t, s).Spec.Taints; len(after) != 3 || after[2].Key != kubeapi.FewerDevices.String() ||
		after[2].Effect != "NoSchedule" || !after[2].TimeAdded.Time.Equal(when.Truncate(time.Second)) {
		t.Errorf("added: %v", after)
	}
	if _, err := c.PatchNode(t.Context(), base, kubeapi.TaintPatch{Taint: kubeapi.FewerDevices}); !kubeapi.IsStale(err) {
		t.Errorf("an older version: %v", err)
	}
	if _, err := c.PatchNode(t.Context(), tainted, kubeapi.TaintPatch{Taint: kubeapi.FewerDevices}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, get(t, s).Spec.Taints); diff != "" {
		t.Errorf("removed (-want +got):\n%s", diff)
	}
	change(t, s, func(n *corev1.Node) { n.Spec.Taints = nil })
	for _, wanted := range []bool{true, false} {
		base, err := c.Get(t.Context())
		if err == nil {
			_, err = c.PatchNode(t.Context(), base, kubeapi.TaintPatch{Taint: kubeapi.FewerDevices, Wanted: wanted, Now: when})
		}
		if after := get(t, s).Spec.Taints; err != nil || len(after) > 0 != wanted {
			t.Errorf("the only taint, wanted %v: %v, %v", wanted, after, err)
		}
	}
}

// patched returns the error of a patch of any version of the Node.
func patched(t *testing.T, c *kubeapi.Client, patch kubeapi.NodePatch) error {
	t.Helper()
	_, err := c.PatchNode(t.Context(), kubeapi.Node{}, patch)
	return err
}

func record(key string, at time.Time) kubeapi.EventRecord {
	return kubeapi.EventRecord{Key: key, Reason: "GPULost", Action: "StopAllocating", Type: "Warning",
		Note: "GPU " + key + " is lost", At: at}
}

// A fact has one Event, also with two writers. A repetition is counted. Two facts have two Events.
func TestWriteEvent(t *testing.T) {
	t.Parallel()
	s, c := cluster(t)
	write := func(c *kubeapi.Client, r kubeapi.EventRecord) {
		t.Helper()
		if err := c.WriteEvent(t.Context(), "uid-1", r); err != nil {
			t.Fatal(err)
		}
	}
	counts := func() map[string]int {
		all := map[string]int{}
		for _, e := range s.Events() {
			all[e.Note] = 1
			if e.Series != nil {
				all[e.Note] = int(e.Series.Count)
			}
		}
		return all
	}
	expect := func(what string, want map[string]int) {
		t.Helper()
		if diff := cmp.Diff(want, counts()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
	other := kubeapi.New(kubeapi.Options{Kubeconfig: s.Kubeconfig(), Node: nodeName, Version: "v2"})
	write(c, record("a", when))
	write(c, record("b", when))
	expect("two facts", map[string]int{"GPU a is lost": 1, "GPU b is lost": 1})
	write(other, record("a", when.Add(10*time.Second)))
	write(other, record("a", when.Add(-10*time.Second)))
	expect("the same fact of another daemon", map[string]int{"GPU a is lost": 1, "GPU b is lost": 1})
	restarted := record("a", when.Add(10*time.Minute))
	restarted.AtStart = true
	write(other, restarted)
	expect("after a restart", map[string]int{"GPU a is lost": 1, "GPU b is lost": 1})
	write(c, record("a", when.Add(20*time.Minute)))
	write(other, record("a", when.Add(20*time.Minute+time.Second)))
	write(c, record("a", when.Add(40*time.Minute)))
	expect("two times more", map[string]int{"GPU a is lost": 3, "GPU b is lost": 1})

	e := s.Events()[0]
	want := corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: nodeName, UID: "uid-1"}
	if diff := cmp.Diff(want, e.Regarding); diff != "" || e.Namespace != "default" ||
		e.ReportingController != "gpu-node-agent" || e.ReportingInstance != nodeName {
		t.Errorf("Event %+v, regarding (-want +got):\n%s", e, diff)
	}
	if !e.EventTime.Time.Equal(when) {
		t.Errorf("time %v", e.EventTime)
	}
}

// Events of pods are in the pods' namespaces, and another life of a pod has another.
func TestWriteEventOfPods(t *testing.T) {
	t.Parallel()
	s, c := cluster(t)
	for _, pod := range []kubeapi.Pod{{"ns", "db-0", "1"}, {"ns", "db-0", "2"}, {"other", "db-0", "3"},
		{"ns", strings.Repeat("x", 253), "4"}} {
		r := record("a", when)
		r.Pod = &pod
		if err := c.WriteEvent(t.Context(), "uid-1", r); err != nil {
			t.Error(err)
		}
	}
	got := map[string]int{}
	for _, e := range s.Events() {
		got[fmt.Sprint(e.Namespace, " ", e.Regarding.Kind, " ", e.Regarding.UID)]++
		if e.Namespace != e.Regarding.Namespace {
			t.Errorf("in %s, about a pod in %s", e.Namespace, e.Regarding.Namespace)
		}
	}
	if diff := cmp.Diff(map[string]int{"ns Pod 1": 1, "ns Pod 2": 1, "other Pod 3": 1, "ns Pod 4": 1}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// The error of a failed request says whether the request can be retried.
func TestRefusedReports(t *testing.T) {
	t.Parallel()
	s, c := cluster(t)
	for _, code := range []int{401, 403, 409, 429, 500, 503} {
		s.SetFault(apiserver.Fault{Status: code})
		start := record("a", when)
		start.AtStart = true
		for what, err := range map[string]error{
			"Event": c.WriteEvent(t.Context(), "uid-1", record("a", when)), "Event at start": c.WriteEvent(t.Context(), "uid-1",
				start),
			"taint":     patched(t, c, kubeapi.TaintPatch{Taint: kubeapi.FewerDevices, Wanted: true}),
			"labels":    patched(t, c, kubeapi.LabelsPatch{"a": "b"}),
			"condition": patched(t, c, kubeapi.ConditionPatch{Type: "T", Status: "True"}),
		} {
			if !kubeapi.IsCode(err, code) || kubeapi.IsInvalid(err) {
				t.Errorf("%s, %d: %v", what, code, err)
			}
		}
	}
	s.SetFault(apiserver.Fault{})
	bad := record("a", when)
	bad.Note = strings.Repeat("x", 1025)
	if err := c.WriteEvent(t.Context(), "uid-1", bad); !kubeapi.IsInvalid(err) {
		t.Errorf("a note that is too long: %v", err)
	}
	if n := len(s.Events()); n != 0 {
		t.Errorf("%d Events", n)
	}
}

// Each request is counted with its kind and code.
func TestCount(t *testing.T) {
	t.Parallel()
	s, c := cluster(t)
	got := map[string]int{}
	c.Count(func(verb, resource string, code int) { got[fmt.Sprint(verb, " ", resource, " ", code)]++ })
	_ = c.WriteEvent(t.Context(), "uid-1", record("a", when))
	_, _ = c.PatchNode(t.Context(), kubeapi.Node{}, kubeapi.ConditionPatch{Type: "T", Status: "True"})
	_ = patched(t, c, kubeapi.TaintPatch{Taint: kubeapi.FewerDevices, Wanted: true})
	s.SetFault(apiserver.Fault{Status: 403})
	_ = c.WriteEvent(t.Context(), "uid-1", record("b", when))
	_, _ = c.PodOwners(t.Context(), "ns", "pod-1")
	s.Stop()
	_ = c.WriteEvent(t.Context(), "uid-1", record("b", when))
	want := map[string]int{
		"POST events 201": 1, "PATCH nodes/status 200": 1, "PATCH nodes 200": 1, "POST events 403": 1, "POST events 0": 1,
		"GET pods 403": 1,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestAfter(t *testing.T) {
	t.Parallel()
	node := func(uid, version string) kubeapi.Node { return kubeapi.Node{UID: uid, ResourceVersion: version} }
	for _, tt := range []struct {
		a, b kubeapi.Node
		want bool
	}{
		{node("1", "10"), node("1", "9"), true}, {node("1", "9"), node("1", "10"), false}, {node("1", "9"), node("1", "9"),
			false},
		{node("1", "10"), node("2", "9"), false}, {node("1", "x"), node("1", "9"), false}, {node("1", "10"), node("1", ""),
			false},
	} {
		if got := tt.a.After(tt.b); got != tt.want {
			t.Errorf("%+v after %+v: %v", tt.a, tt.b, got)
		}
	}
}
