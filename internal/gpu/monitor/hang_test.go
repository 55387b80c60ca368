package monitor_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

func hang(gpu, call string) simulator.Fault {
	return simulator.Fault{Kind: simulator.KindHang, GPU: gpu, Call: call}
}

// others fails unless all GPUs but those given are Healthy for a time, and no look fails.
func (s simulation) others(d time.Duration, but ...int) {
	s.t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); pass(100 * time.Millisecond) {
		snapshot := s.Snapshots().Value()
		if snapshot.Stale != "" {
			s.t.Fatalf("the Snapshot is stale: %s", snapshot.Stale)
		}
		for _, g := range snapshot.GPUs {
			excepted := false
			for _, index := range but {
				excepted = excepted || g.Index == index
			}
			if !excepted && g.Health.State != healthy {
				s.t.Fatalf("GPU %d is %+v", g.Index, g.Health)
			}
		}
	}
}

// TestGPUThatHangs: within 15 s of the moment from which its calls hang it alone is Unhealthy, with
// the call named; so are two that hang at once. The others are judged meanwhile. Each is Healthy
// again once its call has returned.
func TestGPUThatHangs(t *testing.T) {
	tests := []struct {
		call string
		gpus []int
	}{
		{"DeviceGetMemoryInfo", []int{3}},
		{"DeviceGetFieldValues", []int{3}},
		{"DeviceGetHandleByIndex", []int{3}},
		{"DeviceGetMemoryInfo", []int{3, 5}},
		{"DeviceGetFieldValues", []int{0, 7}},
	}
	for _, tt := range tests {
		for _, after := range []time.Duration{0, time.Second, 1999 * time.Millisecond, 3 * time.Second,
			3999 * time.Millisecond} {
			synctest.Test(t, func(t *testing.T) {
				s := simulate(t, "dgx-h100")
				pass(time.Minute + after)
				start := time.Now()
				for _, gpu := range tt.gpus {
					s.inject(hang(strconv.Itoa(gpu), tt.call))
				}
				for _, gpu := range tt.gpus {
					s.until("the GPU Unhealthy", state(gpu, unhealthy))
					if took := time.Since(start); took > 15*time.Second {
						t.Errorf("%s of GPUs %v hangs: GPU %d was Unhealthy after %v", tt.call, tt.gpus, gpu, took)
					}
					if h := s.Snapshots().Value().GPUs[gpu].Health; !strings.Contains(h.Reason, "nvml"+tt.call) {
						t.Errorf("the reason names no call: %+v", h)
					}
				}
				s.others(time.Minute, tt.gpus...)
				s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "4", XID: 119})
				synctest.Wait()
				if h := s.Snapshots().Value().GPUs[4].Health; h.XID != 119 {
					t.Errorf("an XID of another GPU was not published at once: %+v", h)
				}
				s.inject(simulator.Fault{Kind: simulator.KindRecoveryAction, GPU: "6", Action: "reset"})
				pass(5 * time.Second)
				if !state(6, unhealthy)(s.Snapshots().Value()) {
					t.Error("what only a reading shows of another GPU was not found")
				}
				s.inject(simulator.Fault{Kind: simulator.KindRestore})
				start = time.Now()
				for _, gpu := range tt.gpus {
					s.until("the GPU Healthy", state(gpu, healthy))
				}
				if took := time.Since(start); took > time.Minute {
					t.Errorf("the GPUs were Healthy after %v", took)
				}
			})
		}
	}
}

// TestManyGPUsThatHang: each is judged by itself within a minute, and the others are judged by what
// they answer.
func TestManyGPUsThatHang(t *testing.T) {
	for _, others := range [][]int{{0, 1, 2, 4, 6}, {6}, nil} {
		synctest.Test(t, func(t *testing.T) {
			s := simulate(t, "dgx-h100")
			var hanging []int
			for gpu := range 8 {
				if !slices.Contains(others, gpu) {
					hanging = append(hanging, gpu)
					s.inject(hang(strconv.Itoa(gpu), ""))
				}
			}
			start := time.Now()
			s.until("all that hang Unhealthy", func(n inventory.Snapshot) bool {
				for _, gpu := range hanging {
					if !state(gpu, unhealthy)(n) {
						return false
					}
				}
				return true
			})
			if took := time.Since(start); took > 20*time.Second {
				t.Errorf("%d GPUs were Unhealthy after %v", len(hanging), took)
			}
			s.others(10*time.Minute, hanging...)
			if len(others) > 0 {
				s.inject(simulator.Fault{Kind: simulator.KindRecoveryAction, GPU: "6", Action: "reset"})
				pass(5 * time.Second)
				if !state(6, unhealthy)(s.Snapshots().Value()) {
					t.Error("what only a reading shows of another GPU was not found")
				}
			}
			s.inject(hang("", "EventSetWait"))
			s.others(time.Minute, append(hanging, 6)...)
			s.inject(simulator.Fault{Kind: simulator.KindRestore})
			s.until("all are Healthy", allHealthy(8))
		})
	}
}

