package monitor_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

var remnants = []inventory.Remnant{inventory.RemnantClocks, inventory.RemnantECC}

func TestProcessesAndRemnantsOfASimulatedGPU(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := simulate(t, "dgx-h100")
		s.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "5", Count: 2})
		s.inject(simulator.Fault{Kind: simulator.KindECC, GPU: "5", Count: 3})
		s.until("the GPU is Healthy in spite of its errors", allHealthy(8))
		gpus := s.Snapshots().Value().GPUs
		processes, err := s.Processes(t.Context(), []string{gpus[4].UUID, gpus[5].UUID})
		if err != nil {
			t.Fatal(err)
		}
		if len(processes[gpus[4].UUID]) != 0 || len(processes[gpus[5].UUID]) != 2 {
			t.Errorf("processes: %v", processes)
		}

		if err := s.Clean(t.Context(), []string{gpus[5].UUID}, remnants); err != nil {
			t.Fatal(err)
		}
		status, err := s.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if got, want := status.GPUs[5].Reading.UncorrectedECC, inventory.Known(uint64(0)); got != want {
			t.Errorf("errors after they were cleared: %v, want %v", got, want)
		}
	})
}

// TestMemoryLimits: what the driver says of each cgroup is kept apart, and what it does not say is
// left out.
func TestMemoryLimits(t *testing.T) {
	n := newNode(2)
	n.limits = map[string]int{uuid(0) + " a": 4096, uuid(0) + " b": 0, uuid(1) + " a": 1024}
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		got, err := m.MemoryLimits(t.Context(), map[string][]string{uuid(0): {"gone", "a", "b"}, uuid(1): {"a"}})
		want := map[string]map[string]int{uuid(0): {"a": 4096, "b": 0}, uuid(1): {"a": 1024}}
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%v (-want +got):\n%s", err, diff)
		}
		n.mu.Lock()
		n.useErr = inventory.ErrNotSupported
		n.mu.Unlock()
		got, err = m.MemoryLimits(t.Context(), map[string][]string{uuid(0): {"a"}})
		if diff := cmp.Diff(map[string]map[string]int{uuid(0): {}}, got); err != nil || diff != "" {
			t.Errorf("an older driver: %v (-want +got):\n%s", err, diff)
		}
	})
}

