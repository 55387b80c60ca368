package nvidia_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// slowCalls are how long calls take that are late and do not hang. Scans and readings meet their
// ends at different instants.
var slowCalls = []time.Duration{
	2100 * time.Millisecond, 3 * time.Second, 3300 * time.Millisecond, 5100 * time.Millisecond, 5700 * time.Millisecond,
	8400 * time.Millisecond,
}

// TestSlowIsNotDead has each call take 20 ms, and then seconds: every GPU is read in the end, no
// call hangs for long, and the links come.
func TestSlowIsNotDead(t *testing.T) {
	t.Parallel()
	t.Run("20ms", func(t *testing.T) { slowIsNotDead(t, 20*time.Millisecond, 5*time.Second, time.Minute) })
	for _, delay := range slowCalls {
		t.Run(delay.String(), func(t *testing.T) { slowIsNotDead(t, delay, 35*delay, 160*delay) })
	}
}

// slowIsNotDead has each call take so long: the readings of all GPUs, and then their links, are
// there within their limits.
func slowIsNotDead(t *testing.T, delay, readings, links time.Duration) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		r := slowRig(t, delay)
		defer r.end()
		read := map[string]bool{}
		for len(read) < 8 {
			for _, g := range r.scan().GPUs {
				_, err := r.Read(r.ctx, g.UUID)
				var stall *inventory.Stall
				switch {
				case err == nil:
					read[g.UUID] = true
				case errors.As(err, &stall) && time.Since(stall.Call.Since) >= nodePatience:
					t.Fatalf("GPU %d: %v since %v", g.Index, err, time.Since(stall.Call.Since))
				}
			}
			if took := time.Since(start); took > readings {
				t.Fatalf("after %v, %d GPUs were read", took, len(read))
			}
			time.Sleep(time.Millisecond) // the bubble's clock
		}
		t.Logf("all GPUs are read after %v", time.Since(start))
		// While calls are late, no links are due.
		for s := r.scan(); s.LinksDue || len(s.GPUs[0].Links) != 7; s = r.scan() {
			if took := time.Since(start); took > links {
				t.Fatalf("after %v, GPU 0 has %d links, and links are due: %v", took, len(s.GPUs[0].Links), s.LinksDue)
			}
			time.Sleep(time.Second)
		}
		t.Logf("the links are there after %v", time.Since(start))
	})
}

// TestSlowReadings has each call take seconds, and reads one GPU each second: what a reading learns
// that nobody waited for is told.
func TestSlowReadings(t *testing.T) {
	t.Parallel()
	for _, delay := range slowCalls {
		t.Run(delay.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := slowRig(t, delay)
				defer r.end()
				for len(r.scan().GPUs) == 0 {
					time.Sleep(time.Second)
				}
				uuid := r.scan().GPUs[0].UUID
				readings := 0
				for start := time.Now(); time.Since(start) < time.Hour; time.Sleep(time.Second) {
					if _, err := r.Read(r.ctx, uuid); err == nil {
						readings++
					}
				}
				if want := int(time.Hour / (40 * delay)); readings < want {
					t.Errorf("%d readings in an hour, want %d", readings, want)
				}
				t.Logf("%d readings in an hour", readings)
			})
		})
	}
}

// slowRig opens a session in which each call takes so long.
func slowRig(t *testing.T, delay time.Duration) *rig {
	t.Helper()
	node := newNode(t, "dgx-h100")
	r := &rig{t: t, ctx: t.Context(), node: node, driver: nvidia.New(nvidia.Options{Library: node.NVML(),
		Root: node.Root()})}
	r.inject(simulator.Fault{Kind: simulator.KindSlow, Delay: delay.String()})
	s, err := r.driver.Open(r.ctx)
	if err != nil {
		t.Fatal(err)
	}
	r.Session = s
	return r
}

// end lets calls return at once again, and closes the session.
func (r *rig) end() {
	r.t.Helper()
	r.inject(restore)
	time.Sleep(time.Minute) // of the bubble's clock, for the calls under way
	if err := r.Close(r.ctx); err != nil {
		r.t.Fatal(err)
	}
}
