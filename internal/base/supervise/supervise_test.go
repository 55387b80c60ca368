package supervise_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
)

var errLife = errors.New("life failed")

func TestWaitsDoubleUpToTheMostAndBeginAgainAfterAProvenLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var starts []time.Time
		backoff := supervise.Backoff{First: time.Second, Most: 4 * time.Second, Proven: time.Minute}
		err := supervise.Run(ctx, backoff, func(context.Context) error {
			starts = append(starts, time.Now())
			switch len(starts) {
			case 5:
				time.Sleep(time.Minute) // the bubble's clock: a run that lasts long enough
			case 7:
				cancel()
			}
			return errLife
		})
		if err != nil {
			t.Fatalf("Run() = %v, want nil when ctx ends", err)
		}
		want := []time.Duration{1, 2, 4, 4, 61, 2}
		for i, w := range want {
			w *= time.Second
			got := starts[i+1].Sub(starts[i])
			if slack := w / 4; got < w-slack || got > w+slack {
				t.Errorf("life %d began %v after the one before, want about %v", i+1, got, w)
			}
		}
	})
}

func TestALifeThatEndsAsItShouldIsFollowedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		began, lives := time.Now(), 0
		_ = supervise.Run(ctx, supervise.Backoff{First: time.Hour, Most: time.Hour}, func(context.Context) error {
			if lives++; lives == 100 {
				cancel()
			}
			return nil
		})
		if waited := time.Since(began); waited != 0 {
			t.Errorf("100 lives took %v, want no wait", waited)
		}
	})
}

func TestALifeThatEndsAsItShouldMakesTheNextWaitShort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		began, lives := time.Now(), 0
		_ = supervise.Run(ctx, supervise.Backoff{First: time.Second, Most: time.Hour, Proven: time.Hour},
			func(context.Context) error {
				switch lives++; lives {
				case 5:
					began = time.Now()
					return nil
				case 7:
					cancel()
				}
				return errLife
			})
		if waited := time.Since(began); waited > 2*time.Second {
			t.Errorf("waited %v for the life after the first failure since, want a second", waited)
		}
	})
}

func TestANudgeCutsTheWaitShort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		began, lives := time.Now(), 0
		nudge := make(chan struct{})
		time.AfterFunc(time.Second, func() { close(nudge) })
		backoff := supervise.Backoff{First: time.Hour, Most: time.Hour, Nudge: func() <-chan struct{} { return nudge }}
		_ = supervise.Run(ctx, backoff, func(context.Context) error {
			if lives++; lives == 2 {
				cancel()
			}
			return errLife
		})
		if waited := time.Since(began); waited != time.Second || lives != 2 {
			t.Errorf("%d lives, the last began after %v, want a second one after 1s", lives, waited)
		}
	})
}

// TestWaitsAreSpread by a quarter, around the configured wait.
func TestWaitsAreSpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		waits, lives := map[time.Duration]int{}, 0
		ended := time.Now()
		_ = supervise.Run(ctx, supervise.Backoff{First: 8, Most: 8, Proven: time.Hour}, func(context.Context) error {
			if waits[time.Since(ended)]++; lives == 1000 {
				cancel()
			}
			lives, ended = lives+1, time.Now()
			return errLife
		})
		if len(waits) != 4 || waits[0] != 1 || min(waits[7], waits[8], waits[9]) < 100 {
			t.Errorf("waits of 8 ns took (times, by ns) %v, want 7 to 9 ns, each often", waits)
		}
	})
}