// TestAGPUThatIsLostForAWhile: it is Healthy after the usual passes when its handle works again,
// without another session.
func TestAGPUThatIsLostForAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := simulate(t, "dgx-h100")
		pass(time.Minute)
		s.inject(simulator.Fault{Kind: simulator.KindFail, GPU: "3", Return: "GPU_IS_LOST"})
		s.until("the GPU Lost", state(3, lost))
		pass(2 * time.Second)
		s.inject(simulator.Fault{Kind: simulator.KindRestore})
		s.inject(hang("", "Init")) // no session can be opened
		start := time.Now()
		s.until("the GPU Healthy", state(3, healthy))
		if took := time.Since(start); took > 9*time.Second {
			t.Errorf("the GPU was Healthy after %v", took)
		}
	})
}

// TestWaitThatHangs: looks go on, faults are found by them, and Quiesce says what keeps the driver
// from being released.
func TestWaitThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := simulate(t, "dgx-h100")
		s.inject(hang("", "EventSetWait"))
		s.others(10 * time.Minute)
		s.inject(simulator.Fault{Kind: simulator.KindRecoveryAction, GPU: "2", Action: "reset"})
		s.until("GPU 2 Unhealthy", state(2, unhealthy))
		err := s.Quiesce(t.Context(), true)
		if !errors.Is(err, inventory.ErrNoAnswer) || !strings.Contains(err.Error(), "nvmlEventSetWait") {
			t.Errorf("Quiesce: %v", err)
		}
		if err := s.Resume(t.Context()); err != nil {
			t.Errorf("Resume: %v", err)
		}
		s.others(time.Minute, 2)
		s.inject(simulator.Fault{Kind: simulator.KindRestore})
		pass(10 * time.Second)
		s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "7", XID: 119})
		synctest.Wait()
		if !state(7, unhealthy)(s.Snapshots().Value()) {
			t.Error("after the hang an XID was not published at once")
		}
	})
}

// TestOpenThatHangs: a session that is still being opened may come yet. Until it has come and is
// closed, the driver is not released.
func TestOpenThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := simulate(t, "dgx-h100")
		if err := s.Quiesce(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		s.inject(hang("", "Init"))
		if err := s.Resume(t.Context()); !errors.Is(err, inventory.ErrNoAnswer) {
			t.Errorf("Resume while a session is opened: %v", err)
		}
		pass(time.Minute)
		if err := s.Quiesce(t.Context(), true); !errors.Is(err, inventory.ErrNoAnswer) ||
			!strings.Contains(err.Error(), "nvmlInit") {
			t.Errorf("Quiesce while a session is opened: %v", err)
		}
		s.inject(simulator.Fault{Kind: simulator.KindRestore})
		synctest.Wait() // the session comes, and is closed
		if err := s.Quiesce(t.Context(), true); err != nil || s.node.Stats().Sessions != 0 {
			t.Errorf("Quiesce after that: %v; %d sessions are open", err, s.node.Stats().Sessions)
		}
	})
}

