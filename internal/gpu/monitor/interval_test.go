package monitor_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
)

// TestHealthInterval: GPUs are read as often as the policy says, also after it changes, and a lost
// one is found within that time.
func TestHealthInterval(t *testing.T) {
	n := newNode(2)
	policy := health.Default()
	policy.Interval = 30 * time.Second
	synctest.Test(t, func(t *testing.T) {
		m, stop := start(t, n, monitor.Options{})
		if err := m.Apply(t.Context(), policy); err != nil {
			t.Fatal(err)
		}
		pass(4 * time.Second) // the look that was due
		pass(10 * time.Minute)
		if got := n.count(scans); got != 22 {
			t.Errorf("%d scans in ten minutes, want two at first and one every 30 s", got)
		}
		policy.Interval = time.Second
		if err := m.Apply(t.Context(), policy); err != nil {
			t.Fatal(err)
		}
		pass(30 * time.Second) // the look that was due
		before := n.count(scans)
		pass(time.Minute)
		if got := n.count(scans) - before; got != 60 {
			t.Errorf("%d scans in a minute, want one every second", got)
		}
		n.set(func(n *node) {
			n.readings[uuid(1)] = inventory.Reading{Contact: inventory.ContactLost, Reason: "GPU is lost"}
		})
		pass(time.Second)
		wantStates(t, m, healthy, lost)
		stop()
	})
}
