package monitor_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
)

// TestResumeThatOvertakesQuiesce: the driver is not released, and the one who asked for that is
// told.
func TestResumeThatOvertakesQuiesce(t *testing.T) {
	n := newNode(1)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		gate := make(chan struct{})
		n.set(func(n *node) { n.gate = gate })
		released, resumed := make(chan error, 1), make(chan error, 1)
		go func() { _, _ = m.Look(t.Context()) }()
		synctest.Wait()
		go func() { released <- m.Quiesce(t.Context(), false) }()
		synctest.Wait()
		go func() { resumed <- m.Resume(t.Context()) }()
		synctest.Wait()
		close(gate)
		if err := <-released; !errors.Is(err, monitor.ErrResumed) {
			t.Errorf("Quiesce: %v, want ErrResumed", err)
		}
		if err := <-resumed; err != nil {
			t.Errorf("Resume: %v", err)
		}
		wantStates(t, m, healthy)
		if n.count(closed) > 0 {
			t.Error("the driver was released")
		}
	})
}

// slowMetrics keep the loop from going on at an XID until free is closed.
type slowMetrics struct{ free chan struct{} }

func (m slowMetrics) XID(string, uint64, time.Time) { <-m.free }

func (slowMetrics) Recovered(string, inventory.Remedy) {}

// TestReleaseWhileTheLoopDoesNotRespond: Quiesce and Resume fail, and are carried out as soon as
// the loop responds; of several calls, the last one.
func TestReleaseWhileTheLoopDoesNotRespond(t *testing.T) {
	for _, released := range []bool{false, true} {
		n := newNode(1)
		synctest.Test(t, func(t *testing.T) {
			slow := slowMetrics{make(chan struct{})}
			m, stop := start(t, n, monitor.Options{Metrics: slow})
			request := func(release bool) error {
				if release {
					return m.Quiesce(t.Context(), false)
				}
				return m.Resume(t.Context())
			}
			check(t, request(released))
			xid := inventory.Event{Kind: inventory.EventXID, UUID: uuid(0), XID: 13, GI: inventory.Unattributed,
				CI: inventory.Unattributed}
			check(t, m.Deliver(t.Context(), xid))
			for _, release := range []bool{released, !released} {
				if err := request(release); err == nil {
					t.Error("no error, although the loop does not respond")
				}
			}
			close(slow.free)
			pass(time.Minute)
			if s, err := m.Status(t.Context()); err != nil || s.Quiesced.IsZero() != released {
				t.Errorf("released since %v (%v), want that: %v", s.Quiesced, err, !released)
			}
			if current := n.count(func(n *node) int { return n.opened - n.closed }); current == 0 != !released {
				t.Errorf("%d sessions, and the driver is to be released: %v", current, !released)
			}
			stop()
		})
	}
}

// TestQuiesceAfterResumeWhileTheLoopDoesNotRespond: the Quiesce is a new one, with a time of its own.
func TestQuiesceAfterResumeWhileTheLoopDoesNotRespond(t *testing.T) {
	n := newNode(1)
	synctest.Test(t, func(t *testing.T) {
		slow := slowMetrics{make(chan struct{})}
		m, stop := start(t, n, monitor.Options{Metrics: slow})
		check(t, m.Quiesce(t.Context(), false))
		xid := inventory.Event{Kind: inventory.EventXID, UUID: uuid(0), XID: 13, GI: inventory.Unattributed,
			CI: inventory.Unattributed}
		check(t, m.Deliver(t.Context(), xid))
		resumed := time.Now()
		if m.Resume(t.Context()) == nil || m.Quiesce(t.Context(), false) == nil {
			t.Error("no error, although the loop does not respond")
		}
		close(slow.free)
		pass(time.Minute)
		if s, err := m.Status(t.Context()); err != nil || !s.Quiesced.After(resumed) {
			t.Errorf("released since %v (%v), want a time after %v", s.Quiesced, err, resumed)
		}
		if current := n.count(func(n *node) int { return n.opened - n.closed }); current != 0 {
			t.Errorf("%d sessions, although the driver is released", current)
		}
		stop()
	})
}

