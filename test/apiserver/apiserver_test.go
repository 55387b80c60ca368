package apiserver_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

const limit = 30 * time.Second // of what takes milliseconds

func start(t *testing.T) *apiserver.Server {
	t.Helper()
	s, err := apiserver.Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	if err := s.ChangeNode("n", func(n *corev1.Node) {
		n.Labels = map[string]string{"zone": "a"}
		n.Spec.ProviderID = "metal://n"
		n.Status.Capacity = corev1.ResourceList{}
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	}); err != nil {
		t.Fatal(err)
	}
	return s
}

func config(t *testing.T, s *apiserver.Server) *rest.Config {
	t.Helper()
	c, err := clientcmd.BuildConfigFromFlags("", s.Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func client(t *testing.T, s *apiserver.Server) *kubernetes.Clientset {
	t.Helper()
	c, err := kubernetes.NewForConfig(config(t, s))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestPatch holds the kinds of patches, and what a write to nodes and to nodes/status keeps of the
// node.
func TestPatch(t *testing.T) {
	t.Parallel()
	s := start(t)
	nodes := client(t, s).CoreV1().Nodes()
	patch := func(kind types.PatchType, body string, subresources ...string) *corev1.Node {
		t.Helper()
		n, err := nodes.Patch(t.Context(), "n", kind, []byte(body), metav1.PatchOptions{}, subresources...)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	n := patch(types.MergePatchType, `{"metadata":{"labels":{"zone":null,"b":"2"}},"status":{"phase":"Running"}}`)
	if diff := cmp.Diff(map[string]string{"b": "2"}, n.Labels); diff != "" || n.Status.Phase != "" {
		t.Errorf("after a merge patch of the node: phase %q, labels (-want +got):\n%s", n.Status.Phase, diff)
	}
	n = patch(types.StrategicMergePatchType,
		`{"metadata":{"labels":{"c":"3"}},"spec":{"providerID":"x"},"status":{"conditions":[{"type":"GPUHealthy","status":"True"}]}}`, "status")
	if len(n.Status.Conditions) != 2 || n.Labels["c"] != "3" || n.Spec.ProviderID != "metal://n" {
		t.Errorf("a strategic merge patch of nodes/status gave %d conditions, labels %v and provider %q, want 2, label c and the old one",
			len(n.Status.Conditions), n.Labels, n.Spec.ProviderID)
	}
	before := n.ResourceVersion
	if n = patch(types.MergePatchType, `{"metadata":{"labels":{"b":"2"}}}`); n.ResourceVersion != before {
		t.Errorf("a patch that changes nothing gave version %s after %s", n.ResourceVersion, before)
	}
	_, err := nodes.Patch(t.Context(), "n", types.MergePatchType,
		[]byte(`{"metadata":{"resourceVersion":"1","labels":{"z":""}}}`), metav1.PatchOptions{})
	if !apierrors.IsConflict(err) {
		t.Errorf("a patch of an old version gave %v, want a conflict", err)
	}
	_, err = nodes.Patch(t.Context(), "other", types.MergePatchType, []byte(`{}`), metav1.PatchOptions{})
	if !apierrors.IsNotFound(err) {
		t.Errorf("a patch of a node that is not there gave %v", err)
	}
	want := map[apiserver.Request]int{{Verb: "patch", Resource: "nodes"}: 4, {Verb: "patch", Resource: "nodes/status"}: 1}
	if diff := cmp.Diff(want, s.Requests()); diff != "" {
		t.Errorf("requests (-want +got):\n%s", diff)
	}
}

// TestApply holds that server-side apply takes away what a manager no longer wants, and does not
// take what others own.
func TestApply(t *testing.T) {
	t.Parallel()
	s := start(t)
	nodes := client(t, s).CoreV1().Nodes()
	apply := func(manager string, force bool, labels map[string]string) (*corev1.Node, error) {
		return nodes.Apply(t.Context(), applycorev1.Node("n").WithLabels(labels),
			metav1.ApplyOptions{FieldManager: manager, Force: force})
	}
	for _, labels := range []map[string]string{{"a": "1", "b": "1"}, {"b": "1"}} {
		if _, err := apply("ours", false, labels); err != nil {
			t.Fatal(err)
		}
	}
	n, err := apply("theirs", false, map[string]string{"c": "1"})
	if diff := cmp.Diff(map[string]string{"b": "1", "c": "1", "zone": "a"}, n.Labels); diff != "" || err != nil {
		t.Errorf("error %v, labels (-want +got):\n%s", err, diff)
	}
	version := n.ResourceVersion
	if _, err := apply("theirs", false, map[string]string{"b": "2"}); !apierrors.IsConflict(err) {
		t.Errorf("an apply of a label of another manager's gave %v, want a conflict", err)
	}
	if n, err = apply("theirs", false, map[string]string{"c": "1"}); err != nil || n.ResourceVersion != version {
		t.Errorf("an apply that changes nothing gave version %s after %s, error %v", n.ResourceVersion, version, err)
	}
	if n, err = apply("theirs", true, map[string]string{"b": "2"}); err != nil || n.Labels["b"] != "2" {
		t.Errorf("a forced apply gave labels %v, error %v", n.Labels, err)
	}
	if _, err := nodes.Apply(t.Context(), applycorev1.Node("absent").WithLabels(nil),
		metav1.ApplyOptions{FieldManager: "ours"}); !apierrors.IsNotFound(err) {
		t.Errorf("an apply of a node that is not there gave %v", err)
	}
}

// TestWatch holds what a watch of one node sees: what is there, changes, bookmarks, where it can go
// on, and 410 Gone.
func TestWatch(t *testing.T) {
	t.Parallel()
	s := start(t)
	nodes := client(t, s).CoreV1().Nodes()
	open := func(version string) watch.Interface {
		t.Helper()
		w, err := nodes.Watch(t.Context(), metav1.ListOptions{
			FieldSelector: "metadata.name=n", ResourceVersion: version, AllowWatchBookmarks: version != "0",
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(w.Stop)
		return w
	}
	next := func(w watch.Interface) string {
		t.Helper()
		select {
		case event, ok := <-w.ResultChan():
			if !ok {
				return "end"
			}
			if status, bad := event.Object.(*metav1.Status); bad {
				return fmt.Sprintf("%s %d", event.Type, status.Code)
			}
			n := event.Object.(*corev1.Node)
			return fmt.Sprintf("%s %s=%s", event.Type, n.Name, n.Labels["zone"])
		case <-time.After(limit):
			return "nothing"
		}
	}
	set := func(name, zone string) {
		t.Helper()
		if err := s.ChangeNode(name, func(n *corev1.Node) { n.Labels = map[string]string{"zone": zone} }); err != nil {
			t.Fatal(err)
		}
	}
	expect := func(w watch.Interface, want string) {
		t.Helper()
		if got := next(w); got != want {
			t.Fatalf("the watch sent %q, want %q", got, want)
		}
	}
	w := open("0")
	expect(w, "ADDED n=a")
	set("other", "x")
	set("n", "b")
	expect(w, "MODIFIED n=b")
	n, err := s.Node("n")
	if err != nil {
		t.Fatal(err)
	}
	s.SendBookmark()
	s.DropWatches()
	expect(w, "end")
	set("n", "c")
	w = open(n.ResourceVersion)
	expect(w, "BOOKMARK =")
	expect(w, "MODIFIED n=c")
	if err := s.DeleteNode("n"); err != nil {
		t.Fatal(err)
	}
	expect(w, "DELETED n=c")
	s.Expire()
	expect(w, "end")
	expect(open(n.ResourceVersion), "ERROR 410")
}

// TestEvents holds that Events are checked as Kubernetes checks them, and that only their series
// changes.
func TestEvents(t *testing.T) {
	t.Parallel()
	s := start(t)
	events := client(t, s).EventsV1().Events("default")
	event := &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: "n.1", Namespace: "default"}, EventTime: metav1.NewMicroTime(time.Now()),
		ReportingController: "gpu-device-plugin", ReportingInstance: "n", Action: "Look", Reason: "GPULost", Type: "Warning",
		Regarding: corev1.ObjectReference{Kind: "Node", Name: "n"}, Note: "GPU is lost",
	}
	bad := event.DeepCopy()
	bad.Action = ""
	if _, err := events.Create(t.Context(), bad, metav1.CreateOptions{}); !apierrors.IsInvalid(err) {
		t.Errorf("an Event without action gave %v, want that it is invalid", err)
	}
	if _, err := events.Create(t.Context(), event, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := events.Create(t.Context(), event, metav1.CreateOptions{}); !apierrors.IsAlreadyExists(err) {
		t.Errorf("a second Event of that name gave %v", err)
	}
	patch := func(body string) error {
		_, err := events.Patch(t.Context(), "n.1", types.StrategicMergePatchType, []byte(body), metav1.PatchOptions{})
		return err
	}
	if err := patch(`{"note":"another"}`); !apierrors.IsInvalid(err) {
		t.Errorf("a change of the note gave %v, want that it is invalid", err)
	}
	if err := patch(`{"series":{"count":2,"lastObservedTime":"2026-01-02T03:04:05.000000Z"}}`); err != nil {
		t.Error(err)
	}
	if got := s.Events(); len(got) != 1 || got[0].Series == nil || got[0].Series.Count != 2 {
		t.Errorf("Events: %v, want one with a series of 2", got)
	}
}

// TestNodeFeatures holds that a custom resource is applied and merged, and can be missing.
func TestNodeFeatures(t *testing.T) {
	t.Parallel()
	s := start(t)
	c, err := dynamic.NewForConfig(config(t, s))
	if err != nil {
		t.Fatal(err)
	}
	resource := c.Resource(apiserver.NodeFeatureKind.GroupVersion().WithResource("nodefeatures")).Namespace("ns")
	for _, labels := range []string{`{"a":"1","b":"1"}`, `{"b":"1"}`} {
		body := `{"apiVersion":"nfd.k8s-sigs.io/v1alpha1","kind":"NodeFeature","metadata":{"name":"f"},"spec":{"labels":` +
			labels + `}}`
		if _, err := resource.Patch(t.Context(), "f", types.ApplyYAMLPatchType, []byte(body),
			metav1.PatchOptions{FieldManager: "ours"}); err != nil {
			t.Fatal(err)
		}
	}
	f, err := s.NodeFeature("ns", "f")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]any{"labels": map[string]any{"b": "1"}}
	if diff := cmp.Diff(want, f.Object["spec"]); diff != "" {
		t.Errorf("spec (-want +got):\n%s", diff)
	}
	if _, err := resource.Patch(t.Context(), "f", types.StrategicMergePatchType, []byte(`{}`),
		metav1.PatchOptions{}); !apierrors.IsUnsupportedMediaType(err) {
		t.Errorf("a strategic merge patch of a custom resource gave %v", err)
	}
	s.SetNodeFeaturesServed(false)
	if _, err := resource.Get(t.Context(), "f", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("a request for a resource that is not served gave %v", err)
	}
}

// TestFaults plays each fault: a request fails or takes long while it lasts, unless it passes by
// itself, and is answered after.
func TestFaults(t *testing.T) {
	t.Parallel()
	for _, fault := range apiserver.Faults() {
		t.Run(fault.Name, func(t *testing.T) {
			t.Parallel()
			s := start(t)
			ask := func(timeout time.Duration) error {
				ctx, cancel := context.WithTimeout(t.Context(), timeout)
				defer cancel()
				// A transport of its own, as client-go's reads token and CA again only after some time.
				c, err := clientcmd.BuildConfigFromFlags("", s.Kubeconfig())
				if err != nil {
					return err
				}
				c.Proxy = func(*http.Request) (*url.URL, error) { return nil, nil }
				api, err := kubernetes.NewForConfig(c)
				if err != nil {
					return err
				}
				_, err = api.CoreV1().Nodes().Patch(ctx, "n", types.MergePatchType, []byte(`{}`), metav1.PatchOptions{})
				return err
			}
			if err := ask(limit); err != nil {
				t.Fatal(err)
			}
			if err := fault.Begin(s); err != nil {
				t.Fatal(err)
			}
			timeout := 200 * time.Millisecond
			if fault.Passes {
				timeout = limit
			}
			if err := ask(timeout); (err == nil) != fault.Passes {
				t.Errorf("during the fault: %v", err)
			}
			if err := fault.End(s); err != nil {
				t.Fatal(err)
			}
			if err := ask(limit); err != nil {
				t.Errorf("after the fault: %v", err)
			}
		})
	}
}

// TestStopInABlackHole holds that the server ends although no byte passes, with connections in all
// states.
func TestStopInABlackHole(t *testing.T) {
	t.Parallel()
	s := start(t)
	nodes := client(t, s).CoreV1().Nodes()
	w, err := nodes.Watch(t.Context(), metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	s.SetBlackHole(true)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := nodes.Get(ctx, "n", metav1.GetOptions{}); err == nil {
		t.Error("a request was answered")
	}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		s.Stop()
	}()
	select {
	case <-stopped:
	case <-time.After(limit):
		t.Fatal("the server does not stop")
	}
}

// TestRetryAfter holds that the answer to too many requests says how long to wait.
func TestRetryAfter(t *testing.T) {
	t.Parallel()
	s := start(t)
	s.SetFault(apiserver.Fault{Status: http.StatusTooManyRequests, RetryAfter: 7 * time.Second})
	c := config(t, s)
	api, err := kubernetes.NewForConfig(c)
	if err != nil {
		t.Fatal(err)
	}
	err = api.CoreV1().RESTClient().Get().MaxRetries(0).Resource("nodes").Name("n").Do(t.Context()).Error()
	seconds, ok := apierrors.SuggestsClientDelay(err)
	if !apierrors.IsTooManyRequests(err) || !ok || seconds != 7 {
		t.Errorf("error %v, delay %d s (%t), want 429 and 7 s", err, seconds, ok)
	}
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		t.Errorf("error %v has no status", err)
	}
}
