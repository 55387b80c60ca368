package kubeapi_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// answering returns a client of a server with these answers.
func answering(t *testing.T, answer http.HandlerFunc) *kubeapi.Client {
	t.Helper()
	server := httptest.NewServer(answer)
	t.Cleanup(server.Close)
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "a", "users": [{"name": "a", "user": {"token": "secret"}}],
"clusters": [{"name": "a", "cluster": {"server": %q}}], "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}]}`, server.URL)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return kubeapi.New(kubeapi.Options{Kubeconfig: path, Node: nodeName, Version: "v1"})
}

// TestInvalidResponses: what answers in the place of the API server, such as a proxy, is an
// error, and costs no memory.
func TestInvalidResponses(t *testing.T) {
	t.Parallel()
	var elsewhere atomic.Int32
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { elsewhere.Add(1) }))
	t.Cleanup(other.Close)
	for name, tt := range map[string]struct {
		answer http.HandlerFunc
		want   string
	}{
		"a page":  {func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>") }, "read the answer"},
		"nothing": {func(http.ResponseWriter, *http.Request) {}, "read the answer"},
		"a large one": {func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, strings.Repeat(" ", 5<<20)) },
			"more than 4194304 bytes"},
		"another place": {func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, other.URL, http.StatusFound) },
			"302"},
		"a long error": {func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusForbidden)
			fmt.Fprintf(w, `{"kind": "Status", "reason": "Forbidden", "message": %q}`, strings.Repeat("é", 1<<20))
		}, "403"},
		"half of one": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "100")
			fmt.Fprint(w, "{")
		}, "read the answer"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client := answering(t, tt.answer)
			_, err := client.Get(t.Context())
			if err == nil || !strings.Contains(err.Error(), tt.want) || len(err.Error()) > 1000 {
				t.Errorf("%.2000v, want %q", err, tt.want)
			}
			if elsewhere.Load() > 0 {
				t.Error("the token was sent to another place")
			}
		})
	}
}

// TestInvalidWatchEvents: a watch that brings nonsense begins again with a list, and the node that
// was known stays.
func TestInvalidWatchEvents(t *testing.T) {
	t.Parallel()
	const node = `{"metadata": {"name": "node-1", "uid": "1", "resourceVersion": "5", "labels": {"config": "a"}}}`
	for name, tt := range map[string]struct{ event, problem string }{
		"a page":             {"<html>", "invalid character"},
		"another kind":       {`{"type": 5}`, "cannot unmarshal"},
		"no version":         {`{"type": "MODIFIED", "object": {"metadata": {"name": "node-1", "uid": "1", "labels": {"config": "b"}}}}`, "has no version"},
		"not a node":         {`{"type": "MODIFIED", "object": 7}`, "read an event of the watch"},
		"an error that says": {`{"type": "ERROR", "object": {"code": 410, "message": "too old"}}`, "410: too old"},
		"no error":           {`{"type": "ERROR", "object": "x"}`, "read an event of the watch"},
		"an older version":   {`{"type": "MODIFIED", "object": {"metadata": {"name": "node-1", "uid": "1", "resourceVersion": "4"}}}`, "went back from version 5 to 4"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var begun atomic.Int32
			client := answering(t, func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Query().Get("watch") == "" {
					begun.Add(1)
					fmt.Fprintf(w, `{"metadata": {"resourceVersion": "5"}, "items": [%s]}`, node)
					return
				}
				fmt.Fprint(w, tt.event)
			})
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				client.Watch(ctx, unpaused{})
			}()
			t.Cleanup(func() { cancel(); <-ended })
			poll.Until(t, "a second list", func() bool { return begun.Load() >= 2 })
			if n := client.Nodes().Value(); n.Labels["config"] != "a" {
				t.Errorf("the node is %+v", n)
			}
			awaitProblem(t, client, tt.problem)
		})
	}
}

// TestGetEndsWithItsContext: a start waits for the API server only as long as it wants to.
func TestGetEndsWithItsContext(t *testing.T) {
	t.Parallel()
	server := start(t)
	client := kubeapi.New(kubeapi.Options{Kubeconfig: server.Kubeconfig(), Node: nodeName, Version: "v1"})
	server.SetBlackHole(true)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	began := time.Now()
	if _, err := client.Get(ctx); err == nil || time.Since(began) > patience/2 {
		t.Errorf("Get() took %v and returned %v", time.Since(began), err)
	}
	server.SetBlackHole(false)
	if n, err := client.Get(t.Context()); err != nil || n.Labels["config"] != "a" {
		t.Errorf("Get() = %+v, %v", n, err)
	}
}

