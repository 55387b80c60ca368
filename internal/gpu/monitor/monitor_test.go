package monitor_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
)

// start runs a Monitor of the node until stop is called. The first look is over when it returns.
func start(t *testing.T, n *node, o monitor.Options) (m *monitor.Monitor, stop func()) {
	t.Helper()
	o.Driver, o.Policy = n, health.Default()
	m = monitor.New(o)
	ctx, cancel := context.WithCancel(withoutLog(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	synctest.Wait()
	return m, func() {
		t.Helper()
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
		if n.count(func(n *node) int { return n.opened - n.closed }) != 0 && !n.hung {
			t.Errorf("%d sessions opened, %d closed", n.opened, n.closed)
		}
	}
}

// watch runs test with a Monitor of the node, in a bubble whose time passes only while everybody
// waits.
func watch(t *testing.T, n *node, test func(t *testing.T, m *monitor.Monitor)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m, stop := start(t, n, monitor.Options{})
		test(t, m)
		stop()
	})
}

// pass lets time pass, and everything that happens in it.
func pass(d time.Duration) {
	time.Sleep(d) // the bubble's clock: nobody waits for it
	synctest.Wait()
}

// states returns the states of the GPUs of the latest Snapshot.
func states(m *monitor.Monitor) []inventory.State {
	var states []inventory.State
	for _, g := range m.Snapshots().Value().GPUs {
		states = append(states, g.Health.State)
	}
	return states
}

func wantStates(t *testing.T, m *monitor.Monitor, want ...inventory.State) {
	t.Helper()
	if got := states(m); !slices.Equal(got, want) {
		t.Fatalf("GPUs are %v, want %v", got, want)
	}
}

const (
	unknown   = inventory.Unknown
	healthy   = inventory.Healthy
	suspect   = inventory.Suspect
	unhealthy = inventory.Unhealthy
	lost      = inventory.Lost
)

func TestFirstSnapshot(t *testing.T) {
	watch(t, newNode(2), func(t *testing.T, m *monitor.Monitor) {
		if err := m.First(t.Context()); err != nil {
			t.Fatal(err)
		}
		s := m.Snapshots().Value()
		if s.Generation != 1 || s.Driver.Version != "580.95.05" || s.Stale != "" {
			t.Errorf("Snapshot %+v", s)
		}
		wantStates(t, m, healthy, healthy)
	})
}

func TestNothingNewIsNotPublished(t *testing.T) {
	n := newNode(2)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		_, changed := m.Snapshots().Latest()
		pass(10 * time.Minute)
		select {
		case <-changed:
			t.Error("a Snapshot was published though nothing changed")
		default:
		}
		if got := n.count(scans); got != 151 {
			t.Errorf("%d scans in ten minutes, want one at start and one every 4 s", got)
		}
	})
}

func TestDriverThatIsNotThere(t *testing.T) {
	n := newNode(1)
	n.openErr = inventory.ErrNoDriver
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		if err := m.First(t.Context()); !errors.Is(err, inventory.ErrNoDriver) {
			t.Fatalf("First: %v", err)
		}
		if s := m.Snapshots().Value(); s.Generation != 1 || s.Stale == "" || len(s.GPUs) != 0 {
			t.Fatalf("Snapshot %+v", s)
		}
		pass(time.Hour)
		n.set(func(n *node) { n.openErr = nil })
		pass(15 * time.Second)
		wantStates(t, m, healthy)
		if s := m.Snapshots().Value(); s.Stale != "" {
			t.Errorf("still stale: %s", s.Stale)
		}
	})
}

func TestXIDIsPublishedBeforeAnyLook(t *testing.T) {
	n := newNode(2)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		n.set(func(n *node) { n.hung = true }) // looks take their deadline from now on
		n.xid(1, 48)
		synctest.Wait()
		wantStates(t, m, healthy, unhealthy)
		if h := m.Snapshots().Value().GPUs[1].Health; h.XID != 48 || h.Remedy != inventory.RemedyReset {
			t.Errorf("verdict %+v", h)
		}
		n.xid(0, 95) // while the look hangs
		synctest.Wait()
		wantStates(t, m, unhealthy, unhealthy)
	})
}

