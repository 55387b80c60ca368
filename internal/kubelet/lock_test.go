package kubelet_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

func TestRegistrationsOfOtherProcessesWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := folder(t)
		one, other := newDirectory(t, dir), newDirectory(t, dir)
		var locked bool
		took := func(ctx context.Context, d *kubelet.Directory) (unlock func(), waited time.Duration) {
			began := time.Now()
			unlock, locked = d.LockRegistrations(ctx)
			return unlock, time.Since(began)
		}
		want := func(what string, got, want time.Duration, locks bool) {
			t.Helper()
			if got != want || locked != locks {
				t.Errorf("%s waited %v and locked %t, want %v and %t", what, got, locked, want, locks)
			}
		}
		first, waited := took(t.Context(), one)
		want("the first registration", waited, 0, true)
		second, waited := took(t.Context(), one)
		want("another one of the same process", waited, 0, true)
		time.AfterFunc(40*time.Millisecond, first)
		time.AfterFunc(50*time.Millisecond, first) // has no effect
		time.AfterFunc(101*time.Millisecond, second)
		theirs, waited := took(t.Context(), other)
		want("one of another process", waited, 102*time.Millisecond, true)

		unlock, waited := took(t.Context(), one)
		want("one beside a process that hangs", waited, time.Second, false)
		unlock()
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		unlock, waited = took(ctx, one)
		want("one that is given up", waited, 100*time.Millisecond, false)
		unlock()
		_, waited = took(t.Context(), one) // the two above have not taken the other one's lock away
		want("the next one", waited, time.Second, false)

		theirs()
		unlock, waited = took(t.Context(), one)
		want("one after all others", waited, 0, true)
		unlock()
		_, waited = took(t.Context(), newDirectory(t, filepath.Join(dir, "none")))
		want("one in a directory that cannot be locked", waited, 0, false)
		if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
			t.Errorf("the lock leaves %v, %v in kubelet's directory", entries, err)
		}
	})
}
