package monitor_test

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// slowLinks has calls about links take so much longer.
func slowLinks(delay string) []simulator.Fault {
	var faults []simulator.Fault
	for _, call := range []string{"DeviceGetNvLinkState", "DeviceGetNvLinkRemoteDeviceType",
		"DeviceGetTopologyCommonAncestor"} {
		faults = append(faults, simulator.Fault{Kind: simulator.KindSlow, Call: call, Delay: delay})
	}
	return faults
}

// linked reports whether eight GPUs have all links of a DGX H100.
func linked(n inventory.Snapshot) bool {
	return len(n.GPUs) == 8 && !slices.ContainsFunc(n.GPUs, func(g inventory.GPU) bool {
		return len(g.Links) != 7 || slices.ContainsFunc(g.Links, func(l inventory.Link) bool { return l.NVLinks != 18 })
	})
}

// TestLinksAreDue: GPUs are there at once, and the Snapshot says that links are due until all are
// known that will be known soon.
func TestLinksAreDue(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		faults   []simulator.Fault
		complete bool
	}{
		"slow":  {slowLinks("20ms"), true},
		"hangs": {append(slowLinks("20ms"), hang("3", "DeviceGetNvLinkState")), false},
		"fails": {append(slowLinks("20ms"), simulator.Fault{
			Kind: simulator.KindFail, GPU: "3", Call: "DeviceGetNvLinkState", Return: "TIMEOUT",
		}), false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p, err := simulator.Load("dgx-h100")
				if err != nil {
					t.Fatal(err)
				}
				p.Faults = test.faults
				began := time.Now()
				s := simulateProfile(t, p)
				if n := s.Snapshots().Value(); !n.LinksDue || len(n.GPUs) != 8 {
					t.Fatalf("the first Snapshot has %d GPUs, and says that links are due: %v", len(n.GPUs), n.LinksDue)
				}
				if took := time.Since(began); took > 5*time.Second {
					t.Errorf("the first Snapshot came after %v", took)
				}
				s.until("links are not due any more", func(n inventory.Snapshot) bool { return !n.LinksDue })
				took := time.Since(began)
				t.Logf("links are due for %v", took)
				if took > 40*time.Second {
					t.Errorf("links are due for %v", took)
				}
				if got := linked(s.Snapshots().Value()); got != test.complete {
					t.Errorf("all links are known: %v, want %v", got, test.complete)
				}
			})
		})
	}
}

// TestLinksStayWhileDue: in a new session of a slow driver GPUs keep their links until all were
// read again.
func TestLinksStayWhileDue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := simulate(t, "dgx-h100")
		s.until("all links", linked)
		for _, f := range slowLinks("20ms") {
			s.inject(f)
		}
		s.inject(simulator.Fault{Kind: simulator.KindLost, GPU: "3"})
		s.until("a GPU is lost", state(3, inventory.Lost))
		s.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "3"})
		due := false
		check := func(n inventory.Snapshot) {
			if due = due || n.LinksDue; !linked(n) {
				t.Fatalf("generation %d lacks links: %+v", n.Generation, n.GPUs)
			}
		}
		s.until("the GPU is back", func(n inventory.Snapshot) bool { check(n); return state(3, healthy)(n) })
		s.until("links are known", func(n inventory.Snapshot) bool { check(n); return due && !n.LinksDue })
	})
}