func TestXIDBeforeTheFirstLookIsNotLost(t *testing.T) {
	n := newNode(1)
	synctest.Test(t, func(t *testing.T) {
		n.gate = make(chan struct{})
		m := monitor.New(monitor.Options{Driver: n, Policy: health.Default()})
		ctx, cancel := context.WithCancel(withoutLog(t.Context()))
		go func() { _ = m.Run(ctx) }()
		synctest.Wait()
		n.xid(0, 119)
		synctest.Wait()
		if s := m.Snapshots().Value(); s.Generation != 0 {
			t.Errorf("published before the first look: %+v", s)
		}
		close(n.gate)
		synctest.Wait()
		wantStates(t, m, unhealthy)
		cancel()
		synctest.Wait()
	})
}

func TestDecodeXIDIsSuspectUntilTheDriverAcquitsIt(t *testing.T) {
	n := newNode(1)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		n.xid(0, 154)
		synctest.Wait()
		wantStates(t, m, suspect)
		pass(1500 * time.Millisecond)
		wantStates(t, m, healthy)
	})
}

func TestSuspectWithoutAVerdictTurnsUnhealthy(t *testing.T) {
	n := newNode(1)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		n.set(func(n *node) {
			n.readings[uuid(0)] = inventory.Reading{Contact: inventory.ContactFailing, Reason: "nvmlDeviceGetName: 999"}
		})
		n.xid(0, 154)
		synctest.Wait()
		wantStates(t, m, suspect)
		pass(4900 * time.Millisecond)
		wantStates(t, m, suspect)
		pass(200 * time.Millisecond)
		wantStates(t, m, unhealthy)
		pass(70 * time.Second)
		if n.count(opened) < 2 {
			t.Error("calls fail, and no other session was tried")
		}
	})
}

func TestHealthyWithinTwoPollsOfReset(t *testing.T) {
	n := newNode(8)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		n.set(func(n *node) { n.readings[uuid(3)] = asks(inventory.RecoveryGPUReset) })
		n.xid(3, 119)
		pass(time.Minute)
		if got := states(m)[3]; got != unhealthy {
			t.Fatalf("GPU is %v", got)
		}
		n.set(func(n *node) { delete(n.readings, uuid(3)) })
		pass(10 * time.Second)
		wantStates(t, m, slices.Repeat([]inventory.State{healthy}, 8)...)
	})
}

func TestLostGPUIsFoundWithoutAnEventAndComesBack(t *testing.T) {
	n := newNode(2)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		n.set(func(n *node) {
			n.readings[uuid(0)] = inventory.Reading{Contact: inventory.ContactLost,
				Reason: "nvmlDeviceGetUUID: GPU is lost"}
		})
		pass(30 * time.Second)
		wantStates(t, m, lost, healthy)
		pass(time.Hour)
		wantStates(t, m, lost, healthy)
		if got := n.count(opened); got > 100 {
			t.Errorf("%d sessions opened within an hour for a GPU that stays lost", got)
		}
		n.set(func(n *node) { delete(n.readings, uuid(0)) })
		pass(10 * time.Second)
		wantStates(t, m, healthy, healthy)
	})
}

func TestGPUThatIsLeftOutIsTriedInNewSessions(t *testing.T) {
	n := newNode(1)
	n.leftOut = []inventory.LeftOut{{Index: 1, Reason: "GPU is lost", Retry: true}}
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		began := time.Now()
		var after []time.Duration
		for seen := n.count(opened); time.Since(began) < 2*time.Hour; pass(time.Second) {
			if now := n.count(opened); now > seen {
				seen, after = now, append(after, time.Since(began).Round(time.Minute))
			}
		}
		const m1 = time.Minute
		if want := []time.Duration{m1, 3 * m1, 8 * m1, 18 * m1, 48 * m1, 78 * m1, 108 * m1}; !slices.Equal(after,
			want) {
			t.Errorf("sessions were opened after %v, want %v", after, want)
		}
		n.set(func(n *node) { n.gpus, n.leftOut = []inventory.GPU{gpu(0), gpu(1)}, nil })
		pass(5 * time.Second)
		wantStates(t, m, healthy, healthy)
	})
}

func TestLostEventIsLookedIntoAtOnce(t *testing.T) {
	n := newNode(2)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		n.set(func(n *node) { n.readings[uuid(1)] = inventory.Reading{Contact: inventory.ContactLost} })
		n.send(inventory.Event{Kind: inventory.EventLost, GI: inventory.Unattributed, CI: inventory.Unattributed})
		pass(time.Second)
		wantStates(t, m, healthy, lost)
	})
}