// TestSlowAnswer: an API server that takes 10 s is slow, not away.
func TestSlowAnswer(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("an answer takes 10 s: make test-all runs it")
	}
	server := start(t)
	server.SetFault(apiserver.Fault{Delay: 10 * time.Second})
	client := kubeapi.New(kubeapi.Options{Kubeconfig: server.Kubeconfig(), Node: nodeName, Version: "v1"})
	if n, err := client.Get(t.Context()); err != nil || n.Labels["config"] != "a" {
		t.Errorf("Get() = %+v, %v", n, err)
	}
}

const nowhere = `{"apiVersion": "v1", "kind": "Config", "current-context": "a", "contexts": [{"name": "a", "context": {"cluster": "a"}}],
	"clusters": [{"name": "a", "cluster": {"server": "https://a:b"}}]}`

// TestUnknownAPIServer: outside a pod and without a kubeconfig every request says so, and nothing
// else happens.
func TestUnknownAPIServer(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	client := kubeapi.New(kubeapi.Options{Kubeconfig: path, Node: nodeName})
	if _, err := client.Get(t.Context()); err == nil || !strings.Contains(err.Error(), "find the API server") {
		t.Errorf("Get() = %v", err)
	}
	if err := os.WriteFile(path, []byte(nowhere), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Get(t.Context()); err == nil || !strings.Contains(err.Error(),
		"find the API server: host must be a URL") {
		t.Errorf("Get() = %v", err)
	}
	// It is looked for again at the next request.
	server := start(t)
	text, err := os.ReadFile(server.Kubeconfig())
	if err == nil {
		err = os.WriteFile(path, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	if n, err := client.Get(t.Context()); err != nil || n.UID == "" {
		t.Errorf("Get() = %+v, %v", n, err)
	}
}

// TestNodeCount: of many nodes one is read, and the API server tells how many more there are.
func TestNodeCount(t *testing.T) {
	t.Parallel()
	for answer, want := range map[string]int{
		`{"metadata": {"remainingItemCount": 4999}, "items": [{}]}`: 5000,
		`{"metadata": {}, "items": [{}]}`:                           1,
		`{"items": []}`:                                             0,
		`<html>`:                                                    -1,
	} {
		client := answering(t, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/api/v1/nodes" || r.URL.RawQuery != "limit=1" {
				t.Errorf("asked for %s", r.URL)
			}
			fmt.Fprint(w, answer)
		})
		if got, err := client.NodeCount(t.Context()); (err != nil) != (want < 0) || err == nil && got != want {
			t.Errorf("%s: %d, %v, want %d", answer, got, err, want)
		}
	}
}

// TestListBeforeWatch: the first one may be of an API server that is a little behind; a
// further one is of the newest state, as what is known would go back.
func TestListBeforeWatch(t *testing.T) {
	t.Parallel()
	node := func(ctx context.Context, c *kubeapi.Client) { c.Watch(ctx, hurried{}) }
	for name, tt := range map[string]struct {
		event string
		watch func(context.Context, *kubeapi.Client)
	}{
		"an error that passes": {`{"type": "ERROR", "object": {"code": 500, "message": "etcd is away"}}`, node},
		"silence":              {"", node},
		"slices": {"", func(ctx context.Context, c *kubeapi.Client) {
			c.WatchSlices(ctx, hurried{}, "driver", "", feed.New(kubeapi.Slices{}), feed.New[error](nil))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var mu sync.Mutex
			var asked []string
			ended := make(chan struct{})
			client := answering(t, func(w http.ResponseWriter, r *http.Request) {
				query := r.URL.Query()
				mu.Lock()
				asked = append(asked, strings.TrimSpace(query.Get("watch")+" "+query.Get("resourceVersion")))
				mu.Unlock()
				if query.Get("watch") == "" {
					fmt.Fprint(w, `{"metadata": {"resourceVersion": "5"}}`)
					return
				}
				fmt.Fprint(w, tt.event)
				if w.(http.Flusher).Flush(); tt.event == "" {
					select {
					case <-r.Context().Done():
					case <-ended:
					}
				}
			})
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				defer close(ended)
				tt.watch(ctx, client)
			}()
			t.Cleanup(func() { cancel(); <-ended })
			again := "" // the latest
			if name == "slices" {
				again = "5" // not of before what is known
			}
			want := []string{"0", "true 5", again, "true 5", again, "true 5"}
			for late := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
				mu.Lock()
				got := slices.Clone(asked[:min(len(asked), len(want))])
				mu.Unlock()
				if slices.Equal(got, want) {
					return
				}
				if len(got) == len(want) || time.Now().After(late) {
					t.Fatalf("asked for %q, want %q", got, want)
				}
			}
		})
	}
}
