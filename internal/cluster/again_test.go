package cluster

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"
)

// TestLookingAgain: the earliest time counts, and what was due at the end of a context is due no more.
func TestLookingAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAgain(clock.RealClock{})
		began := time.Now()
		ctx, end := context.WithCancel(t.Context())
		rings := func(want time.Duration) {
			t.Helper()
			changed := a.changed()
			<-changed
			if got := time.Since(began); got != want {
				t.Errorf("looked again after %v, want %v", got, want)
			}
		}
		a.after(ctx, time.Minute)
		a.after(ctx, time.Second)
		a.after(ctx, time.Hour)
		rings(time.Second)
		a.after(ctx, time.Hour) // a minute is over first
		rings(time.Minute)
		a.after(ctx, time.Second)
		end()
		a.after(t.Context(), time.Hour)
		rings(time.Hour + time.Minute)
	})
}
