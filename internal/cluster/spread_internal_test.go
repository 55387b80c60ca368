package cluster

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// TestSpreadOfFirstWrites: 100 nodes write in a second, whatever the size of the cluster.
func TestSpreadOfFirstWrites(t *testing.T) {
	t.Parallel()
	r := newLabelRig(t, config.LabelsOff, nil)
	waits := func() time.Duration {
		t.Helper()
		var last time.Duration
		for range 50 {
			c := &stepping{now: time.Now()}
			began := c.now
			l := &labeler{clock: c, spread: &spread{}, client: kubeapi.New(kubeapi.Options{Kubeconfig: r.server.Kubeconfig(), Node: "n"})}
			if err := l.admit(t.Context(), false); err != nil {
				t.Fatal(err)
			}
			last = max(last, c.now.Sub(began))
		}
		return last
	}
	if last := waits(); last > 10*time.Millisecond {
		t.Errorf("one node waits %v", last)
	}
	for i := range 299 {
		if err := r.server.ChangeNode(fmt.Sprint("other-", i), func(*corev1.Node) {}); err != nil {
			t.Fatal(err)
		}
	}
	if last := waits(); last < time.Second || last > 3*time.Second {
		t.Errorf("of 300 nodes the last of 50 waits %v, want up to 3 s", last)
	}
	shared, lists := &spread{}, r.server.Requests()[apiserver.Request{Verb: "list", Resource: "nodes"}]
	for range 3 {
		limit, err := shared.of(t.Context(), kubeapi.New(kubeapi.Options{Kubeconfig: r.server.Kubeconfig(), Node: "n"}))
		if err != nil || limit != 3*time.Second {
			t.Errorf("the limit of 300 nodes is %v (%v), want 3 s", limit, err)
		}
	}
	if n := r.server.Requests()[apiserver.Request{Verb: "list", Resource: "nodes"}] - lists; n != 1 {
		t.Errorf("three that share a spread counted the nodes %d times", n)
	}
	r.server.SetFault(apiserver.Fault{Status: 403})
	if last := waits(); last < 5*time.Second || last > 10*time.Second {
		t.Errorf("of nodes that may not be counted the last of 50 waits %v, want up to 10 s", last)
	}
	r.server.SetFault(apiserver.Fault{Status: 503})
	l := &labeler{clock: &stepping{}, spread: &spread{}, client: kubeapi.New(kubeapi.Options{Kubeconfig: r.server.Kubeconfig(), Node: "n"})}
	if err := l.admit(t.Context(), false); err == nil {
		t.Error("an API server that is not ready is written to")
	}
}