// TestReleaseOfAnUnknownTime: the driver is left alone, since now.
func TestReleaseOfAnUnknownTime(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "quiesce.json"), []byte(`{"version": 1}`), 0o600); err != nil {
		t.Fatal(err)
	}
	n := newNode(1)
	synctest.Test(t, func(t *testing.T) {
		m, stop := start(t, n, monitor.Options{StateDir: dir})
		if s, err := m.Status(t.Context()); err != nil || !s.Quiesced.Equal(time.Now()) {
			t.Errorf("quiesced since %v, %v", s.Quiesced, err)
		}
		pass(time.Hour)
		if n.count(opened) > 0 {
			t.Error("the driver was not left alone")
		}
		stop()
	})
}

// TestFaultsOfMIGDevicesOutliveTheProcess: and those of the GPU's other MIG devices do not come
// from them.
func TestFaultsOfMIGDevicesOutliveTheProcess(t *testing.T) {
	dir := t.TempDir()
	n := newNode(1)
	n.gpus[0].MIG = inventory.MIGEnabled
	n.gpus[0].MIGDevices = []inventory.MIGDevice{{UUID: "MIG-1", GI: 1}, {UUID: "MIG-2", Index: 1, GI: 2}}
	n.readings[uuid(0)] = asks(inventory.RecoveryNone)
	synctest.Test(t, func(t *testing.T) {
		for process := range 2 {
			m, stop := start(t, n, monitor.Options{StateDir: dir, BootID: "1"})
			if process == 0 {
				n.send(inventory.Event{Kind: inventory.EventXID, UUID: uuid(0), XID: 119, GI: 2})
			}
			pass(time.Second)
			g := m.Snapshots().Value().GPUs[0]
			if g.Health.State != healthy || g.MIGDevices[0].Health.State != healthy ||
				g.MIGDevices[1].Health.State != unhealthy {
				t.Errorf("%+v, want the second MIG device to be Unhealthy", g)
			}
			stop()
		}
	})
}

// TestAGPUThatDoesNotAnswerInAMinute: it is not Healthy although each of its calls returns, and the
// time in which the driver is released does not count.
func TestAGPUThatDoesNotAnswerInAMinute(t *testing.T) {
	n := newNode(2)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		busy := func() error {
			return &inventory.Stall{Call: inventory.Call{Function: "nvmlDeviceGetName",
				Since: time.Now().Add(-2 * time.Second)}}
		}
		n.set(func(n *node) { n.busy = map[string]func() error{uuid(1): busy} })
		pass(30 * time.Second)
		wantStates(t, m, healthy, suspect)
		if err := m.Quiesce(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		pass(10 * time.Minute)
		if err := m.Resume(t.Context()); err != nil {
			t.Fatal(err)
		}
		pass(50 * time.Second)
		wantStates(t, m, healthy, suspect)
		pass(15 * time.Second)
		wantStates(t, m, healthy, unhealthy)
		n.set(func(n *node) { n.busy = nil })
		pass(time.Minute)
		wantStates(t, m, healthy, healthy)
	})
}

// TestAGPUThatCannotBeAsked: its last verdict holds for a while, and then it is not known how it
// is.
func TestAGPUThatCannotBeAsked(t *testing.T) {
	n := newNode(2)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		n.set(func(n *node) { n.readErr[uuid(1)] = inventory.ErrNoAnswer })
		if _, err := m.Look(t.Context()); err != nil {
			t.Fatal(err)
		}
		if !m.Snapshots().Value().GPUs[1].Health.Allocatable() {
			t.Error("it gets no new work at once")
		}
		pass(time.Minute)
		wantStates(t, m, healthy, unknown)
		if h := m.Snapshots().Value().GPUs[1].Health; h.Allocatable() ||
			!strings.Contains(h.Reason, "does not answer") {
			t.Errorf("%+v", h)
		}
		n.set(func(n *node) { delete(n.readErr, uuid(1)) })
		pass(time.Minute)
		wantStates(t, m, healthy, healthy)
	})
}

// TestOnlyGPUsInTroubleWaitForARetry: one that is lost, one that hangs, and none that is Unhealthy
// by an event.
func TestOnlyGPUsInTroubleWaitForARetry(t *testing.T) {
	n := newNode(4)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		n.set(func(n *node) {
			n.readings[uuid(0)] = inventory.Reading{Contact: inventory.ContactLost, Reason: "it fell off the bus"}
			n.readErr[uuid(1)] = &inventory.Stall{Call: inventory.Call{Function: "nvmlDeviceGetName",
				Since: time.Now()}}
		})
		n.xid(2, 119)
		pass(30 * time.Second)
		s, err := m.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		wantStates(t, m, lost, unhealthy, unhealthy, healthy)
		if r := s.Retries; len(r) != 2 || r[0].Index != 0 || r[1].Index != 1 ||
			!strings.Contains(r[0].Reason, "fell off") || !strings.Contains(r[1].Reason, "nvmlDeviceGetName") {
			t.Errorf("left alone for a while: %+v", r)
		}
	})
}

