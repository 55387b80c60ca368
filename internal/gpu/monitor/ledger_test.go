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

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
)

// ledgerOf returns what is in the ledger's file, empty if there is none.
func ledgerOf(t *testing.T, dir string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "faults.json"))
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return string(text)
}

func TestFaultsOutliveTheProcess(t *testing.T) {
	tests := map[string]struct {
		xid         uint64
		boot        string // of the second process; the first one's is "1"
		wantAfter   inventory.State
		wantWritten bool // after the second process
	}{
		"a reset is still needed":              {119, "1", unhealthy, true},
		"a reset was done by the restart":      {119, "2", healthy, false},
		"an unknown boot ID ends no fault":     {119, "", unhealthy, true},
		"hardware is not fixed by the restart": {64, "2", unhealthy, true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "state")
			n := newNode(2)
			synctest.Test(t, func(t *testing.T) {
				m, stop := start(t, n, monitor.Options{StateDir: dir, BootID: "1"})
				n.xid(1, tt.xid)
				synctest.Wait()
				wantStates(t, m, healthy, unhealthy)
				since := m.Snapshots().Value().GPUs[1].Health.Since
				stop()
				pass(time.Hour)

				m, stop = start(t, n, monitor.Options{StateDir: dir, BootID: tt.boot})
				wantStates(t, m, healthy, tt.wantAfter)
				h := m.Snapshots().Value().GPUs[1].Health
				if tt.wantAfter == unhealthy && (!h.Since.Equal(since) || h.XID != tt.xid || h.Reason == "") {
					t.Errorf("restored as %+v, want it since %v", h, since)
				}
				pass(time.Hour)
				wantStates(t, m, healthy, tt.wantAfter)
				stop()
			})
			if got := strings.Contains(ledgerOf(t, dir), uuid(1)); got != tt.wantWritten {
				t.Errorf("in the ledger: %v, want %v:\n%s", got, tt.wantWritten, ledgerOf(t, dir))
			}
		})
	}
}

func TestClearedFaultLeavesTheLedger(t *testing.T) {
	dir := t.TempDir()
	n := newNode(2)
	synctest.Test(t, func(t *testing.T) {
		_, stop := start(t, n, monitor.Options{StateDir: dir, BootID: "1"})
		n.xid(0, 64)
		n.xid(1, 64)
		pass(time.Second)
		n.set(func(n *node) { n.gpus = n.gpus[1:] })
		stop()

		m, stop := start(t, n, monitor.Options{StateDir: dir, BootID: "1"})
		wantStates(t, m, unhealthy)
		if !strings.Contains(ledgerOf(t, dir), uuid(0)) {
			t.Error("a fault was forgotten because its GPU is not there")
		}
		for i := range 2 { // also that of the GPU that is not there
			if err := m.Clear(t.Context(), uuid(i)); err != nil {
				t.Error(err)
			}
		}
		synctest.Wait()
		if text := ledgerOf(t, dir); strings.Contains(text, "GPU-") {
			t.Errorf("still in the ledger:\n%s", text)
		}
		stop()
	})
}

func TestFlapsAreCountedOverRestarts(t *testing.T) {
	dir := t.TempDir()
	n := newNode(1)
	synctest.Test(t, func(t *testing.T) {
		for i := range 4 {
			m, stop := start(t, n, monitor.Options{StateDir: dir, BootID: "1"})
			n.set(func(n *node) { n.readings[uuid(0)] = asks(inventory.RecoveryGPUReset) })
			pass(30 * time.Second)
			wantStates(t, m, unhealthy)
			n.set(func(n *node) { delete(n.readings, uuid(0)) })
			pass(15 * time.Second)
			want := healthy
			if i == 3 {
				want = unhealthy
			}
			wantStates(t, m, want)
			stop()
		}
	})
}

// An office is the lead, which the test gives and takes.
type office struct{ leads *feed.Feed[bool] }

func (o office) While(ctx context.Context, task func(context.Context) error) error {
	for ctx.Err() == nil {
		leads, changed := o.leads.Latest()
		if !leads {
			feed.WaitAny(ctx, changed)
			continue
		}
		term, end := context.WithCancel(ctx)
		go func() {
			feed.WaitAny(term, changed)
			end()
		}()
		_ = task(term)
		end()
	}
	return nil
}

func (o office) check() error {
	if !o.leads.Value() {
		return errors.New("another process leads")
	}
	return nil
}

