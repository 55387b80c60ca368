package reset_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/reset"
)

// A rig has the parts of a daemon used by Resets.
type rig struct {
	*reset.Resets
	snapshots *feed.Feed[inventory.Snapshot]
	previous  *feed.Feed[string]

	mu       sync.Mutex // guards all following fields
	withheld map[string]string
	users    []string
	unknown  error
	may      error
	run      func(ctx context.Context, ended func()) error
	write    func(path string, v any) error // nil for the real function
	reserved int
	runs     []string
}

func newRig(dir string) *rig {
	s := inventory.Snapshot{Generation: 1}
	for i, uuid := range []string{"GPU-a", "GPU-b"} {
		s.GPUs = append(s.GPUs, inventory.GPU{
			UUID: uuid, Index: i, BDF: "0000:0" + string(rune('1'+i)) +
				":00.0", Health: inventory.Health{State: inventory.Healthy},
		})
	}
	r := &rig{
		snapshots: feed.New(s), previous: feed.New(""), withheld: map[string]string{},
		run: func(context.Context, func()) error { return nil },
	}
	r.Resets = reset.New(reset.Options{
		Snapshots: r.snapshots, StateDir: dir, BootID: "boot", PreviousLeader: r.previous.Latest,
		Write: func(path string, v any) error {
			if write := get(r, func() func(string, any) error { return r.write }); write != nil {
				return write(path, v)
			}
			return statefile.WriteState(path, v)
		},
		May:     func() error { return get(r, func() error { return r.may }) },
		Clients: func(inventory.GPU) []string { return []string{"process 7 (dcgm)"} },
		Withhold: func(_ context.Context, gpus []string, reason string) error {
			r.set(func() {
				for _, uuid := range gpus {
					if r.withheld[uuid] = reason; reason == "" {
						delete(r.withheld, uuid)
					}
				}
			})
			return nil
		},
		Reserve: func(context.Context, inventory.GPU) ([]string, func(), error) {
			r.mu.Lock()
			defer r.mu.Unlock()
			if len(r.users) > 0 || r.unknown != nil {
				return r.users, nil, r.unknown
			}
			r.reserved++
			return nil, func() { r.set(func() { r.reserved-- }) }, nil
		},
		Run: func(ctx context.Context, gpus []inventory.GPU, ended func()) error {
			run := get(r, func() func(context.Context, func()) error {
				for _, g := range gpus {
					r.runs = append(r.runs, g.BDF)
				}
				return r.run
			})
			return run(ctx, ended)
		},
	})
	return r
}

func (r *rig) set(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
}

func get[T any](r *rig, value func() T) T {
	r.mu.Lock()
	defer r.mu.Unlock()
	return value()
}

// begin requests a reset, and returns the outcome.
func (r *rig) begin(ctx context.Context, wait time.Duration, gpus ...string) <-chan error {
	outcome := make(chan error, 1)
	go func() { outcome <- r.Reset(ctx, reset.Order{GPUs: gpus, Wait: wait}, func(string) {}) }()
	return outcome
}

// free fails the test unless nothing is withdrawn or reserved, and no file is left.
func (r *rig) free(t *testing.T, dir string) {
	t.Helper()
	synctest.Wait()
	r.set(func() {
		if len(r.withheld) > 0 || r.reserved > 0 {
			t.Errorf("withheld %v, %d reserved", r.withheld, r.reserved)
		}
	})
	if _, err := os.Stat(filepath.Join(dir, reset.File)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file is left: %v", err)
	}
	if err := r.Withheld("GPU-a"); err != nil {
		t.Error(err)
	}
}