func TestWhatTheDriverDoesNotDo(t *testing.T) {
	for name, test := range map[string]struct {
		err         error
		wantProcess bool // the error is one of Processes
	}{
		"not supported": {inventory.ErrNotSupported, false},
		"refused":       {errors.New("insufficient permissions"), true},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(2)
			n.useErr = test.err
			watch(t, n, func(t *testing.T, m *monitor.Monitor) {
				if _, err := m.Processes(t.Context(), []string{uuid(0)}); (err != nil) != test.wantProcess {
					t.Errorf("Processes: %v", err)
				}
				if err := m.Clean(t.Context(), []string{uuid(0), uuid(1)}, remnants); err != nil {
					t.Errorf("Clean: %v", err)
				}
				want := []string{uuid(0) + " clocks", uuid(0) + " ecc", uuid(1) + " clocks", uuid(1) + " ecc"}
				if diff := cmp.Diff(want, n.cleaned); diff != "" {
					t.Errorf("tried (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// TestClearingCountsIsNoReset: a fault that only a reset ends stays when the counts fall to zero
// by the daemon's own hand, also if somebody asks for quiet meanwhile.
func TestClearingCountsIsNoReset(t *testing.T) {
	for _, quiet := range []bool{false, true} {
		n := newNode(1)
		errs := good
		errs.UncorrectedECC = inventory.Known(uint64(2))
		n.readings[uuid(0)] = errs
		watch(t, n, func(t *testing.T, m *monitor.Monitor) {
			pass(time.Minute)
			n.xid(0, 119)
			pass(time.Minute)
			wantStates(t, m, unhealthy)
			if !quiet {
				if err := m.Clean(t.Context(), []string{uuid(0)}, remnants); err != nil {
					t.Fatal(err)
				}
			} else {
				cleanInto(t, n, m)
			}
			pass(time.Hour)
			wantStates(t, m, unhealthy)
			if !slices.Contains(n.cleaned, uuid(0)+" ecc") {
				t.Fatal("nothing was cleared")
			}
			// Errors that come afterwards are new ones, and their end is a reset's doing.
			n.set(func(n *node) { n.readings[uuid(0)] = errs })
			pass(time.Minute)
			n.set(func(n *node) {
				n.readings[uuid(0)] = inventory.Reading{
					RecoveryAction: good.RecoveryAction, UncorrectedECC: inventory.Known(uint64(0)),
				}
			})
			pass(time.Minute)
			wantStates(t, m, healthy)
		})
	}
}

// cleanInto has counts cleared in a look that quiet overtakes, and goes back to the driver.
func cleanInto(t *testing.T, n *node, m *monitor.Monitor) {
	gate := make(chan struct{})
	n.set(func(n *node) { n.gate = gate })
	cleaned, quiet := make(chan error, 1), make(chan error, 1)
	go func() { cleaned <- m.Clean(t.Context(), []string{uuid(0)}, remnants) }()
	synctest.Wait()
	go func() { quiet <- m.Quiesce(t.Context(), true) }()
	synctest.Wait()
	close(gate)
	if err := <-cleaned; !errors.Is(err, monitor.ErrQuiesced) {
		t.Errorf("Clean: %v, want ErrQuiesced", err)
	}
	if err := <-quiet; err != nil {
		t.Errorf("Quiesce: %v", err)
	}
	if err := m.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestNothingIsDoneWhileTheDriverIsLeftAlone(t *testing.T) {
	n := newNode(1)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		// Quiet comes while a look is under way, before the one that would run the requests.
		gate := make(chan struct{})
		n.set(func(n *node) { n.gate = gate })
		go func() { _, _ = m.Look(t.Context()) }()
		synctest.Wait()
		results := make(chan error, 3)
		go func() {
			_, err := m.Processes(t.Context(), []string{uuid(0)})
			results <- err
		}()
		go func() { results <- m.Clean(t.Context(), []string{uuid(0)}, remnants) }()
		synctest.Wait()
		go func() { results <- m.Quiesce(t.Context(), true) }()
		synctest.Wait()
		close(gate)
		quiet := 0
		for range 3 {
			switch err := <-results; {
			case errors.Is(err, monitor.ErrQuiesced):
				quiet++
			case err != nil:
				t.Errorf("error %v", err)
			}
		}
		if quiet != 2 {
			t.Errorf("%d were told of the quiet, want Processes and Clean", quiet)
		}
		if err := m.Clean(t.Context(), []string{uuid(0)}, remnants); !errors.Is(err, monitor.ErrQuiesced) {
			t.Errorf("Clean: %v, want ErrQuiesced", err)
		}
		if err := m.Resume(t.Context()); err != nil {
			t.Fatal(err)
		}
		pass(time.Hour)
		if len(n.cleaned) > 0 {
			t.Errorf("what nobody waits for was done: %v", n.cleaned)
		}
	})
}

func TestErrandsOfADriverThatHangs(t *testing.T) {
	n := newNode(1)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		pass(time.Second)
		n.set(func(n *node) { n.hung = true })
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := m.Processes(ctx, []string{uuid(0)}); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Processes: %v, want the deadline", err)
		}
		if err := m.Clean(ctx, []string{uuid(0)}, remnants); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Clean: %v, want the deadline", err)
		}
		n.set(func(n *node) { n.hung = false })
		pass(time.Hour)
		if len(n.cleaned) > 0 {
			t.Errorf("what nobody waits for was done: %v", n.cleaned)
		}
		wantStates(t, m, healthy)
	})
}

func TestComputeModesAreSetInTheSessionThatIsOpen(t *testing.T) {
	for name, refused := range map[string]error{"set": nil, "refused": inventory.ErrNotSupported} {
		t.Run(name, func(t *testing.T) {
			n := newNode(2)
			n.useErr = refused
			watch(t, n, func(t *testing.T, m *monitor.Monitor) {
				before, err := m.SetComputeMode(t.Context(), uuid(1), inventory.ComputeExclusiveProcess)
				if !errors.Is(err, refused) || before != inventory.ComputeProhibited {
					t.Errorf("SetComputeMode: %v, %v, want %v", before, err, refused)
				}
				if diff := cmp.Diff([]string{uuid(1) + " mode 3"}, n.cleaned); diff != "" {
					t.Errorf("tried (-want +got):\n%s", diff)
				}
				if err := m.Quiesce(t.Context(), false); err != nil {
					t.Fatal(err)
				}
				if _, err := m.SetComputeMode(t.Context(), uuid(1), inventory.ComputeDefault); !errors.Is(err,
					monitor.ErrQuiesced) {
					t.Errorf("SetComputeMode without a session: %v", err)
				}
			})
		})
	}
}

func TestStatusSaysHowTheDriverWasReleased(t *testing.T) {
	n := newNode(1)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		released := func(quiet, allocate bool, since time.Time) {
			t.Helper()
			s, err := m.Status(t.Context())
			if err != nil || s.Quiesced.IsZero() == quiet || s.Allocate != allocate || !s.Quiesced.Equal(since) {
				t.Errorf("status: quiet %t, allocate %t, since %s, error %v; want %t, %t, %s", !s.Quiesced.IsZero(),
					s.Allocate, s.Quiesced, err, quiet, allocate, since)
			}
		}
		quiesce := func(allocate bool) {
			t.Helper()
			if err := m.Quiesce(t.Context(), allocate); err != nil {
				t.Fatal(err)
			}
		}
		released(false, false, time.Time{})
		began := time.Now()
		quiesce(false)
		released(true, false, began)
		time.Sleep(time.Minute)
		quiesce(true)
		released(true, true, began)
		forChange := func(want bool) {
			t.Helper()
			if s, err := m.Status(t.Context()); err != nil || s.ForChange != want {
				t.Errorf("for a change: %t, %v; want %t", s.ForChange, err, want)
			}
		}
		forChange(false)
		if err := m.QuiesceForChange(t.Context()); err != nil {
			t.Fatal(err)
		}
		forChange(true)
		quiesce(false) // takes the release over
		forChange(false)
		if err := m.Resume(t.Context()); err != nil {
			t.Fatal(err)
		}
		released(false, false, time.Time{})
	})
}

// TestPartitionsBesideASlowGPU: how a GPU is divided is told when it is read, and not when a GPU
// that is slow has been looked at, too.
func TestPartitionsBesideASlowGPU(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := simulate(t, "dgx-h100")
		s.until("all are Healthy", allHealthy(8))
		s.inject(simulator.Fault{Kind: simulator.KindSlow, GPU: "5", Call: "DeviceGetFieldValues", Delay: "1900ms"})
		began := time.Now()
		_, err := s.Partitions(t.Context(), s.Snapshots().Value().GPUs[0].UUID)
		if took := time.Since(began); err != nil || took >= 1900*time.Millisecond {
			t.Errorf("%v after %v", err, took)
		}
	})
}
