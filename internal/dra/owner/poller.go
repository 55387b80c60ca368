package owner

import (
	"context"
	"maps"
	"sync"
	"time"

	"k8s.io/utils/clock"
)

// A poller runs one query at a time in the background of a loop.
type poller struct {
	first, most time.Duration // interval between two queries, growing
	pause       time.Duration
	ready       bool // the next query is due
	busy        bool
	last        map[string]uint64 // GPUs of the last query
	timer       clock.Timer
	answers     chan evidence
	running     sync.WaitGroup
}

func newPoller(c clock.WithTicker, first, most time.Duration) *poller {
	timer := c.NewTimer(time.Hour)
	timer.Stop()
	return &poller{first: first, most: most, pause: first, ready: true, timer: timer, answers: make(chan evidence, 1)}
}

// start starts a query about GPUs, if there are any, no query is running, and the next
// query is due or about other GPUs.
func (q *poller) start(ctx context.Context, epochs map[string]uint64,
	ask func(context.Context, map[string]uint64) evidence) {
	if q.busy || len(epochs) == 0 || !q.ready && maps.Equal(epochs, q.last) {
		return
	}
	if !maps.Equal(epochs, q.last) { // other GPUs
		q.pause, q.last = q.first, epochs
	}
	q.busy, q.ready = true, false
	q.running.Go(func() { q.answers <- ask(ctx, epochs) })
}

// end handles the end of a query and returns its result. The same query is repeated after
// a growing pause.
func (q *poller) end(a evidence) evidence {
	q.busy = false
	q.timer.Reset(q.pause)
	q.pause = min(2*q.pause, q.most)
	return a
}

func (q *poller) due() <-chan time.Time { return q.timer.C() }

// wait waits for the running query, whose context has ended.
func (q *poller) wait() { q.running.Wait() }
