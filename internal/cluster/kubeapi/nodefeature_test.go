package kubeapi_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/equality"
)

// scripted returns a client of a server that answers each request, "VERB PATH", with a code and a
// body, and what was asked with which body.
func scripted(t *testing.T, answers map[string]string) (client *kubeapi.Client, asked func() []string) {
	t.Helper()
	var mu sync.Mutex // guards requests
	var requests []string
	client = answering(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		mu.Lock()
		requests = append(requests, strings.TrimSpace(r.Method+" "+r.URL.Path+" "+string(body)))
		mu.Unlock()
		answer, known := answers[r.Method+" "+r.URL.Path]
		if !known {
			answer = "404 {}"
		}
		var code int
		_, _ = fmt.Sscan(answer, &code)
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_, _ = io.WriteString(w, answer[len("200 "):])
	})
	return client, func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(requests)
	}
}

const (
	features = "/apis/nfd.k8s-sigs.io/v1alpha1/namespaces/ns/nodefeatures"
	feature  = features + "/p-" + nodeName
)

// TestNodeFeature: the labels count if the object is about this node. One that is not there is no
// error, another answer is.
func TestNodeFeature(t *testing.T) {
	t.Parallel()
	object := func(node string) string {
		return fmt.Sprintf(`200 {"metadata": {"labels": {"nfd.node.kubernetes.io/node-name": %q}, "ownerReferences": [{"name": "o"}]},
			"spec": {"labels": {"a": "b"}}}`, node)
	}
	owners := []kubeapi.OwnerReference{{Name: "o"}}
	for answer, tt := range map[string]struct {
		want  kubeapi.NodeFeature
		found bool
		err   string
	}{
		object(nodeName): {kubeapi.NodeFeature{Namespace: "ns", Name: "p-" + nodeName, Labels: map[string]string{"a": "b"},
			Owners: owners}, true, ""},
		object("another"): {kubeapi.NodeFeature{Namespace: "ns", Name: "p-" + nodeName, Owners: owners}, true, ""},
		"404 {}":          {kubeapi.NodeFeature{}, false, ""},
		"403 {}":          {kubeapi.NodeFeature{}, false, "read NodeFeature ns/p-" + nodeName},
		"200 <html>":      {kubeapi.NodeFeature{}, false, "read the answer"},
	} {
		client, _ := scripted(t, map[string]string{"GET " + feature: answer})
		got, found, err := client.NodeFeature(t.Context(), "ns", "p-")
		if (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) || found != tt.found {
			t.Errorf("%s: found %v, %v", answer, found, err)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", answer, diff)
		}
	}
}

// TestNodeFeaturesDiffer: in each of their fields.
func TestNodeFeaturesDiffer(t *testing.T) {
	t.Parallel()
	equality.Check(t, func() kubeapi.NodeFeature {
		return kubeapi.NodeFeature{Labels: map[string]string{"a": "b"}, Owners: []kubeapi.OwnerReference{{Name: "o"}}}
	}, kubeapi.NodeFeature.Equal)
}

