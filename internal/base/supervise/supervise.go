// Package supervise runs something that lives once, again and again: a life ends, and a new one
// begins. No other package begins lives again.
package supervise

import (
	"cmp"
	"context"
	"math/rand/v2"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// Backoff says how long to wait between a life that failed and the next.
type Backoff struct {
	// First is the wait after the first failure in a row; each further one doubles it, up to Most.
	First, Most time.Duration
	// Proven is how long a life must last for its failure to count as the first again.
	Proven time.Duration
	// Nudge, if not nil, returns a channel that is closed when waiting on has become pointless: the
	// next life then begins at once. It is called before each life, so that a nudge during the life
	// counts.
	Nudge func() <-chan struct{}
	// Clock is the clock to wait by; nil means the real one.
	Clock clock.Clock
}

// Run runs life until ctx ends, and then returns nil. A life that returns nil ended as it should:
// the next begins at once. A life that returns an error is followed by the next after the backoff;
// the error is logged here, once.
func Run(ctx context.Context, b Backoff, life func(context.Context) error) error {
	b.Clock = cmp.Or[clock.Clock](b.Clock, clock.RealClock{})
	if b.Nudge == nil {
		b.Nudge = func() <-chan struct{} { return nil }
	}
	wait := b.First
	for ctx.Err() == nil {
		nudge := b.Nudge()
		began := b.Clock.Now()
		err := life(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			wait = b.First
			continue
		}
		if b.Clock.Since(began) >= b.Proven {
			wait = b.First
		}
		pause := jitter(wait)
		klog.FromContext(ctx).Info("Will try again", "reason", err.Error(), "after", pause.Round(time.Millisecond).String())
		sleep(ctx, b.Clock, pause, nudge)
		wait = min(2*wait, b.Most)
	}
	return nil
}

// sleep waits for d, or until nudged or until ctx ends.
func sleep(ctx context.Context, c clock.Clock, d time.Duration, nudge <-chan struct{}) {
	timer := c.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-nudge:
	case <-timer.C():
	}
}

// jitter spreads waits by a quarter, so that a thousand nodes do not come back in step.
func jitter(d time.Duration) time.Duration {
	return d - d/8 + rand.N(d/4+1)
}
