package monitor_test

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/simulated"
)

// A simulation is a Monitor of a simulated node behind the adapter that ships, with the paces that
// ship.
type simulation struct {
	*monitor.Monitor
	t      *testing.T
	node   *simulator.Node
	counts *counts
}

// simulate runs a Monitor of a simulated node until the end of the bubble in which it is called:
// time is exact in it, and no look takes longer because the machine is busy.
func simulate(t *testing.T, profile string, change ...func(*monitor.Options, *simulator.Node)) simulation {
	t.Helper()
	p, err := simulator.Load(profile)
	if err != nil {
		t.Fatal(err)
	}
	return simulateProfile(t, p, change...)
}

// simulateProfile is simulate for a node that is no file.
func simulateProfile(t *testing.T, p simulator.Profile, change ...func(*monitor.Options, *simulator.Node)) simulation {
	t.Helper()
	node := simulator.New(p)
	policy := health.Default()
	policy.FlapLimit = 1_000_000
	counts := newCounts()
	options := monitor.Options{
		Driver: simulated.DriverOf(node), Policy: policy, Metrics: counts,
	}
	for _, c := range change {
		c(&options, node)
	}
	m := monitor.New(options)
	ctx, cancel := context.WithCancel(withoutLog(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
		node.Close()
		if s := node.Stats(); s.StaleCalls != 0 {
			t.Errorf("%d calls on handles that did not live any more", s.StaleCalls)
		}
	})
	if err := m.First(t.Context()); err != nil {
		t.Fatal(err)
	}
	return simulation{m, t, node, counts}
}

func (s simulation) inject(f simulator.Fault) {
	s.t.Helper()
	if err := s.node.Inject(f); err != nil {
		s.t.Fatal(err)
	}
}

// until waits for a Snapshot for which ok is true.
func (s simulation) until(what string, ok func(inventory.Snapshot) bool) {
	s.t.Helper()
	deadline := time.After(10 * time.Minute)
	for {
		snapshot, changed := s.Snapshots().Latest()
		if ok(snapshot) {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			s.t.Fatalf("never %s; the GPUs are %v, and the Snapshot is stale because of %q", what, states(s.Monitor),
				snapshot.Stale)
		}
	}
}

// state is a condition: the GPU at an index has a state.
func state(index int, want inventory.State) func(inventory.Snapshot) bool {
	return func(s inventory.Snapshot) bool {
		i := slices.IndexFunc(s.GPUs, func(g inventory.GPU) bool { return g.Index == index })
		return i >= 0 && s.GPUs[i].Health.State == want
	}
}

func allHealthy(n int) func(inventory.Snapshot) bool {
	return func(s inventory.Snapshot) bool {
		return s.Stale == "" && len(s.GPUs) == n &&
			!slices.ContainsFunc(s.GPUs, func(g inventory.GPU) bool { return g.Health.State != healthy })
	}
}

func TestSimulatedFaultsAndTheirRepair(t *testing.T) {
	tests := map[string]struct {
		faults []simulator.Fault
		struck func(inventory.Snapshot) bool
		remedy []simulator.Fault
	}{
		"XID 48": {[]simulator.Fault{{Kind: simulator.KindXID, GPU: "3", XID: 48}}, state(3, unhealthy), nil},
		"XID 46, unbound and bound": {
			[]simulator.Fault{{Kind: simulator.KindXID, GPU: "3", XID: 46}}, state(3, unhealthy),
			[]simulator.Fault{{Kind: simulator.KindRemove, GPU: "3"}, {Kind: simulator.KindAdd, GPU: "3"}},
		},
		"XID 119": {[]simulator.Fault{{Kind: simulator.KindXID, GPU: "3", XID: 119}}, state(3, unhealthy), nil},
		"XID 79":  {[]simulator.Fault{{Kind: simulator.KindXID, GPU: "3", XID: 79}}, state(3, lost), nil},
		"lost":    {[]simulator.Fault{{Kind: simulator.KindLost, GPU: "0"}}, state(0, lost), nil},
		"recovery action": {
			[]simulator.Fault{{Kind: simulator.KindRecoveryAction, GPU: "5", Action: "drain-and-reset"}}, state(5,
				unhealthy), nil,
		},
		"fabric": {
			[]simulator.Fault{{Kind: simulator.KindFabric, GPU: "1", State: "in-progress"}}, state(1, unhealthy), nil,
		},
		"calls that fail": {
			[]simulator.Fault{{Kind: simulator.KindFail, GPU: "2", Return: "UNKNOWN"}}, state(2, lost), nil,
		},
		"reset required": {
			[]simulator.Fault{{Kind: simulator.KindFail, GPU: "2", Return: "RESET_REQUIRED"}}, state(2, unhealthy), nil,
		},
		"everything hangs": {
			[]simulator.Fault{{Kind: simulator.KindHang}},
			func(s inventory.Snapshot) bool {
				return !slices.ContainsFunc(s.GPUs, func(g inventory.GPU) bool { return g.Health.Allocatable() })
			}, nil,
		},
		"driver unloaded": {
			[]simulator.Fault{{Kind: simulator.KindDriver, Driver: "missing"}},
			func(s inventory.Snapshot) bool { return s.Stale != "" && !s.GPUs[0].Health.Allocatable() }, nil,
		},
		"unplugged": {
			[]simulator.Fault{{Kind: simulator.KindRemove, GPU: "7"}},
			func(s inventory.Snapshot) bool { return len(s.GPUs) == 7 },
			[]simulator.Fault{{Kind: simulator.KindAdd, GPU: "7"}},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := simulate(t, "dgx-h100")
				s.until("all good at first", allHealthy(8))
				for _, f := range tt.faults {
					s.inject(f)
				}
				s.until("struck", tt.struck)
				// The reading that goes with it: on a GPU that is repaired before anybody has read it nobody
				// could see the repair.
				_, _ = s.Look(t.Context())
				pass(time.Second) // a reset in the moment of the fault would be one that came before it
				if tt.remedy == nil {
					tt.remedy = []simulator.Fault{{Kind: simulator.KindRestore}}
				}
				for _, f := range tt.remedy {
					s.inject(f)
				}
				s.until("all good again", allHealthy(8))
			})
		})
	}
}