// TestSlowDriver: with 20 ms a call all GPUs are there within five seconds, Healthy throughout,
// with their links soon.
func TestSlowDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, err := simulator.Load("dgx-h100")
		if err != nil {
			t.Fatal(err)
		}
		p.Faults = []simulator.Fault{{Kind: simulator.KindSlow, Delay: "20ms"}}
		start := time.Now()
		s := simulateProfile(t, p)
		if took := time.Since(start); took > 5*time.Second || len(s.Snapshots().Value().GPUs) != 8 {
			t.Errorf("%d GPUs after %v", len(s.Snapshots().Value().GPUs), took)
		}
		s.others(time.Minute)
		for _, g := range s.Snapshots().Value().GPUs {
			if len(g.Links) != 7 || g.Links[0].NVLinks != 18 {
				t.Errorf("GPU %d has the links %+v", g.Index, g.Links)
			}
		}
		s.others(time.Hour)
	})
}

// TestGPUsThatHangFromTheStart: the others are there within seconds.
func TestGPUsThatHangFromTheStart(t *testing.T) {
	for _, gpus := range [][]int{{3}, {0, 1}, {6, 7}, {1, 2, 3, 4, 5, 6, 7}} {
		synctest.Test(t, func(t *testing.T) {
			p, err := simulator.Load("dgx-h100")
			if err != nil {
				t.Fatal(err)
			}
			for _, gpu := range gpus {
				p.Faults = append(p.Faults, hang(strconv.Itoa(gpu), "DeviceGetHandleByIndex"))
			}
			start := time.Now()
			s := simulateProfile(t, p)
			if took := time.Since(start); took > 8*time.Second || len(s.Snapshots().Value().GPUs) != 8-len(gpus) {
				t.Errorf("%d GPUs after %v", len(s.Snapshots().Value().GPUs), took)
			}
			s.others(10 * time.Minute)
			status, err := s.Status(t.Context())
			if err != nil || len(status.Retries) != len(gpus) || status.Retries[0].Index != gpus[0] ||
				status.Retries[0].Next.IsZero() {
				t.Errorf("retries %+v, %v", status.Retries, err)
			}
			s.inject(simulator.Fault{Kind: simulator.KindRestore})
			s.until("all are Healthy", allHealthy(8))
		})
	}
}

// TestNoSessionIsOpenedAtTheCostOfOtherGPUs: while a GPU has no persistence mode none is opened for
// another one that is lost, unless the policy wants it.
func TestNoSessionIsOpenedAtTheCostOfOtherGPUs(t *testing.T) {
	kept := good
	kept.Persistence = inventory.Known(false)
	for name, allow := range map[string]func(*testing.T, *node, *monitor.Monitor){
		"a GPU forgets nothing": func(_ *testing.T, n *node, _ *monitor.Monitor) {
			keeps := good
			keeps.Persistence = inventory.Known(true)
			n.set(func(n *node) { n.readings[uuid(1)] = keeps })
		},
		"the policy": func(t *testing.T, _ *node, m *monitor.Monitor) {
			policy := health.Default()
			policy.ReopenAlways = true
			if err := m.Apply(t.Context(), policy); err != nil {
				t.Fatal(err)
			}
		},
	} {
		n := newNode(2)
		n.readings[uuid(1)] = kept
		watch(t, n, func(t *testing.T, m *monitor.Monitor) {
			n.set(func(n *node) {
				n.readings[uuid(0)] = inventory.Reading{Contact: inventory.ContactLost, Reason: "GPU is lost"}
			})
			pass(3 * time.Hour)
			if opened, retries := n.count(opened), n.count(func(n *node) int { return n.retries }); opened != 1 ||
				retries < 5 || retries > 10 {
				t.Errorf("%d sessions were opened, and the GPU was asked %d times, want 1 and 5 to 10", opened, retries)
			}
			s, err := m.Status(t.Context())
			if err != nil || len(s.Retries) != 1 || s.Retries[0].Next.Before(time.Now()) ||
				!strings.Contains(s.Retries[0].Reason, "persistence mode") {
				t.Errorf("retries %+v, %v", s.Retries, err)
			}
			allow(t, n, m)
			pass(31 * time.Minute)
			if n.count(opened) < 2 {
				t.Errorf("%s: no session was opened", name)
			}
		})
	}
}

