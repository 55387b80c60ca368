// Package supervise runs a function repeatedly: after the end of a run, the next run starts.
package supervise

import (
	"cmp"
	"context"
	"math/rand/v2"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// Backoff configures the wait between a failed run and the next one.
type Backoff struct {
	// First is the wait after the first failure in a row. Each further failure doubles the wait, up to
	// Most.
	First, Most time.Duration
	// Proven is the duration of a run after which a failure counts as the first again.
	Proven time.Duration
	// Nudge may be nil. It returns a channel that is closed to start the next run immediately. Run
	// calls Nudge before each run: a nudge during the run counts.
	Nudge func() <-chan struct{}
	// Clock is used for waiting; nil means the real clock.
	Clock clock.Clock
}

// Run calls life until ctx ends, and then returns nil. After a nil result, the next run starts
// immediately. An error is logged once, and the next run starts after the backoff.
func Run(ctx context.Context, b Backoff, life func(context.Context) error) error {
	b.Clock = cmp.Or[clock.Clock](b.Clock, clock.RealClock{})
	if b.Nudge == nil {
		b.Nudge = func() <-chan struct{} { return nil }
	}
	wait := b.First
	for ctx.Err() == nil {
		nudge := b.Nudge()
		start := b.Clock.Now()
		err := life(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			wait = b.First
			continue
		}
		if b.Clock.Since(start) >= b.Proven {
			wait = b.First
		}
		pause := jitter(wait)
		klog.FromContext(ctx).Info("Will try again", "reason", err.Error(),
			"after", pause.Round(time.Millisecond).String())
		sleep(ctx, b.Clock, pause, nudge)
		wait = min(2*wait, b.Most)
	}
	return nil
}

// sleep waits for d, until nudge is closed, or until ctx ends.
func sleep(ctx context.Context, c clock.Clock, d time.Duration, nudge <-chan struct{}) {
	timer := c.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-nudge:
	case <-timer.C():
	}
}

// jitter varies a wait by a quarter: a thousand nodes do not retry at the same time.
func jitter(d time.Duration) time.Duration {
	return d - d/8 + rand.N(d/4+1)
}
