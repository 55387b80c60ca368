package monitor_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// TestReset: there is no session while GPUs are reset, and another one afterwards. Only a reset
// that works is evidence, and only for its GPU.
func TestReset(t *testing.T) {
	n := newNode(2)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		pass(time.Minute)
		n.xid(0, 119)
		n.xid(1, 119)
		pass(time.Minute)
		wantStates(t, m, unhealthy, unhealthy)
		refused := errors.New("refused")
		for _, outcome := range []error{refused, nil} {
			ran := false
			err := m.Reset(t.Context(), []string{uuid(0)}, func(context.Context) error {
				ran = true
				if open := n.count(opened) - n.count(closed); open != 0 {
					t.Errorf("%d sessions are open during the reset", open)
				}
				return outcome
			})
			if !errors.Is(err, outcome) || !ran {
				t.Errorf("Reset() = %v, want %v", err, outcome)
			}
			pass(time.Minute)
			if open := n.count(opened) - n.count(closed); open != 1 {
				t.Errorf("%d sessions are open after the reset", open)
			}
			if outcome != nil {
				wantStates(t, m, unhealthy, unhealthy)
			}
		}
		wantStates(t, m, healthy, unhealthy)
		if err := m.Quiesce(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		err := m.Reset(t.Context(), []string{uuid(0)},
			func(context.Context) error { t.Error("it is reset"); return nil })
		if !errors.Is(err, monitor.ErrQuiesced) {
			t.Errorf("Reset() while the driver is released: %v", err)
		}
	})
}

// TestWithhold: one GPU is Unknown, with the reason and since when, until that is taken back. A
// fault of it is said first.
func TestWithhold(t *testing.T) {
	watch(t, newNode(2), func(t *testing.T, m *monitor.Monitor) {
		pass(time.Minute)
		began := time.Now()
		for _, reason := range []string{"it waits", "it is being reset"} {
			if err := m.Withhold(t.Context(), []string{uuid(0)}, reason); err != nil {
				t.Fatal(err)
			}
			pass(time.Minute)
			wantStates(t, m, inventory.Unknown, healthy)
			if h := m.Snapshots().Value().GPUs[0].Health; h.Reason != reason || !h.Since.Equal(began) ||
				h.Allocatable() {
				t.Errorf("the verdict is %+v", h)
			}
		}
		if err := m.Withhold(t.Context(), []string{uuid(0), "GPU-z"}, ""); err != nil {
			t.Fatal(err)
		}
		wantStates(t, m, healthy, healthy)
	})
}

// TestResetWhileACallHangs: the driver cannot be released, nothing is reset, and that is said.
// Other GPUs are asked as before.
func TestResetWhileACallHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := simulate(t, "l4-x8")
		s.inject(simulator.Fault{Kind: simulator.KindHang, GPU: "1"})
		s.until("GPU 1 hangs", state(1, unhealthy))
		gpus := s.Snapshots().Value().GPUs
		err := s.Reset(t.Context(), []string{gpus[1].UUID},
			func(context.Context) error { t.Error("it is reset"); return nil })
		if !errors.Is(err, inventory.ErrNoAnswer) {
			t.Errorf("Reset() = %v", err)
		}
		s.inject(simulator.Fault{Kind: simulator.KindLost, GPU: "2"})
		s.until("GPU 2 is lost", state(2, inventory.Lost))
	})
}