// TestHandOverOfTheLedger: the process that leads writes the ledger. One that waits keeps what it
// found until it leads, takes in what the other one noted, and what it has forgotten since is
// forgotten.
func TestHandOverOfTheLedger(t *testing.T) {
	dir := t.TempDir()
	one, two := newNode(3), newNode(3)
	synctest.Test(t, func(t *testing.T) {
		leads, waits := office{feed.New(true)}, office{feed.New(false)}
		_, stopFirst := start(t, one, monitor.Options{StateDir: dir, BootID: "1", While: leads.While,
			Lead: leads.check})
		second, stopSecond := start(t, two, monitor.Options{StateDir: dir, BootID: "1", While: waits.While,
			Lead: waits.check})
		one.xid(0, 64)
		two.xid(1, 64)
		pass(time.Second)
		if text := ledgerOf(t, dir); !strings.Contains(text, uuid(0)) || strings.Contains(text, uuid(1)) {
			t.Errorf("while the first one leads:\n%s", text)
		}
		leads.leads.Publish(false)
		synctest.Wait()
		waits.leads.Publish(true)
		pass(10 * time.Second)
		wantStates(t, second, unhealthy, unhealthy, healthy)
		if text := ledgerOf(t, dir); !strings.Contains(text, uuid(0)) || !strings.Contains(text, uuid(1)) {
			t.Errorf("after the hand-over:\n%s", text)
		}
		one.xid(2, 64)
		pass(time.Second)
		for i := range 2 {
			if err := second.Clear(t.Context(), uuid(i)); err != nil {
				t.Error(err)
			}
		}
		pass(time.Second)
		if text := ledgerOf(t, dir); strings.Contains(text, "GPU-") {
			t.Errorf("after both were cleared:\n%s", text)
		}
		stopSecond()
		stopFirst()
	})
}

func TestDamagedLedgerIsSetAside(t *testing.T) {
	for name, text := range map[string]string{
		"half a file": `{"version": 1, "faul`, "a newer form": `{"version": 2}`, "nothing": "", "something else": "[]",
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, "faults.json"), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			n := newNode(1)
			synctest.Test(t, func(t *testing.T) {
				m, stop := start(t, n, monitor.Options{StateDir: dir})
				wantStates(t, m, healthy)
				n.xid(0, 64)
				pass(time.Second)
				stop()
				m, stop = start(t, n, monitor.Options{StateDir: dir})
				wantStates(t, m, unhealthy)
				stop()
			})
			kept, err := os.ReadFile(filepath.Join(dir, "faults.json.damaged"))
			if err != nil || string(kept) != text {
				t.Errorf("set aside: %q, %v, want %q", kept, err, text)
			}
		})
	}
}

func TestStateDirectoryThatCannotBeHasNoPartInServing(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	n := newNode(1)
	synctest.Test(t, func(t *testing.T) {
		m, stop := start(t, n, monitor.Options{StateDir: filepath.Join(file, "state")})
		n.xid(0, 119)
		synctest.Wait()
		wantStates(t, m, unhealthy)
		pass(10 * time.Minute)
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		pass(30 * time.Second)
		if !strings.Contains(ledgerOf(t, filepath.Join(file, "state")), uuid(0)) {
			t.Error("not written once it could be")
		}
		stop()
	})
}

// TestLastFaultIsWrittenAtTheEnd of the process.
func TestLastFaultIsWrittenAtTheEnd(t *testing.T) {
	dir := t.TempDir()
	n := newNode(1)
	synctest.Test(t, func(t *testing.T) {
		_, stop := start(t, n, monitor.Options{StateDir: dir})
		n.xid(0, 64)
		synctest.Wait()
		stop()
	})
	if !strings.Contains(ledgerOf(t, dir), uuid(0)) {
		t.Error("the last fault is forgotten")
	}
}

// TestReleaseForAChangeSurvivesARestart: the next process knows that the driver was released to change
// it.
func TestReleaseForAChangeSurvivesARestart(t *testing.T) {
	dir, n := t.TempDir(), newNode(1)
	synctest.Test(t, func(t *testing.T) {
		m, stop := start(t, n, monitor.Options{StateDir: dir, BootID: "1"})
		if err := m.QuiesceForChange(t.Context()); err != nil {
			t.Fatal(err)
		}
		stop()
		m, stop = start(t, n, monitor.Options{StateDir: dir, BootID: "1"})
		if s, err := m.Status(t.Context()); err != nil || s.Quiesced.IsZero() || !s.ForChange {
			t.Errorf("%+v, %v", s, err)
		}
		stop()
	})
}

// TestQuiesceSurvivesARestart of the daemon, and not of the node.
func TestQuiesceSurvivesARestart(t *testing.T) {
	for _, allocate := range []bool{false, true} {
		dir := t.TempDir()
		n := newNode(1)
		synctest.Test(t, func(t *testing.T) {
			m, stop := start(t, n, monitor.Options{StateDir: dir, BootID: "1"})
			if err := m.Quiesce(t.Context(), allocate); err != nil {
				t.Fatal(err)
			}
			since := time.Now()
			stop()
			pass(time.Minute)

			m, stop = start(t, n, monitor.Options{StateDir: dir, BootID: "1"})
			if err := m.First(t.Context()); err != nil {
				t.Errorf("First: %v", err)
			}
			pass(time.Hour)
			s, err := m.Status(t.Context())
			if err != nil || s.Quiesced.IsZero() || !s.Quiesced.Equal(since) || s.Allocate != allocate ||
				s.Snapshot.Stale == "" {
				t.Errorf("%+v, %v", s, err)
			}
			if n.count(opened) != 1 {
				t.Error("the driver was not left alone")
			}
			if err := m.Quiesce(t.Context(), allocate); err != nil {
				t.Errorf("Quiesce again: %v", err)
			}
			stop()

			m, stop = start(t, n, monitor.Options{StateDir: dir, BootID: "2"})
			wantStates(t, m, healthy)
			if err := m.Quiesce(t.Context(), allocate); err != nil {
				t.Fatal(err)
			}
			if err := m.Resume(t.Context()); err != nil {
				t.Fatal(err)
			}
			stop()

			m, stop = start(t, n, monitor.Options{StateDir: dir, BootID: "2"})
			wantStates(t, m, healthy)
			stop()
		})
	}
}

