package kubeapi_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

const (
	patience = time.Minute // how long a test waits for what must come
	nodeName = "node-1"
)

// unpaused is a clock on which pauses pass a hundred times as fast. The silence of a watch takes
// its time: a machine may be slow.
type unpaused struct{ clock.RealClock }

func (u unpaused) After(d time.Duration) <-chan time.Time { return u.RealClock.After(d / 100) }

// hurried is a clock on which the silence of a watch passes a hundred times as fast, too.
type hurried struct{ unpaused }

func (h hurried) NewTimer(d time.Duration) clock.Timer {
	return hurriedTimer{h.RealClock.NewTimer(d / 100)}
}

type hurriedTimer struct{ clock.Timer }

func (t hurriedTimer) Reset(d time.Duration) bool { return t.Timer.Reset(d / 100) }

// start starts an API server with the node, and another one's.
func start(t *testing.T) *apiserver.Server {
	t.Helper()
	server, err := apiserver.Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	label(t, server, nodeName, "a")
	label(t, server, "node-2", "other")
	return server
}

// failure is the error of a response with this code and the delay that the response requests.
func failure(code int, after time.Duration) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{Code: int32(code),
		Details: &metav1.StatusDetails{RetryAfterSeconds: int32(after.Seconds())}}}
}

// label gives a node a label, and makes the node if there is none.
func label(t *testing.T, server *apiserver.Server, node, value string) {
	t.Helper()
	err := server.ChangeNode(node, func(n *corev1.Node) { n.Labels = map[string]string{"config": value} })
	if err != nil {
		t.Fatal(err)
	}
}

// watch has a client watch the node until the test ends.
func watch(t *testing.T, server *apiserver.Server, timer clock.Clock) *kubeapi.Client {
	t.Helper()
	client := kubeapi.New(kubeapi.Options{Kubeconfig: server.Kubeconfig(), Node: nodeName, Version: "v1"})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		client.Watch(ctx, timer)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	return client
}

func awaitLabel(t *testing.T, client *kubeapi.Client, want string) kubeapi.Node {
	t.Helper()
	return poll.Latest(t, "label "+want, client.Nodes(), func(n kubeapi.Node) bool { return n.Labels["config"] == want })
}

func awaitProblem(t *testing.T, client *kubeapi.Client, want string) {
	t.Helper()
	_ = poll.Latest(t, "problem "+want, client.Problem(), func(err error) bool {
		return want == "" && err == nil || want != "" && err != nil && strings.Contains(err.Error(), want)
	})
}

func TestWatch(t *testing.T) {
	t.Parallel()
	server := start(t)
	err := server.ChangeNode(nodeName, func(n *corev1.Node) {
		n.Annotations = map[string]string{"b": "c"}
		n.Spec.Taints = []corev1.Taint{{Key: "k", Value: "v", Effect: corev1.TaintEffectNoSchedule}}
	})
	if err != nil {
		t.Fatal(err)
	}
	client := watch(t, server, clock.RealClock{})
	n := awaitLabel(t, client, "a")
	if n.Name != nodeName || n.UID == "" || n.ResourceVersion == "" || n.Annotations["b"] != "c" ||
		len(n.Taints) != 1 || n.Taints[0].Key != "k" || n.Taints[0].Effect != "NoSchedule" {
		t.Errorf("the node is %+v", n)
	}
	label(t, server, "node-2", "another")
	label(t, server, nodeName, "b")
	awaitLabel(t, client, "b")

	// A node that is deleted and created again is another one.
	if err := server.DeleteNode(nodeName); err != nil {
		t.Fatal(err)
	}
	poll.Latest(t, "no node", client.Nodes(), func(n kubeapi.Node) bool { return n.UID == "" && n.Labels == nil })
	label(t, server, nodeName, "c")
	if again := awaitLabel(t, client, "c"); again.UID == n.UID || again.UID == "" {
		t.Errorf("the new node has the UID %q, the old one %q", again.UID, n.UID)
	}
	if diff := cmp.Diff(map[apiserver.Request]int{{Verb: "list", Resource: "nodes"}: 1,
		{Verb: "watch", Resource: "nodes"}: 1}, server.Requests()); diff != "" {
		t.Errorf("requests (-want +got):\n%s", diff)
	}
}