// TestReset: GPUs are withdrawn while the reset waits for their users, are reset together, and are
// released.
func TestReset(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(dir)
		r.users = []string{"pod a/b"}
		outcome := r.begin(t.Context(), time.Hour, "0", "GPU-b")
		time.Sleep(time.Minute)
		s := r.Status().Value()
		if s.Phase != reset.PhaseWaiting || !strings.Contains(s.Reason, "GPU 0 by pod a/b, GPU 1 by pod a/b") ||
			len(s.GPUs) != 2 {
			t.Errorf("status %+v", s)
		}
		r.set(func() {
			if !strings.Contains(r.withheld["GPU-a"], "it is being reset: ") || r.withheld["GPU-b"] == "" {
				t.Errorf("withheld %v", r.withheld)
			}
		})
		if r.Withheld("GPU-a") == nil || r.Withheld("GPU-c") != nil {
			t.Error("a GPU that is being reset is given away")
		}
		if err := <-r.begin(t.Context(), 0, "1"); err == nil || !strings.Contains(err.Error(), "another reset is "+
			"running") {
			t.Errorf("a second reset: %v", err)
		}
		r.set(func() { r.users = nil })
		if err := <-outcome; err != nil || r.Status().Value().Phase != reset.PhaseDone {
			t.Errorf("Reset() = %v", err)
		}
		if want := []string{"0000:01:00.0", "0000:02:00.0"}; !slices.Equal(r.runs, want) {
			t.Errorf("reset were %v", r.runs)
		}
		r.free(t, dir)
	})
}

// TestRefusals: nothing is reset, and nothing stays withdrawn.
func TestRefusals(t *testing.T) {
	t.Parallel()
	for want, test := range map[string]struct {
		gpus   []string
		wait   time.Duration
		change func(r *rig)
	}{
		`no GPU has the index or UUID "7"`: {[]string{"0", "7"}, 0, func(*rig) {}},
		"name at least one":                {nil, 0, func(*rig) {}},
		"in use: GPU 0 by pod a/b; stop":   {[]string{"0"}, 0, func(r *rig) { r.users = []string{"pod a/b"} }},
		"by pod a/b, for 1m0s": {[]string{"0"}, time.Minute,
			func(r *rig) { r.users = []string{"pod a/b"} }},
		"kubelet is away, for 15s": {[]string{"0"}, 0, func(r *rig) { r.unknown = errors.New("kubelet is away") }},
		"does not lead":            {[]string{"0"}, 0, func(r *rig) { r.may = errors.New("it does not lead") }},
		"refused; open: GPU 0 by process 7 (dcgm); the GPU must not be in use": {[]string{"0"}, 0, func(r *rig) {
			r.run = func(context.Context, func()) error { return errors.New("refused") }
		}},
		"after the reset, GPU 1 is Unhealthy: bad": {[]string{"1"}, 0, func(r *rig) {
			s := r.snapshots.Value()
			s.GPUs = slices.Clone(s.GPUs)
			s.GPUs[1].Health = inventory.Health{State: inventory.Unhealthy, Reason: "bad"}
			r.snapshots.Publish(s)
		}},
	} {
		dir := t.TempDir()
		synctest.Test(t, func(t *testing.T) {
			r := newRig(dir)
			test.change(r)
			if err := <-r.begin(t.Context(), test.wait, test.gpus...); err == nil ||
				!strings.Contains(err.Error(), want) {
				t.Errorf("Reset() = %v, want %q", err, want)
			}
			r.free(t, dir)
		})
	}
}

// TestMayNotAnyMore: another process starts, or leads, while users are waited for. Nothing is
// reset, also where the users end just then.
func TestMayNotAnyMore(t *testing.T) {
	t.Parallel()
	for _, ends := range []bool{false, true} {
		dir := t.TempDir()
		synctest.Test(t, func(t *testing.T) {
			r := newRig(dir)
			r.users = []string{"pod a/b"}
			outcome := r.begin(t.Context(), time.Hour, "0")
			time.Sleep(time.Minute)
			r.set(func() {
				r.may = errors.New("another process runs")
				if ends {
					r.users = nil
				}
			})
			time.Sleep(2 * time.Second)
			select {
			case err := <-outcome:
				if err == nil || !strings.Contains(err.Error(), "another process runs") {
					t.Errorf("Reset() = %v", err)
				}
			default:
				t.Error("it waits still")
				r.set(func() { r.users = nil })
				if err := <-outcome; err != nil {
					t.Error(err)
				}
			}
			if len(r.runs) > 0 {
				t.Errorf("reset were %v", r.runs)
			}
			r.free(t, dir)
		})
	}
}