// TestApplyNodeFeature: where the right to patch is missing, the object is read, and made or
// replaced.
func TestApplyNodeFeature(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		answers map[string]string
		want    []string // the requests' beginnings
		fails   bool
	}{
		"applied": {map[string]string{"PATCH " + feature: "200 {}"}, []string{"PATCH " + feature}, false},
		"no right for anything": {
			map[string]string{"PATCH " + feature: "403 {}", "GET " + feature: "403 {}"}, []string{"PATCH " + feature,
				"GET " + feature}, true,
		},
		"made": {
			map[string]string{"PATCH " + feature: "403 {}", "POST " + features: "201 {}"},
			[]string{"PATCH " + feature, "GET " + feature, "POST " + features + " {"}, false,
		},
		"replaced": {
			map[string]string{"PATCH " + feature: "403 {}", "GET " + feature: `200 {"metadata": {"resourceVersion": "7"}}`,
				"PUT " + feature: "200 {}"},
			[]string{"PATCH " + feature, "GET " + feature, "PUT " + feature + ` {"apiVersion":"nfd.k8s-sigs.io/v1alpha1",` +
				`"kind":"NodeFeature","metadata":{"name":"p-` + nodeName +
				`","namespace":"ns","resourceVersion":"7","labels":{"nfd.node.kubernetes.io/node-name":"` + nodeName + `"}`}, false,
		},
		"no object": {
			map[string]string{"PATCH " + feature: "403 {}", "GET " + feature: "200 <html>"}, []string{"PATCH " + feature,
				"GET " + feature}, true,
		},
		"another error": {map[string]string{"PATCH " + feature: "409 {}"}, []string{"PATCH " + feature}, true},
	} {
		client, asked := scripted(t, tt.answers)
		if err := client.ApplyNodeFeature(t.Context(), "ns", "p-", map[string]string{"a": "b"},
			nil); (err != nil) != tt.fails {
			t.Errorf("%s: %v", name, err)
		}
		got := asked()
		for i, request := range got {
			if i < len(tt.want) && strings.HasPrefix(request, tt.want[i]) {
				got[i] = tt.want[i]
			}
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestPodOwners: none of them is the controller of what they are to own.
func TestPodOwners(t *testing.T) {
	t.Parallel()
	client, _ := scripted(t, map[string]string{
		"GET /api/v1/namespaces/ns/pods/p": `200 {"metadata": {"ownerReferences": [{"name": "a", "controller": true}, {"name": "b"}]}}`,
		"GET /api/v1/namespaces/ns/pods/x": `200 <html>`,
	})
	got, err := client.PodOwners(t.Context(), "ns", "p")
	if diff := cmp.Diff([]kubeapi.OwnerReference{{Name: "a"}, {Name: "b"}}, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	if _, err = client.PodOwners(t.Context(), "ns", "x"); err == nil {
		t.Error("a page is a pod")
	}
	if _, err = client.PodOwners(t.Context(), "ns", "gone"); !kubeapi.IsInaccessible(err) {
		t.Errorf("a pod that is not there: %v", err)
	}
	for code, denied := range map[int]bool{http.StatusForbidden: true, http.StatusNotFound: true,
		http.StatusConflict: false} {
		if got := kubeapi.IsInaccessible(failure(code, 0)); got != denied {
			t.Errorf("%d: denied %v", code, got)
		}
	}
}

// TestPods: of a pod of the node, what it needs of the node and which DaemonSet it is of are known.
func TestPods(t *testing.T) {
	t.Parallel()
	client, _ := scripted(t, map[string]string{"GET /api/v1/pods": `200 {"items": [
		{"metadata": {"namespace": "ns", "name": "p", "uid": "1", "creationTimestamp": "2026-11-28T12:00:00Z", "ownerReferences": [
			{"kind": "DaemonSet", "name": "other"}, {"kind": "DaemonSet", "name": "d", "controller": true},
			{"kind": "Node", "name": "n"}]},
			"spec": {"nodeSelector": {"gpu": "true"}, "priority": 7}},
		{"metadata": {"namespace": "ns", "name": "q", "uid": "2", "ownerReferences": [{"kind": "Job", "name": "j", "controller": true}]}}]}`})
	got, err := client.Pods(t.Context())
	want := []kubeapi.NodePod{
		{Namespace: "ns", Name: "p", UID: "1", NodeSelector: map[string]string{"gpu": "true"}, DaemonSet: "d",
			Priority: 7, Created: time.Date(2026, 11, 28, 12, 0, 0, 0, time.UTC)},
		{Namespace: "ns", Name: "q", UID: "2"},
	}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	broken, _ := scripted(t, map[string]string{"GET /api/v1/pods": "200 <html>"})
	if _, err := broken.Pods(t.Context()); err == nil {
		t.Error("a page is a list of pods")
	}
	none, _ := scripted(t, nil)
	if _, err := none.Pods(t.Context()); !kubeapi.IsNotFound(err) {
		t.Errorf("without an answer: %v", err)
	}
}

// TestLabelSwap: all labels are changed, or none, of the node that was meant and from what they
// were.
func TestLabelSwap(t *testing.T) {
	t.Parallel()
	client, asked := scripted(t, map[string]string{"PATCH /api/v1/nodes/" +
		nodeName: `200 {"metadata": {"labels": {"a": "new"}}}`})
	node, err := client.PatchNode(t.Context(), kubeapi.Node{UID: "uid"},
		kubeapi.LabelSwap{Keys: []string{"nvidia.com/b~c", "a"}, From: "old", To: "new"})
	if err != nil || node.Labels["a"] != "new" {
		t.Errorf("%v, labels %v", err, node.Labels)
	}
	want := []string{"PATCH /api/v1/nodes/" + nodeName + ` [{"op":"test","path":"/metadata/uid","value":"uid"},` +
		`{"op":"test","path":"/metadata/labels/a","value":"old"},{"op":"replace","path":"/metadata/labels/a","value":"new"},` +
		`{"op":"test","path":"/metadata/labels/nvidia.com~1b~0c","value":"old"},` +
		`{"op":"replace","path":"/metadata/labels/nvidia.com~1b~0c","value":"new"}]`}
	if diff := cmp.Diff(want, asked()); diff != "" {
		t.Errorf("requests (-want +got):\n%s", diff)
	}
	none, _ := scripted(t, nil)
	if _, err := none.PatchNode(t.Context(), kubeapi.Node{UID: "uid"},
		kubeapi.LabelSwap{Keys: []string{"a"}, From: "old", To: "new"}); !kubeapi.IsNotFound(err) {
		t.Errorf("a node that is not there: %v", err)
	}
}

// TestFailures: an error has the message of the response, within limits, and the delay that the API
// server requests, within limits.
func TestFailures(t *testing.T) {
	t.Parallel()
	const status = `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 409, `
	for name, tt := range map[string]struct {
		after, contentType, body string
		want                     string
		delay                    time.Duration
	}{
		"a Status": {"1", "application/json",
			status + `"reason": "Conflict", "message": "m", "details": {"retryAfterSeconds": 1}}`, "409: m", time.Second},
		"another kind": {"0", "application/json", `{"kind": "Node", "reason": "r", "message": "m"}`, "409: ", 0},
		"a page":       {"-1", "text/html", "<html>", "409: ", 0},
		"a date":       {"Sun, 22 Nov 2026 08:00:00 GMT", "", "", "409: ", 0},
		"a day":        {"86400", "", "", "409: ", 10 * time.Minute},
		"a long message": {"", "application/json", status + `"message": "` + strings.Repeat("x", 301) + `"}`,
			"409: " + strings.Repeat("x", 300), 0},
	} {
		client := answering(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", tt.after)
			w.Header().Set("Content-Type", tt.contentType)
			w.WriteHeader(http.StatusConflict)
			_, _ = io.WriteString(w, tt.body)
		})
		_, err := client.NodeCount(t.Context())
		if !kubeapi.IsCode(err, http.StatusConflict) || !strings.Contains(err.Error(), "the API server answered "+tt.want) ||
			strings.Contains(err.Error(), strings.Repeat("x", 301)) {
			t.Errorf("%s: %v", name, err)
		}
		if delay := kubeapi.Backoff(err, 1); delay < tt.delay || delay > tt.delay+time.Second {
			t.Errorf("%s: a delay of %v, want %v and up to a second", name, delay, tt.delay)
		}
	}
}

// TestOneConflict: a single label of another program's is a Conflict, and an answer that is no
// success is an error.
func TestOneConflict(t *testing.T) {
	t.Parallel()
	const path = "PATCH /api/v1/nodes/" + nodeName
	for answer, labels := range map[string]int{
		`409 {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 409, "details": {"causes": [{"reason": "FieldManagerConflict", "field": ".metadata.labels.a", "message": "b"}]}}`: 1,
		`409 {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 409, "details": {"causes": [{"reason": "FieldManagerConflict", "field": ".spec", "message": "b"}]}}`:              0,
		"300 {}": 0,
	} {
		client, _ := scripted(t, map[string]string{path: answer})
		_, err := client.PatchNode(t.Context(), kubeapi.Node{UID: "1"}, kubeapi.LabelsPatch{"a": "x"})
		var conflict *kubeapi.Conflict
		if is := errors.As(err, &conflict); err == nil || is != (labels > 0) || is && len(conflict.Labels) != labels {
			t.Errorf("%s: %v", answer, err)
		}
	}
}