// TestWatchThroughFaults: whatever the API server does wrong, what was known stays, and what
// changed meanwhile is known in the end.
func TestWatchThroughFaults(t *testing.T) {
	t.Parallel()
	status := func(code int) func(*testing.T, *apiserver.Server) {
		return func(_ *testing.T, s *apiserver.Server) {
			s.SetFault(apiserver.Fault{Status: code})
			s.DropWatches()
		}
	}
	must := func(t *testing.T, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	heal := func(_ *testing.T, s *apiserver.Server) { s.SetFault(apiserver.Fault{}) }
	for name, tt := range map[string]struct {
		fault, repair func(*testing.T, *apiserver.Server)
		problem       string // empty: no problem is to be seen
	}{
		"dropped":   {fault: func(_ *testing.T, s *apiserver.Server) { s.DropWatches() }},
		"forgotten": {fault: func(_ *testing.T, s *apiserver.Server) { s.Expire() }},
		"away": {fault: func(_ *testing.T, s *apiserver.Server) { s.Stop() },
			repair: func(t *testing.T, s *apiserver.Server) { must(t, s.Resume()) }, problem: "refused"},
		"slow": {fault: func(_ *testing.T, s *apiserver.Server) {
			s.SetFault(apiserver.Fault{Delay: 300 * time.Millisecond})
			s.DropWatches()
		}},
		"restored":      {fault: func(t *testing.T, s *apiserver.Server) { must(t, s.Restore()) }},
		"unauthorized":  {fault: status(http.StatusUnauthorized), repair: heal, problem: "401"},
		"forbidden":     {fault: status(http.StatusForbidden), repair: heal, problem: "403"},
		"overloaded":    {fault: status(http.StatusTooManyRequests), repair: heal, problem: "429"},
		"broken":        {fault: status(http.StatusInternalServerError), repair: heal, problem: "500"},
		"token rotated": {fault: func(t *testing.T, s *apiserver.Server) { must(t, s.RotateToken()); s.DropWatches() }},
		"another CA": {
			fault:  func(t *testing.T, s *apiserver.Server) { must(t, s.ReplaceCA()); s.DropWatches() },
			repair: func(t *testing.T, s *apiserver.Server) { must(t, s.PublishCA()) }, problem: "certificate",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := start(t)
			client := watch(t, server, hurried{})
			awaitLabel(t, client, "a")
			tt.fault(t, server)
			if tt.problem != "" {
				awaitProblem(t, client, tt.problem)
				if n := client.Nodes().Value(); n.Labels["config"] != "a" {
					t.Errorf("the node is forgotten: %+v", n)
				}
			}
			label(t, server, nodeName, "b")
			if tt.repair != nil {
				tt.repair(t, server)
			}
			awaitLabel(t, client, "b")
			awaitProblem(t, client, "")
		})
	}
}

// TestRestore: what a write returned before the cluster was restored from a backup is no later
// version than what is there now. That is known as soon as the watch is begun again, also if no
// watch told of the write.
func TestRestore(t *testing.T) {
	t.Parallel()
	for name, watched := range map[string]bool{"a write that the watch told of": true,
		"a write that it did not tell of": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := start(t)
			client := watch(t, server, clock.RealClock{})
			awaitLabel(t, client, "a")
			label(t, server, nodeName, "b")
			awaitLabel(t, client, "b") // the watch has begun, at a version of before
			for range 3 {
				label(t, server, "node-2", "other")
			}
			if !watched {
				server.SetFault(apiserver.Fault{Status: http.StatusServiceUnavailable,
					Only: func(r apiserver.Request) bool { return !r.IsWrite() }})
				server.DropWatches()
			}
			written, err := client.PatchNode(t.Context(), kubeapi.Node{}, kubeapi.ConditionPatch{Type: "GPUHealthy", Status: "True"})
			if err != nil {
				t.Fatal(err)
			}
			if watched {
				poll.Latest(t, "the condition", client.Nodes(), func(n kubeapi.Node) bool { return n.ResourceVersion == written.ResourceVersion })
			}
			if err := server.Restore(); err != nil {
				t.Fatal(err)
			}
			server.SetFault(apiserver.Fault{})
			restored := poll.Latest(t, "the restored node", client.Nodes(),
				func(n kubeapi.Node) bool { return n.ResourceVersion == "1" })
			if written.After(restored) || restored.After(written) {
				t.Errorf("version %s of before the restore is before or after version %s", written.ResourceVersion,
					restored.ResourceVersion)
			}
			again, err := client.PatchNode(t.Context(), kubeapi.Node{}, kubeapi.ConditionPatch{Type: "GPUHealthy", Status: "False"})
			if err != nil || !again.After(restored) || again.After(written) {
				t.Errorf("a write after the restore: %+v, %v", again, err)
			}
			if now, err := client.Get(t.Context()); err != nil || now.After(again) || again.After(now) {
				t.Errorf("the node is %+v (%v), and was written as %+v", now, err, again)
			}
		})
	}
}

