package pool_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/pool"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// slowDisk returns the options of a node whose GPUs are all in slices, and what has its disk hang:
// each write waits in Lead.
func slowDisk(t *testing.T, s inventory.Snapshot) (o pool.Options, hangs *feed.Feed[bool]) {
	t.Helper()
	hangs = feed.New(false)
	o = publishesAll(t.TempDir(), s)
	o.Lead = func() error {
		feed.Until(context.Background(), hangs, func(still bool) bool { return !still })
		return nil
	}
	return o, hangs
}

// TestDiskThatHangs: a new GPU is not published while its number cannot be written. What changes of
// the others is published at once.
func TestDiskThatHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		o, hangs := slowDisk(t, gpus(map[string]int{"a": 0}))
		d := run(t, o)
		hangs.Publish(true)
		look := func(state inventory.State) {
			more := gpus(map[string]int{"a": 0, "b": 1})
			more.GPUs[0].Health.State = state
			o.Owners.Publish(dra.All(more.GPUs))
			o.Snapshots.Publish(more)
			synctest.Wait()
		}
		is := func(when, want string, taints int) {
			t.Helper()
			synctest.Wait()
			pool := d.Pools().Value()
			if text(pool) != want || len(pool.Slices[0].Devices[0].Taints) != taints {
				t.Errorf("%s: the pool is %s with taints %v", when, text(pool), pool.Slices[0].Devices[0].Taints)
			}
		}
		look(inventory.Unhealthy)
		time.Sleep(2 * time.Second)
		is("once the disk has not answered", "[0a]", 1)
		look(inventory.Healthy)
		is("at once", "[0a]", 0)
		began := time.Now()
		err := d.SetPublished(t.Context(), map[string]bool{"GPU-a": true})
		if took := time.Since(began); !errors.Is(err, statefile.ErrHangs) || !strings.Contains(err.Error(), o.StateDir) ||
			took > 2*time.Second {
			t.Errorf("SetPublished() = %v after %v", err, took)
		}
		hangs.Publish(false)
		time.Sleep(10 * time.Second)
		is("when it answers", "[0a 1b]", 0)
		if err := d.SetPublished(t.Context(), map[string]bool{"GPU-a": true}); err != nil || !d.Published().Value()["GPU-a"] {
			t.Errorf("SetPublished() = %v, published %v", err, d.Published().Value())
		}
	})
}

// TestDiskThatAnswersLate: what was written when this process led counts no more once that time is
// over. Another process may have led since.
func TestDiskThatAnswersLate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		o, hangs := slowDisk(t, gpus(map[string]int{"a": 0}))
		d := pool.New(o)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- d.Run(ctx) }()
		synctest.Wait()
		hangs.Publish(true)
		if err := d.SetPublished(t.Context(), map[string]bool{"GPU-a": true}); !errors.Is(err, statefile.ErrHangs) {
			t.Errorf("SetPublished() = %v", err)
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		hangs.Publish(false)
		if synctest.Wait(); d.Published().Value() != nil {
			t.Errorf("published %v", d.Published().Value())
		}
	})
}