// TestSamplesOfAGPUThatDoesNotAnswer: the last ones stay, and the node is looked at once.
func TestSamplesOfAGPUThatDoesNotAnswer(t *testing.T) {
	n := newNode(2)
	synctest.Test(t, func(t *testing.T) {
		m, stop := start(t, n, monitor.Options{Poll: time.Hour})
		how := monitor.Sampling{Every: time.Second}
		if err := m.SetSampling(t.Context(), how); err != nil {
			t.Fatal(err)
		}
		pass(10 * time.Second)
		before := m.Samples().Value()
		n.set(func(n *node) { n.sampleErr = map[string]error{uuid(1): inventory.ErrNoAnswer} })
		scanned := n.count(scans)
		pass(10 * time.Second)
		if got := n.count(scans); got != scanned+1 { // once, although the next samples fail, too
			t.Errorf("%d looks, want 1", got-scanned)
		}
		if s := m.Samples().Value(); len(s) != 2 || s[0].Taken.Equal(before[0].Taken) ||
			!s[1].Taken.Equal(before[1].Taken) {
			t.Errorf("samples %+v, before %+v", s, before)
		}
		stop()
	})
}

// TestSamplingThatIsSetAgainKeepsItsPace: only another one begins at once.
func TestSamplingThatIsSetAgainKeepsItsPace(t *testing.T) {
	watch(t, newNode(1), func(t *testing.T, m *monitor.Monitor) {
		for _, tt := range []struct{ every, pass, age time.Duration }{
			{time.Minute, 90 * time.Second, 29 * time.Second}, {time.Minute, 10 * time.Second, 39 * time.Second},
			{time.Hour, 10 * time.Second, 9 * time.Second},
		} {
			if err := m.SetSampling(t.Context(), monitor.Sampling{Every: tt.every}); err != nil {
				t.Fatal(err)
			}
			pass(tt.pass)
			if age := time.Since(m.Samples().Value()[0].Taken); age != tt.age {
				t.Errorf("every %v, %v later: the sample is %v old, want %v", tt.every, tt.pass, age, tt.age)
			}
		}
	})
}

// TestSamplingThatIsSwitchedOffWhileGPUsAreMeasured: nothing is published afterwards.
func TestSamplingThatIsSwitchedOffWhileGPUsAreMeasured(t *testing.T) {
	n := newNode(2)
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		if err := m.SetSampling(t.Context(), monitor.Sampling{Every: 10 * time.Second}); err != nil {
			t.Fatal(err)
		}
		pass(500 * time.Millisecond)
		n.set(func(n *node) { n.delay = 400 * time.Millisecond })
		pass(600 * time.Millisecond) // a GPU is being measured
		if err := m.SetSampling(t.Context(), monitor.Sampling{}); err != nil {
			t.Fatal(err)
		}
		pass(time.Minute)
		if got := m.Samples().Value(); got != nil {
			t.Errorf("%d samples", len(got))
		}
	})
}

// TestTheMonitorsLoopComesRound: also while the driver hangs; not before Run and not after it.
func TestTheMonitorsLoopComesRound(t *testing.T) {
	n := newNode(1)
	synctest.Test(t, func(t *testing.T) {
		alive := func(m *monitor.Monitor) error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			return m.Alive(ctx)
		}
		if err := alive(monitor.New(monitor.Options{Driver: n, Policy: health.Default()})); err == nil {
			t.Error("the loop comes round before it begins")
		}
		ended, end := context.WithCancel(t.Context())
		end()
		if err := monitor.New(monitor.Options{Driver: n}).First(ended); !errors.Is(err, context.Canceled) {
			t.Errorf("First: %v, want the end of the context", err)
		}
		m, stop := start(t, n, monitor.Options{})
		n.set(func(n *node) { n.hung = true })
		pass(time.Minute)
		if err := alive(m); err != nil {
			t.Errorf("while the driver hangs: %v", err)
		}
		n.set(func(n *node) { n.hung = false })
		pass(time.Minute)
		stop()
		if err := alive(m); err == nil {
			t.Error("the loop comes round after it has ended")
		}
	})
}