// TestResumeOfAnotherProcess: a process that found the driver released uses it again when the
// process that was told to release it is told to resume, and not while that is so, when the disk is
// away, or after it was told to release the driver itself.
func TestResumeOfAnotherProcess(t *testing.T) {
	for name, tt := range map[string]struct {
		do   func(t *testing.T, dir string, earlier, later *monitor.Monitor)
		uses bool
	}{
		"resume": {func(t *testing.T, _ string, earlier, _ *monitor.Monitor) {
			if err := earlier.Resume(t.Context()); err != nil {
				t.Fatal(err)
			}
		}, true},
		"nothing": {func(*testing.T, string, *monitor.Monitor, *monitor.Monitor) {}, false},
		"the disk is away": {func(t *testing.T, dir string, _, _ *monitor.Monitor) {
			if err := os.Rename(dir, dir+".away"); err != nil {
				t.Fatal(err)
			}
		}, false},
		"the file is damaged": {func(t *testing.T, dir string, _, _ *monitor.Monitor) {
			if err := os.WriteFile(filepath.Join(dir, "quiesce.json"), []byte("x"), 0o600); err != nil {
				t.Fatal(err)
			}
		}, false},
		"it was told itself": {func(t *testing.T, _ string, earlier, later *monitor.Monitor) {
			if err := errors.Join(later.Quiesce(t.Context(), false), earlier.Resume(t.Context())); err != nil {
				t.Fatal(err)
			}
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "state")
			first, second := newNode(1), newNode(1)
			synctest.Test(t, func(t *testing.T) {
				earlier, end := start(t, first, monitor.Options{StateDir: dir, BootID: "1"})
				defer end()
				if err := earlier.Quiesce(t.Context(), false); err != nil {
					t.Fatal(err)
				}
				later, endLater := start(t, second, monitor.Options{StateDir: dir, BootID: "1"})
				defer endLater()
				pass(time.Minute)
				tt.do(t, dir, earlier, later)
				pass(time.Minute)
				s, err := later.Status(t.Context())
				if err != nil || s.Quiesced.IsZero() != tt.uses {
					t.Errorf("the driver is used again: %t, want %t; %v", s.Quiesced.IsZero(), tt.uses, err)
				}
			})
		})
	}
}

// TestQuiesceWhileTheDiskHangs: requests are answered, and once the disk goes on it has what the
// last of them asked for.
func TestQuiesceWhileTheDiskHangs(t *testing.T) {
	for _, last := range []string{"quiesce", "resume"} {
		dir := t.TempDir()
		n := newNode(1)
		synctest.Test(t, func(t *testing.T) {
			m := monitor.New(monitor.Options{Driver: n, Policy: health.Default(), StateDir: dir})
			disk := make(chan struct{})
			monitor.HangDisk(m, disk)
			ctx, cancel := context.WithCancel(withoutLog(t.Context()))
			ended := make(chan error, 1)
			go func() { ended <- m.Run(ctx) }()
			synctest.Wait()
			for _, request := range []string{"quiesce", "resume", last} {
				began := time.Now()
				ask := m.Resume
				if request == "quiesce" {
					ask = func(ctx context.Context) error { return m.Quiesce(ctx, false) }
				}
				if err := ask(t.Context()); err != nil || time.Since(began) > 3*time.Second {
					t.Errorf("%s: %v after %v", request, err, time.Since(began))
				}
			}
			close(disk)
			synctest.Wait()
			_, err := os.Stat(filepath.Join(dir, "quiesce.json"))
			if saved := err == nil; saved != (last == "quiesce") {
				t.Errorf("after %s, it is saved that the driver is released: %v", last, saved)
			}
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// TestReleaseThatCannotBeReadIsSetAside: the daemon begins as if the driver had not been released.
func TestReleaseThatCannotBeReadIsSetAside(t *testing.T) {
	for _, text := range []string{"", "{", `{"version": 2}`} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "quiesce.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		n := newNode(1)
		synctest.Test(t, func(t *testing.T) {
			m, stop := start(t, n, monitor.Options{StateDir: dir})
			wantStates(t, m, healthy)
			stop()
		})
		if kept, err := os.ReadFile(filepath.Join(dir, "quiesce.json.damaged")); err != nil || string(kept) != text {
			t.Errorf("set aside: %q, %v", kept, err)
		}
	}
}
