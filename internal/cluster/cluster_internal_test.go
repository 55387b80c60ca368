package cluster

import (
	"context"
	"maps"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// TestTheNodeIsWatchedWhileSomethingNeedsIt: a program that nothing was asked of asks the API server for nothing, and features can be
// switched while it runs.
func TestTheNodeIsWatchedWhileSomethingNeedsIt(t *testing.T) {
	t.Parallel()
	server, err := apiserver.Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	if err := server.ChangeNode("n", func(*corev1.Node) {}); err != nil {
		t.Fatal(err)
	}
	c := New()
	if chosen := c.Choose(t.Context(), config.Config{Kubeconfig: server.Kubeconfig(), NodeName: "n"}); chosen != nil {
		t.Errorf("a label chooses the configuration, and nobody wants that: %+v", chosen.Value())
	}
	configs := feed.New(config.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = c.watchNode(ctx, configs) // returns nil
	}()
	t.Cleanup(func() { cancel(); <-ended })

	until := func(what string, holds func() bool) {
		t.Helper()
		for late := time.Now().Add(patience); !holds(); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(late) {
				t.Fatalf("not within %v: %s", patience, what)
			}
		}
	}
	known := func(uid bool) func() bool { return func() bool { return (c.client.Nodes().Value().UID != "") == uid } }
	quiet := time.Now().Add(headStart / 5)
	until("nothing happens", func() bool { return time.Now().After(quiet) })
	if asked := server.Requests(); len(asked) > 0 {
		t.Errorf("nothing is switched on, and the API server was asked: %v", asked)
	}
	for range 2 {
		configs.Publish(config.Config{Features: config.Features{Events: true}})
		until("the node is watched", known(true))
		// What else changes does not end the watch.
		before := server.Requests()
		configs.Publish(config.Config{Features: config.Features{Events: true, Taint: true}})
		configs.Publish(config.Config{Features: config.Features{Condition: true}})
		if now := server.Requests(); !maps.Equal(before, now) {
			t.Errorf("another feature is another watch: %v before, %v now", before, now)
		}
		configs.Publish(config.Config{})
		until("the node is forgotten", known(false))
	}
	// A taint of an option that was turned off is to be removed yet.
	change := func(with func(*corev1.Node)) {
		t.Helper()
		if err := server.ChangeNode("n", with); err != nil {
			t.Fatal(err)
		}
	}
	change(func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: taintKey, Effect: taintEffect}} })
	configs.Publish(config.Config{Features: config.Features{Taint: true}})
	until("the node is watched", known(true))
	configs.Publish(config.Config{})
	quiet = time.Now().Add(headStart / 5)
	until("nothing happens", func() bool { return time.Now().After(quiet) })
	change(func(n *corev1.Node) { n.Labels = map[string]string{"turned": "off"} })
	until("the node with the taint is watched", func() bool { return c.client.Nodes().Value().Labels["turned"] == "off" })
	change(func(n *corev1.Node) { n.Spec.Taints = nil })
	until("the node is forgotten", known(false))
	if c.Problem() != nil {
		t.Errorf("nobody asks the API server, and it has the problem %v", c.Problem())
	}
}