// TestAGPUNamedTwice is reset once.
func TestAGPUNamedTwice(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(dir)
		if err := <-r.begin(t.Context(), 0, "0", "GPU-a", "1", "0"); err != nil {
			t.Error(err)
		}
		if want := []string{"0000:01:00.0", "0000:02:00.0"}; !slices.Equal(r.runs, want) {
			t.Errorf("reset were %v", r.runs)
		}
		r.free(t, dir)
	})
}

// TestResetWithoutCaller: a waiting reset without a caller is given up, and a running reset
// continues.
func TestResetWithoutCaller(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(dir)
		r.users = []string{"pod a/b"}
		ctx, cancel := context.WithCancel(t.Context())
		outcome := r.begin(ctx, time.Hour, "0")
		time.Sleep(time.Minute)
		cancel()
		if err := <-outcome; !errors.Is(err, context.Canceled) {
			t.Errorf("Reset() = %v", err)
		}
		r.free(t, dir)
		r.set(func() {
			r.users = nil
			r.run = func(ctx context.Context, _ func()) error {
				time.Sleep(time.Minute)
				return ctx.Err()
			}
		})
		ctx, cancel = context.WithCancel(t.Context())
		outcome = r.begin(ctx, 0, "0")
		time.Sleep(time.Second)
		cancel()
		if err := <-outcome; !errors.Is(err, context.Canceled) {
			t.Errorf("Reset() = %v", err)
		}
		if s := r.Status().Value(); s.Phase != reset.PhaseResetting {
			t.Errorf("status %+v", s)
		}
		time.Sleep(time.Minute)
		if s := r.Status().Value(); s.Phase != reset.PhaseDone {
			t.Errorf("status %+v", s)
		}
		r.free(t, dir)
	})
}

// TestHangingReset keeps its GPU withdrawn until the end, and no caller waits.
func TestHangingReset(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(dir)
		var ended func()
		r.run = func(_ context.Context, e func()) error {
			ended = e
			return reset.ErrHangs
		}
		if err := <-r.begin(t.Context(), 0, "0"); !errors.Is(err, reset.ErrHangs) {
			t.Errorf("Reset() = %v", err)
		}
		time.Sleep(time.Hour)
		if s := r.Status().Value(); s.Phase != reset.PhaseHangs || r.Withheld("GPU-a") == nil || r.reserved > 0 {
			t.Errorf("status %+v, %d reserved", s, r.reserved)
		}
		if err := <-r.begin(t.Context(), 0, "1"); err == nil {
			t.Error("another reset begins")
		}
		ended()
		r.free(t, dir)
		if s := r.Status().Value(); s.Phase != reset.PhaseFailed {
			t.Errorf("status %+v", s)
		}
	})
}

// TestGPUThatNeedsARestartOfTheNode: the reset is refused with the daemon's reason, and nothing is
// withdrawn, noted or run, also for the other GPUs of the command.
func TestGPUThatNeedsARestartOfTheNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := newRig(dir)
		s := r.snapshots.Value()
		s.GPUs = slices.Clone(s.GPUs)
		s.GPUs[1].Health = inventory.Health{State: inventory.Lost,
			Reason: "XID 79 (GPU fell off the bus): restart the node", Remedy: inventory.RemedyReboot}
		r.snapshots.Publish(s)
		err := <-r.begin(t.Context(), time.Hour, "0", "1")
		want := "GPU 1 needs a restart of its node, which a reset does not replace; nothing was tried. " +
			"GPU 1 is Lost: XID 79 (GPU fell off the bus): restart the node"
		if err == nil || err.Error() != want {
			t.Errorf("%v, want %q", err, want)
		}
		if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 || len(r.withheld) > 0 || len(r.runs) > 0 {
			t.Errorf("%v, notes %v, withheld %v, runs %v", err, entries, r.withheld, r.runs)
		}
	})
}
