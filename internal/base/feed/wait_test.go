package feed_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
)

// TestWaitAny: each channel wakes. Without channels, or with a nil channel only, only the end of
// the context does.
func TestWaitAny(t *testing.T) {
	// number of the closed channel; -1 for the end of the context
	for name, tt := range map[string]struct{ channels, closed int }{
		"one": {1, 0}, "the first of two": {2, 0}, "the second of two": {2, 1},
		"none": {0, -1}, "not the one": {1, -1}, "none of two": {2, -1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				var closing []chan struct{}
				channels := []<-chan struct{}{nil}
				for range tt.channels {
					c := make(chan struct{})
					closing, channels = append(closing, c), append(channels, c)
				}
				time.AfterFunc(time.Second, func() {
					if tt.closed < 0 {
						cancel()
					} else {
						close(closing[tt.closed])
					}
				})
				began := time.Now()
				if got := feed.WaitAny(ctx, channels...); got != (tt.closed >= 0) || time.Since(began) != time.Second {
					t.Errorf("WaitAny() = %v after %v", got, time.Since(began))
				}
			})
		})
	}
}

// TestAlarm: the earliest time counts, and the end of the context cancels a due ring.
func TestAlarm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := new(feed.Alarm)
		began := time.Now()
		ctx, end := context.WithCancel(t.Context())
		rings := func(want time.Duration) {
			t.Helper()
			<-a.Rings()
			if got := time.Since(began); got != want {
				t.Errorf("it rings after %v, want %v", got, want)
			}
		}
		a.After(ctx, time.Minute)
		a.After(ctx, time.Second)
		a.After(ctx, time.Hour)
		rings(time.Second)
		a.After(ctx, time.Hour) // a minute is over first
		rings(time.Minute)
		a.After(ctx, time.Second)
		end()
		a.After(t.Context(), time.Hour)
		rings(time.Hour + time.Minute)
	})
}