// TestIdleWatch: a connection through which nothing comes any more is not waited
// for.
func TestIdleWatch(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("a connection that hangs is noticed after 10 s: make test-all runs it")
	}
	server := start(t)
	client := watch(t, server, hurried{})
	awaitLabel(t, client, "a")
	server.SetBlackHole(true)
	label(t, server, nodeName, "b")
	awaitProblem(t, client, "ask the API server") // the watch is given up, and there is no other one
	server.SetBlackHole(false)
	awaitLabel(t, client, "b")
}

// TestWatchOfMissingNode: kubelet registers the node later.
func TestWatchOfMissingNode(t *testing.T) {
	t.Parallel()
	server, err := apiserver.Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	client := watch(t, server, hurried{})
	poll.Until(t, "a watch", func() bool { return server.Requests()[apiserver.Request{Verb: "watch", Resource: "nodes"}] > 0 })
	label(t, server, nodeName, "a")
	awaitLabel(t, client, "a")
}

// TestIsTemporary: what comes to nothing now and may be taken later, such as an Event.
func TestIsTemporary(t *testing.T) {
	t.Parallel()
	for code, want := range map[int]bool{
		http.StatusTooManyRequests: true, http.StatusServiceUnavailable: true, http.StatusGatewayTimeout: true,
		http.StatusForbidden: false, http.StatusNotFound: false, http.StatusUnprocessableEntity: false,
	} {
		if got := kubeapi.IsTemporary(fmt.Errorf("x: %w", failure(code, 0))); got != want {
			t.Errorf("%d: %v, want %v", code, got, want)
		}
	}
	if kubeapi.IsTemporary(nil) || !kubeapi.IsTemporary(context.DeadlineExceeded) {
		t.Error("no error is passing, or no answer is not")
	}
}

func TestBackoff(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		err         error
		failures    int
		least, most time.Duration
	}{
		"a watch that ended": {nil, 1, 0, time.Second},
		"the third failure":  {context.DeadlineExceeded, 3, 0, 4 * time.Second},
		"the hundredth":      {context.DeadlineExceeded, 100, 0, 5 * time.Minute},
		// by an API server that starts
		"forbidden": {failure(http.StatusForbidden, 0), 1, 0, time.Second},
		"asked to wait the seventh time": {failure(http.StatusTooManyRequests, time.Second), 7, time.Second,
			65 * time.Second},
		"asked to wait": {failure(http.StatusTooManyRequests, time.Minute), 1, time.Minute,
			61 * time.Second},
	} {
		highest := time.Duration(0)
		for range 1000 {
			pause := kubeapi.Backoff(tt.err, tt.failures)
			if highest = max(highest, pause); pause < tt.least || pause > tt.most {
				t.Fatalf("%s: %v, want %v to %v", name, pause, tt.least, tt.most)
			}
		}
		if highest < tt.least+(tt.most-tt.least)/2 {
			t.Errorf("%s: at most %v of 1000, want them spread up to %v", name, highest, tt.most)
		}
	}
}