func TestHungDriverIsUnknownThenWithdrawn(t *testing.T) {
	n := newNode(2)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		n.set(func(n *node) { n.hung = true })
		pass(10 * time.Second) // one poll and the deadline
		wantStates(t, m, unknown, unknown)
		s := m.Snapshots().Value()
		if !s.GPUs[0].Health.Allocatable() || s.Stale == "" {
			t.Fatalf("no grace: %+v", s)
		}
		pass(10 * time.Second)
		if h := m.Snapshots().Value().GPUs[0].Health; h.State != unknown || h.Allocatable() {
			t.Fatalf("still given to work: %+v", h)
		}
		n.set(func(n *node) { n.hung = false })
		pass(10 * time.Second)
		wantStates(t, m, healthy, healthy)
	})
}

func TestFailedScanKeepsTheGPUs(t *testing.T) {
	n := newNode(2)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		n.set(func(n *node) { n.scanErr = errors.New("nvmlDeviceGetCount: unknown error") })
		pass(time.Minute)
		s := m.Snapshots().Value()
		if len(s.GPUs) != 2 || s.Stale == "" {
			t.Fatalf("Snapshot %+v", s)
		}
		n.set(func(n *node) { n.scanErr = nil })
		pass(15 * time.Second)
		wantStates(t, m, healthy, healthy)
		if n.count(opened) < 2 {
			t.Error("the session that failed is still in use")
		}
	})
}

func TestUnpluggedGPUGoesAndTheOneThatCannotBeIdentifiedStays(t *testing.T) {
	n := newNode(3)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		n.set(func(n *node) { n.gpus = n.gpus[:2] })
		pass(30 * time.Second)
		wantStates(t, m, healthy, healthy)

		n.set(func(n *node) {
			n.gpus = []inventory.GPU{gpu(1)}
			n.leftOut = []inventory.LeftOut{{Index: 0, Reason: "GPU is lost"}}
		})
		pass(30 * time.Second)
		wantStates(t, m, lost, healthy)

		n.set(func(n *node) { n.gpus, n.leftOut = []inventory.GPU{gpu(0), gpu(1), gpu(2)}, nil })
		pass(30 * time.Second)
		wantStates(t, m, healthy, healthy, healthy)
	})
}

func TestNewDriverOrNewPlugIsEvidenceOfAReset(t *testing.T) {
	for name, renew := range map[string]func(*node){
		"driver reloaded": func(n *node) {
			n.set(func(n *node) { n.scanErr = inventory.ErrNoDriver })
			pass(time.Minute)
			n.set(func(n *node) { n.scanErr = nil })
		},
		"plugged in again": func(n *node) {
			n.set(func(n *node) { n.gpus = nil })
			pass(time.Minute)
			n.set(func(n *node) { n.gpus = []inventory.GPU{gpu(0)} })
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(1)
			watch(t, n, func(t *testing.T, m *monitor.Monitor) {
				n.xid(0, 119)
				pass(time.Minute)
				wantStates(t, m, unhealthy)
				renew(n)
				pass(time.Minute)
				wantStates(t, m, healthy)
			})
		})
	}
}

func TestWaitsForTheDriverBeginAnewWithEachOutage(t *testing.T) {
	n := newNode(1)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		for range 2 {
			n.set(func(n *node) { n.scanErr, n.openErr = inventory.ErrNoDriver, inventory.ErrNoDriver })
			_, _ = m.Look(t.Context()) // finds that the driver is gone
			n.set(func(n *node) { n.scanErr, n.openErr = nil, nil })
			pass(time.Second)
			if s := m.Snapshots().Value(); s.Stale != "" {
				t.Fatalf("still stale after a second: %s", s.Stale)
			}
		}
	})
}

func TestNewSessionIsOpenedWhenTheDriverSaysSo(t *testing.T) {
	n := newNode(1)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		n.set(func(n *node) { n.scanErr = inventory.ErrNewSession })
		n.set(func(n *node) { n.gpus = append(n.gpus, gpu(1)) })
		pass(30 * time.Second)
		n.set(func(n *node) { n.scanErr = nil })
		pass(30 * time.Second)
		wantStates(t, m, healthy, healthy)
		if n.count(opened) < 2 {
			t.Error("no new session")
		}
	})
}

func TestEventsThatKeepEndingDoNotMakeALoopHot(t *testing.T) {
	n := newNode(1)
	n.deaf = true
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		pass(time.Second)
		if got := n.count(opened); got < 2 {
			t.Errorf("%d sessions opened after the first had no more events", got)
		}
		pass(time.Hour)
		if got := n.count(opened); got > 3600/15+10 {
			t.Errorf("%d sessions opened in an hour", got)
		}
		wantStates(t, m, healthy)
	})
}

