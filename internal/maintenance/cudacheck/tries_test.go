package cudacheck_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/cuda"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// TestDevicesInUseAreCheckedTogether, at a growing interval while nothing changes.
func TestDevicesInUseAreCheckedTogether(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "", 8)
		for _, g := range snapshot(8).GPUs {
			r.busy[g.UUID] = errors.New("in use by pod p")
		}
		r.start(t, "boot")
		time.Sleep(time.Hour)
		r.mu.Lock()
		asked := slices.Compact(r.checkedAt)
		r.mu.Unlock()
		if n := len(asked); n < 300 || n > 370 {
			t.Errorf("asked at %d times within an hour", n)
		}
		r.set(func() { r.busy["GPU-3"] = errors.New("in use by pod q"); delete(r.busy, "GPU-5") })
		time.Sleep(11 * time.Second)
		equal(t, "waits", "in use by pod q", r.Status().Value().Waiting["GPU-3"])
		equal(t, "proofs", map[string]int{"GPU-5": 1}, r.times())
		r.set(func() { clear(r.busy) })
		time.Sleep(3 * time.Second) // something has changed a short time ago
		equal(t, "held", 0, len(r.unproven()))
	})
}

// TestReleaseEndsProofs: a release of the driver waits until no process for a proof is there.
// The devices are tried again at once when the driver is in use again.
func TestReleaseEndsProofs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "", 2)
		r.takes["GPU-0"], r.takes["GPU-1"], r.outlives = cuda.Limit, cuda.Limit, 2*time.Second
		r.start(t, "boot")
		time.Sleep(time.Second)
		released := func() { // as by quiesce
			r.change(func(s *inventory.Snapshot) { s.Stale = "released" })
			r.set(func() { r.busy["GPU-0"], r.busy["GPU-1"] = errors.New("released"), errors.New("released") })
		}
		released()
		began := time.Now()
		equal(t, "release", error(nil), r.Release(t.Context()))
		equal(t, "it waits", 2*time.Second, time.Since(began))
		time.Sleep(time.Minute)
		equal(t, "proofs", map[string]int{"GPU-0": 1, "GPU-1": 1}, r.times())

		r.set(func() { clear(r.busy); clear(r.takes); r.outlives = 0 })
		r.change(func(s *inventory.Snapshot) { s.Stale = "" })
		time.Sleep(time.Second)
		equal(t, "held when the driver is in use again", 0, len(r.unproven()))

		r.set(func() { r.takes["GPU-0"], r.outlives = time.Second, time.Hour })
		r.Again("GPU-0")
		time.Sleep(100 * time.Millisecond)
		released()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if err := r.Release(ctx); err == nil || !strings.Contains(err.Error(), "CUDA on GPU-0 is still running") {
			t.Errorf("release while a process hangs: %v", err)
		}
		time.Sleep(2 * time.Hour)
	})
}