// TestRequestsAreAlwaysAnswered makes every two requests at once, one after the other, and a short
// time apart, from every state, of a driver that is quick, slow or hangs: each is answered, and in
// the end the driver is as the last of them wants it.
func TestRequestsAreAlwaysAnswered(t *testing.T) {
	type request struct {
		name  string
		quiet int // the driver is released, 1, or is gone back to, -1, or neither
		do    func(context.Context, *monitor.Monitor) error
	}
	requests := []request{
		{"quiesce", 1, func(ctx context.Context, m *monitor.Monitor) error { return m.Quiesce(ctx, false) }},
		{"quiesce --allocate", 1, func(ctx context.Context, m *monitor.Monitor) error { return m.Quiesce(ctx, true) }},
		{"resume", -1, func(ctx context.Context, m *monitor.Monitor) error { return m.Resume(ctx) }},
		{"health clear", 0, func(ctx context.Context, m *monitor.Monitor) error { return m.Clear(ctx, uuid(0)) }},
		{"look", 0, func(ctx context.Context, m *monitor.Monitor) error { _, err := m.Look(ctx); return err }},
		{"status", 0, func(ctx context.Context, m *monitor.Monitor) error { _, err := m.Status(ctx); return err }},
		{"driver call", 0, func(ctx context.Context, m *monitor.Monitor) error {
			_, err := m.Processes(ctx, []string{uuid(0)})
			return err
		}},
	}
	drivers := map[string]func(*node){
		"quick": func(*node) {}, "slow": func(n *node) { n.delay = 50 * time.Millisecond },
		"hanging": func(n *node) { n.hung = true },
	}
	for name, driver := range drivers {
		for _, before := range []string{"looked at", "released"} {
			for _, first := range requests {
				for _, second := range requests {
					for _, apart := range []time.Duration{0, time.Millisecond, 60 * time.Millisecond,
						10 * time.Second} {
						n := newNode(1)
						watch(t, n, func(t *testing.T, m *monitor.Monitor) {
							what := name + " driver, " + before + ": " + first.name + ", after " + apart.String() +
								" " + second.name
							pass(time.Second)
							quiet := 0
							if before == "released" {
								if err := m.Quiesce(t.Context(), true); err != nil {
									t.Fatal(err)
								}
								quiet = 1
							}
							n.set(driver)
							answers := make(chan error, 2)
							for i, r := range []request{first, second} {
								if i > 0 {
									pass(apart)
								}
								go func() { answers <- r.do(t.Context(), m) }()
								synctest.Wait()
								if r.quiet != 0 {
									quiet = r.quiet
								}
							}
							limit := time.After(30 * time.Second)
							for range 2 {
								select {
								case err := <-answers:
									if err != nil && name != "hanging" && !errors.Is(err, monitor.ErrQuiesced) &&
										!errors.Is(err, monitor.ErrResumed) {
										t.Errorf("%s: %v", what, err)
									}
								case <-limit:
									t.Fatalf("%s: no answer within 30 s", what)
								}
							}
							n.set(func(n *node) { n.hung, n.delay = false, 0 })
							pass(time.Minute)
							if s, err := m.Status(t.Context()); err != nil || s.Quiesced.IsZero() == (quiet > 0) {
								t.Errorf("%s: quiet %v, %v", what, !s.Quiesced.IsZero(), err)
							}
							if open := n.count(opened) > n.count(closed); open == (quiet > 0) {
								t.Errorf("%s: a session is open: %v", what, open)
							}
							if quiet > 0 {
								_ = m.Resume(t.Context())
							}
							pass(time.Minute)
							wantStates(t, m, healthy)
						})
						if t.Failed() {
							return
						}
					}
				}
			}
		}
	}
}

// TestLimitsOfSeveralGPUs: each suspicion ends at its own time, whichever GPU comes first.
func TestLimitsOfSeveralGPUs(t *testing.T) {
	for _, order := range [][2]int{{0, 2}, {2, 0}} {
		n := newNode(3)
		watch(t, n, func(t *testing.T, m *monitor.Monitor) {
			failing := inventory.Reading{Contact: inventory.ContactFailing, Reason: "nvmlDeviceGetName: 999"}
			start := time.Now()
			for i, gpu := range order {
				n.set(func(n *node) {
					n.readings[uuid(gpu)] = failing
					n.delay = time.Duration(i) * time.Hour // no look ends when the first suspicion does
				})
				n.xid(gpu, 154)
				pass([]time.Duration{4 * time.Second, 1100 * time.Millisecond}[i])
			}
			for i, gpu := range order {
				h := m.Snapshots().Value().GPUs[gpu].Health
				if want := []inventory.State{unhealthy, suspect}[i]; h.State != want {
					t.Errorf("after %v GPU %d is %v, want %v", time.Since(start), gpu, h.State, want)
				}
			}
			n.set(func(n *node) { n.delay = 0 })
			pass(4400 * time.Millisecond)
			if h := m.Snapshots().Value().GPUs[order[1]].Health; h.State != unhealthy {
				t.Errorf("after %v GPU %d is %v", time.Since(start), order[1], h.State)
			}
			if h := m.Snapshots().Value().GPUs[1].Health; h.State != healthy {
				t.Errorf("GPU 1 is %v", h.State)
			}
		})
	}
}

