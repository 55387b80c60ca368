package monitor_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
)

func TestQuiesceReleasesTheDriverAndResumeGoesBack(t *testing.T) {
	for _, allocate := range []bool{true, false} {
		n := newNode(2)
		watch(t, n, func(t *testing.T, m *monitor.Monitor) {
			if err := m.Quiesce(t.Context(), allocate); err != nil {
				t.Fatal(err)
			}
			if n.count(opened)-n.count(closed) != 0 {
				t.Fatal("the session is still open")
			}
			before := n.count(scans)
			pass(time.Hour)
			s := m.Snapshots().Value()
			if s.Stale == "" || len(s.GPUs) != 2 {
				t.Errorf("Snapshot %+v", s)
			}
			if got := s.GPUs[0].Health.Allocatable(); got != allocate {
				t.Errorf("allocatable: %v, want %v", got, allocate)
			}
			if _, err := m.Look(t.Context()); !errors.Is(err, monitor.ErrQuiesced) {
				t.Errorf("Look: %v, want ErrQuiesced", err)
			}
			if err := m.Quiesce(t.Context(), allocate); err != nil {
				t.Errorf("Quiesce again: %v", err)
			}
			if n.count(scans) != before || n.count(opened) != 1 {
				t.Error("the driver was not left alone")
			}

			n.set(func(n *node) { n.gpus = n.gpus[:1] })
			if err := m.Resume(t.Context()); err != nil {
				t.Fatal(err)
			}
			wantStates(t, m, healthy)
			if s := m.Snapshots().Value(); s.Stale != "" {
				t.Errorf("still stale: %s", s.Stale)
			}
		})
	}
}

func TestQuiesceWhileALookHangs(t *testing.T) {
	n := newNode(1)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		n.set(func(n *node) { n.hung = true })
		n.xid(0, 31) // asks for a look
		pass(time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := m.Quiesce(ctx, true); !errors.Is(err, inventory.ErrNoAnswer) {
			t.Fatalf("Quiesce: %v, want ErrNoAnswer", err)
		}
		wantStates(t, m, healthy)
		n.set(func(n *node) { n.hung = false })
		pass(5 * time.Second)
		if n.count(opened)-n.count(closed) != 0 {
			t.Error("the session is still open")
		}
		if err := m.Resume(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}

func TestLookThatQuietOvertakesSaysSo(t *testing.T) {
	n := newNode(1)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		gate := make(chan struct{})
		n.set(func(n *node) { n.gate = gate })
		looked, quiet := make(chan error, 1), make(chan error, 1)
		go func() {
			_, err := m.Look(t.Context())
			looked <- err
		}()
		synctest.Wait()
		go func() { quiet <- m.Quiesce(t.Context(), true) }()
		synctest.Wait()
		n.set(func(n *node) { n.gpus = nil })
		close(gate)
		if err := <-looked; !errors.Is(err, monitor.ErrQuiesced) {
			t.Errorf("Look: %v, want ErrQuiesced", err)
		}
		if err := <-quiet; err != nil {
			t.Errorf("Quiesce: %v", err)
		}
		wantStates(t, m, healthy)
	})
}

func TestFaultThatAsksForHandsStaysUntilCleared(t *testing.T) {
	n := newNode(2)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		n.xid(1, 64)
		pass(time.Hour)
		wantStates(t, m, healthy, unhealthy)
		if err := m.Clear(t.Context(), uuid(7)); err == nil {
			t.Error("a GPU that does not exist was cleared")
		}
		if err := m.Clear(t.Context(), uuid(1)); err != nil {
			t.Fatal(err)
		}
		wantStates(t, m, healthy, healthy)
	})
}

func TestClearedFaultThatIsStillReadComesBack(t *testing.T) {
	n := newNode(1)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		n.set(func(n *node) { n.readings[uuid(0)] = inventory.Reading{RowRemapFailure: inventory.Known(true)} })
		pass(30 * time.Second)
		wantStates(t, m, unhealthy)
		if err := m.Clear(t.Context(), uuid(0)); err != nil {
			t.Fatal(err)
		}
		wantStates(t, m, unhealthy)
	})
}

func TestStatusTellsWhatIsKnown(t *testing.T) {
	n := newNode(2)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		start := time.Now()
		pass(time.Minute)
		n.xid(1, 31)
		n.xid(1, 31)
		n.xid(1, 119)
		synctest.Wait()
		s, err := m.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(s.GPUs) != 2 || s.GPUs[1].UUID != uuid(1) || s.Err != nil || !s.Quiesced.IsZero() ||
			s.Looked.Before(start) {
			t.Fatalf("Status %+v", s)
		}
		counts := s.GPUs[1].Counts
		if len(counts) != 2 || counts[0].XID != 31 || counts[0].N != 2 || counts[1].XID != 119 ||
			!counts[1].Last.Equal(time.Now()) {
			t.Errorf("counts %+v", counts)
		}
		if f := s.GPUs[1].Faults; len(f) != 1 || f[0].XID != 119 || f[0].Source != health.SourceXID {
			t.Errorf("faults %+v", f)
		}
		n.set(func(n *node) { n.scanErr = inventory.ErrNoDriver })
		pass(30 * time.Second)
		if s, err = m.Status(t.Context()); err != nil || !errors.Is(s.Err, inventory.ErrNoDriver) {
			t.Errorf("Status.Err %v, %v", s.Err, err)
		}
	})
}

func TestPolicyCanBeReplaced(t *testing.T) {
	n := newNode(1)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		p := health.Default()
		p.Overrides = p.Overrides.With(119, health.RuleIgnore)
		if err := m.Apply(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		n.xid(0, 119)
		synctest.Wait()
		wantStates(t, m, healthy)
	})
}
