package daemon_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/daemon"
)

// lockLike takes the lock of a file as a process does; nil if it cannot have it.
func lockLike(t *testing.T, path string, how int) (unlock func()) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if syscall.Flock(int(f.Fd()), how|syscall.LOCK_NB) != nil {
		_ = f.Close()
		return nil
	}
	return func() { _ = f.Close() }
}

// TestProcessOfVersion01 that was there before is waited for, and one that comes later gets no lock. One that was stopped with its share of a
// lock, after it led, keeps none from going on.
func TestProcessOfVersion01(t *testing.T) {
	for name, before := range map[string]int{"one of version 0.1": syscall.LOCK_EX, "one that led": syscall.LOCK_SH} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				path := filepath.Join(dir, daemon.FormerPublishes)
				unlock := lockLike(t, path, before)
				f := daemon.NewFormer(dir)
				if !f.Does(daemon.FormerPublishes) {
					t.Error("it is known before a lock was tried")
				}
				ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), klog.Logger{}))
				ended := make(chan error, 1)
				go func() { ended <- f.Run(ctx) }()
				if f.Try(ctx); f.Does(daemon.FormerDivides) {
					t.Error("a lock that nobody has counts as one that a process has after it was tried")
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				waits := before == syscall.LOCK_EX
				if f.Does(daemon.FormerPublishes) != waits || f.Does(daemon.FormerDivides) {
					t.Errorf("publishes %v, want %v; divides %v", f.Does(daemon.FormerPublishes), waits, f.Does(daemon.FormerDivides))
				}
				if said := f.Waits(); (said != "") != waits || waits && !strings.Contains(said, "since 2000-01-01T00:00:00Z a process of version 0.1 has "+daemon.FormerPublishes) {
					t.Errorf("the status says %q", said)
				}
				unlock()
				if !f.Await(ctx, daemon.FormerPublishes) {
					t.Error("it is not seen that the process has ended")
				}
				if said := f.Waits(); said != "" {
					t.Errorf("the status says %q when nothing is waited for", said)
				}
				for _, lock := range []string{"faults.lock", "mig.lock", "dra-publisher.lock", "reporter.lock"} {
					if lockLike(t, filepath.Join(dir, lock), syscall.LOCK_EX) != nil {
						t.Errorf("a process that comes later has %s", lock)
					}
				}
				cancel()
				if err := <-ended; err != nil {
					t.Error(err)
				}
				synctest.Wait()
				if unlock := lockLike(t, path, syscall.LOCK_EX); unlock == nil || f.Await(ctx, daemon.FormerPublishes) {
					t.Error("the locks are held after the end")
				}
			})
		})
	}
}

// TestNoProcessOfVersion01 is waited for without a state directory, or in one that cannot be written.
func TestNoProcessOfVersion01(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"", filepath.Join(file, "state")} {
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), klog.Logger{}))
		f := daemon.NewFormer(dir)
		go func() { _ = f.Run(ctx) }()
		if !f.Await(ctx, daemon.FormerDivides) {
			t.Errorf("waits in %q", dir)
		}
		cancel()
	}
}