// TestPublishedSnapshotIsNeverAltered by what happens later.
func TestPublishedSnapshotIsNeverAltered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := simulate(t, "a100-mig-mixed")
		type kept struct {
			snapshot inventory.Snapshot
			text     string
		}
		var all []kept
		keep := func() {
			snapshot := s.Snapshots().Value()
			all = append(all, kept{snapshot, fmt.Sprintf("%+v", snapshot)})
		}
		keep()
		for _, f := range []simulator.Fault{
			{Kind: simulator.KindXID, GPU: "6:1", XID: 48}, {Kind: simulator.KindMIG, GPU: "2",
				Profiles: []string{"7g.80gb"}},
			{Kind: simulator.KindXID, GPU: "0", XID: 46}, {Kind: simulator.KindXID, GPU: "1", XID: 46},
			{Kind: simulator.KindLost, GPU: "1"}, {Kind: simulator.KindRemove, GPU: "7"}, {Kind: simulator.KindNVLink,
				GPU: "0"},
			{Kind: simulator.KindXID, GPU: "0", XID: 74}, {Kind: simulator.KindHang, GPU: "3"},
			{Kind: simulator.KindRestore},
			{Kind: simulator.KindAdd, GPU: "7"},
		} {
			s.inject(f)
			synctest.Wait() // what an event says is published, and no look since
			keep()
			if f.Kind == simulator.KindMIG {
				continue // the next event comes before another look
			}
			pass(time.Minute)
			keep()
		}
		for i, k := range all {
			if now := fmt.Sprintf("%+v", k.snapshot); now != k.text {
				t.Errorf("Snapshot %d was\n%s\nand is\n%s", i, k.text, now)
			}
		}
	})
}

// TestALostGPUBesideOneThatHangs: a lost GPU wants another session, which there cannot be while a
// call hangs. The other GPUs are read in time all the same.
func TestALostGPUBesideOneThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := simulate(t, "dgx-h100")
		pass(time.Minute)
		s.inject(hang("5", "DeviceGetFieldValues"))
		s.inject(simulator.Fault{Kind: simulator.KindECC, GPU: "7", Count: 2})
		pass(1800 * time.Millisecond)
		s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "4", XID: 79})
		s.until("GPU 7 Suspect", state(7, inventory.Suspect))
		for end := time.Now().Add(time.Minute); time.Now().Before(end); pass(100 * time.Millisecond) {
			if h := s.Snapshots().Value().GPUs[7].Health; h.State != inventory.Suspect && h.State != healthy {
				t.Fatalf("GPU 7, which the driver acquits, is %+v", h)
			}
		}
		if !state(7, healthy)(s.Snapshots().Value()) {
			t.Error("GPU 7 is not Healthy after a minute")
		}
	})
}

// TestEventsThatEndWhileACallHangs: another session, which brings events again, is opened when the
// call has returned.
func TestEventsThatEndWhileACallHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := simulate(t, "dgx-h100")
		pass(time.Minute)
		s.inject(hang("5", "DeviceGetFieldValues"))
		pass(10 * time.Second)
		s.inject(simulator.Fault{Kind: simulator.KindFail, Call: "EventSetWait", Return: "UNKNOWN"})
		s.others(time.Minute, 5)
		s.inject(simulator.Fault{Kind: simulator.KindRestore})
		pass(5 * time.Minute)
		s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "0", XID: 46})
		synctest.Wait()
		if h := s.Snapshots().Value().GPUs[0].Health; h.State != unhealthy {
			t.Errorf("an XID five minutes after all calls return is not published: %+v", h)
		}
	})
}
