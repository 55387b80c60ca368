package cluster

import (
	"context"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
)

// An again has a loop look again after a time. It is for one goroutine.
type again struct {
	clock clock.Clock
	feed  *feed.Feed[struct{}]
	due   time.Time       // when the feed is published next
	until <-chan struct{} // once it is closed, nothing is due
}

func newAgain(c clock.Clock) *again { return &again{clock: c, feed: feed.New(struct{}{})} }

// changed returns a channel that is closed when it is time to look again.
func (a *again) changed() <-chan struct{} {
	_, changed := a.feed.Latest()
	return changed
}

// after has the loop look again after a time, or earlier if that is due already. At the end of ctx nothing is due any more.
func (a *again) after(ctx context.Context, d time.Duration) {
	now := a.clock.Now()
	select {
	case <-a.until:
		a.due = time.Time{}
	default:
	}
	if due := now.Add(d); a.due.After(now) && !a.due.After(due) {
		return
	}
	a.due, a.until = now.Add(d), ctx.Done()
	over := a.clock.After(d)
	go func() {
		select {
		case <-ctx.Done():
		case <-over:
			a.feed.Publish(struct{}{})
		}
	}()
}
