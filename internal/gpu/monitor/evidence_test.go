package monitor_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// TestResetWhileTheDriverIsReleased: after quiesce, nvidia-smi --gpu-reset and resume, a count of
// memory errors that is back at zero ends XID 46, of which the recovery action says nothing.
// Without persistence mode the count is zero in any case, so an operator has to clear the fault.
func TestResetWhileTheDriverIsReleased(t *testing.T) {
	for name, tt := range map[string]struct {
		persistence string
		reset, good bool
	}{
		"persistence mode, reset":       {"on", true, true},
		"persistence mode, no reset":    {"on", false, false},
		"no persistence mode, reset":    {"off", true, false},
		"no persistence mode, no reset": {"off", false, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := simulate(t, "dgx-h100")
				s.inject(simulator.Fault{Kind: simulator.KindPersistence, State: tt.persistence})
				pass(time.Minute) // it is read rarely
				s.inject(simulator.Fault{Kind: simulator.KindECC, GPU: "3", Count: 2})
				s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 46})
				s.until("struck", state(3, unhealthy))
				pass(time.Minute) // the count is read

				if err := s.Quiesce(t.Context(), true); err != nil {
					t.Fatal(err)
				}
				if tt.reset {
					s.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "3"})
				}
				if err := s.Resume(t.Context()); err != nil {
					t.Fatal(err)
				}
				pass(time.Minute)
				if good := state(3, healthy)(s.Snapshots().Value()); good != tt.good {
					t.Errorf("GPU 3 is %+v", s.Snapshots().Value().GPUs[3].Health)
				}
				if err := s.Clear(t.Context(), s.node.List()[3].UUID); err != nil {
					t.Fatal(err)
				}
				s.until("good once cleared", allHealthy(8))
			})
		})
	}
}
