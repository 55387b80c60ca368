package monitor_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
)

// onDisk returns options of a process that leads, with which the ledger is read and written only
// after disk is closed.
func onDisk(disk <-chan struct{}, o monitor.Options) monitor.Options {
	o.While = func(ctx context.Context, task func(context.Context) error) error { return task(ctx) }
	o.Lead = func() error {
		<-disk
		return nil
	}
	return o
}

// TestStartWhileTheDiskHangs: GPUs are served without what earlier processes wrote down. Once the
// disk answers, that counts, and what was found meanwhile is written.
func TestStartWhileTheDiskHangs(t *testing.T) {
	for _, released := range []bool{false, true} {
		dir := t.TempDir()
		n := newNode(3)
		synctest.Test(t, func(t *testing.T) {
			m, stop := start(t, n, monitor.Options{StateDir: dir, BootID: "1"})
			n.xid(1, 119)
			synctest.Wait()
			if released {
				if err := m.Quiesce(t.Context(), true); err != nil {
					t.Fatal(err)
				}
			}
			stop()

			disk := make(chan struct{})
			m = monitor.New(onDisk(disk, monitor.Options{Driver: n, Policy: health.Default(), StateDir: dir,
				BootID: "1"}))
			monitor.HangStart(m, disk)
			ctx, cancel := context.WithCancel(withoutLog(t.Context()))
			ended := make(chan error, 1)
			go func() { ended <- m.Run(ctx) }()
			began := time.Now()
			if err := m.First(t.Context()); err != nil || time.Since(began) > 2*time.Second {
				t.Fatalf("the first look: %v after %v", err, time.Since(began))
			}
			wantStates(t, m, healthy, healthy, healthy)
			n.xid(0, 119)
			n.xid(1, 119)
			pass(time.Minute)
			close(disk)
			pass(time.Minute)
			if status, err := m.Status(t.Context()); err != nil || status.Quiesced.IsZero() == released {
				t.Errorf("released since %v (%v), want that: %v", status.Quiesced, err, released)
			}
			if released {
				check(t, m.Resume(t.Context()))
				pass(time.Minute)
			}
			wantStates(t, m, unhealthy, unhealthy, healthy)
			cancel()
			check(t, <-ended)
		})
		for i, want := range []int{1, 1, 0} {
			if got := strings.Count(ledgerOf(t, dir), uuid(i)); got != want {
				t.Errorf("the ledger has %d faults of GPU %d, want %d:\n%s", got, i, want, ledgerOf(t, dir))
			}
		}
	}
}

// TestEndWhileTheDiskIsSlow: a fault that was found before the ledger is read is written if the
// disk answers within 5 s of the end, beside those of earlier processes.
func TestEndWhileTheDiskIsSlow(t *testing.T) {
	for name, tt := range map[string]struct {
		hang  time.Duration
		start bool // also what is read at the start waits for the disk
	}{
		"soon":                        {time.Second, false},
		"after a write was given up":  {10 * time.Second, false},
		"after the start has gone on": {10 * time.Second, true},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			n := newNode(3)
			synctest.Test(t, func(t *testing.T) {
				_, stop := start(t, n, monitor.Options{StateDir: dir, BootID: "1"})
				n.xid(1, 119)
				pass(time.Second)
				stop()

				disk := make(chan struct{})
				m := monitor.New(onDisk(disk, monitor.Options{Driver: n, Policy: health.Default(), StateDir: dir,
					BootID: "1"}))
				if tt.start {
					monitor.HangStart(m, disk)
				}
				ctx, cancel := context.WithCancel(withoutLog(t.Context()))
				ended := make(chan error, 1)
				go func() { ended <- m.Run(ctx) }()
				check(t, m.First(t.Context()))
				n.xid(0, 119)
				pass(tt.hang)
				cancel()
				pass(2 * time.Second)
				close(disk)
				check(t, <-ended)
			})
			for i, want := range []int{1, 1, 0} {
				if got := strings.Count(ledgerOf(t, dir), uuid(i)); got != want {
					t.Errorf("the ledger has %d faults of GPU %d, want %d:\n%s", got, i, want, ledgerOf(t, dir))
				}
			}
		})
	}
}