func TestStormOfEventsIsFoldedWholeAndLookedIntoRarely(t *testing.T) {
	n := newNode(1)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		before := n.count(scans)
		for range 100 {
			for range 100 {
				n.xid(0, 31)
			}
			pass(10 * time.Millisecond)
		}
		if got := n.count(scans) - before; got > 6 {
			t.Errorf("%d scans for a second of events", got)
		}
		wantStates(t, m, healthy)
	})
}

func TestMIGDeviceThatIsStruckAlone(t *testing.T) {
	n := newNode(2)
	n.gpus[0].MIG = inventory.MIGEnabled
	n.gpus[0].MIGDevices = []inventory.MIGDevice{
		{UUID: "MIG-1", Index: 0, GI: 1, CI: 0}, {UUID: "MIG-2", Index: 1, GI: 2, CI: 0},
		{UUID: "MIG-3", Index: 2, GI: 2, CI: 1},
	}
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		want := func(parent inventory.State, mig ...inventory.State) {
			t.Helper()
			g := m.Snapshots().Value().GPUs[0]
			var got []inventory.State
			for _, d := range g.MIGDevices {
				got = append(got, d.Health.State)
			}
			if g.Health.State != parent || !slices.Equal(got, mig) {
				t.Fatalf("GPU %v, MIG devices %v, want %v, %v", g.Health.State, got, parent, mig)
			}
		}
		n.set(func(n *node) { n.readings[uuid(0)] = asks(inventory.RecoveryNone) })
		n.send(inventory.Event{Kind: inventory.EventXID, UUID: uuid(0), XID: 119, GI: 2, CI: 1})
		synctest.Wait()
		want(healthy, healthy, healthy, unhealthy)
		n.send(inventory.Event{Kind: inventory.EventXID, UUID: uuid(0), XID: 119, GI: 2, CI: inventory.Unattributed})
		synctest.Wait()
		want(healthy, healthy, unhealthy, unhealthy)

		// A MIG device that is made while its event is on the way.
		n.set(func(n *node) {
			n.gpus[0].MIGDevices = append(slices.Clone(n.gpus[0].MIGDevices),
				inventory.MIGDevice{UUID: "MIG-4", Index: 3, GI: 4, CI: 0})
		})
		n.send(inventory.Event{Kind: inventory.EventXID, UUID: uuid(0), XID: 119, GI: 4, CI: 0})
		pass(time.Second)
		want(healthy, healthy, unhealthy, unhealthy, unhealthy)

		n.xid(0, 95)
		synctest.Wait()
		want(unhealthy, healthy, unhealthy, unhealthy, unhealthy)
	})
}

func TestInstanceOfAGPUWithoutMIGDevicesIsTheGPU(t *testing.T) {
	n := newNode(1)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		n.send(inventory.Event{Kind: inventory.EventXID, UUID: uuid(0), XID: 119, GI: 0, CI: 0})
		pass(time.Second) // a look has to tell that there is no such MIG device
		wantStates(t, m, unhealthy)
	})
}

func TestNodeWideVerdictIsOneReason(t *testing.T) {
	n := newNode(8)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		n.set(func(n *node) {
			for i := range 8 {
				n.readings[uuid(i)] = asks(inventory.RecoveryNodeReboot)
			}
		})
		pass(30 * time.Second)
		s := m.Snapshots().Value()
		const want = "the driver asks for a restart of the node on all 8 GPUs: restart the node"
		for _, g := range s.GPUs {
			if g.Health.State != unhealthy || g.Health.Reason != want {
				t.Errorf("%v: %s", g.Health.State, g.Health.Reason)
			}
		}
		if s.Generation != 2 {
			t.Errorf("generation %d, want all in one Snapshot", s.Generation)
		}
	})
}

func TestLookIsNewAndHasADeadline(t *testing.T) {
	n := newNode(1)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		n.set(func(n *node) { n.readings[uuid(0)] = asks(inventory.RecoveryGPUReset) })
		s, err := m.Look(t.Context())
		if err != nil || s.GPUs[0].Health.State != unhealthy {
			t.Fatalf("Look: %+v, %v", s, err)
		}
		n.set(func(n *node) { n.hung = true })
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := m.Look(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Look of a hung driver: %v", err)
		}
		if _, err := m.Look(t.Context()); !errors.Is(err, inventory.ErrNoAnswer) {
			t.Errorf("Look that fails: %v", err)
		}
	})
}
