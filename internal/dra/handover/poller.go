package handover

import (
	"context"
	"maps"
	"sync"
	"time"

	"k8s.io/utils/clock"
)

// A poller runs one query at a time in the background of a loop.
type poller struct {
	first, most time.Duration // between two questions, longer each time
	pause       time.Duration
	ready       bool // it is time for the next question
	busy        bool
	last        map[string]uint64 // what was asked about
	timer       clock.Timer
	answers     chan evidence
	asked       sync.WaitGroup
}

func newPoller(c clock.WithTicker, first, most time.Duration) *poller {
	timer := c.NewTimer(time.Hour)
	timer.Stop()
	return &poller{first: first, most: most, pause: first, ready: true, timer: timer, answers: make(chan evidence, 1)}
}

// start asks about GPUs, if there are any, no question is under way, and it is time or the question
// is another one.
func (q *poller) start(ctx context.Context, epochs map[string]uint64,
	ask func(context.Context, map[string]uint64) evidence) {
	if q.busy || len(epochs) == 0 || !q.ready && maps.Equal(epochs, q.last) {
		return
	}
	if !maps.Equal(epochs, q.last) { // another question
		q.pause, q.last = q.first, epochs
	}
	q.busy, q.ready = true, false
	q.asked.Go(func() { q.answers <- ask(ctx, epochs) })
}

// end takes in an answer and returns it. The same question is asked again after a pause, which
// becomes longer.
func (q *poller) end(a evidence) evidence {
	q.busy = false
	q.timer.Reset(q.pause)
	q.pause = min(2*q.pause, q.most)
	return a
}

func (q *poller) due() <-chan time.Time { return q.timer.C() }

// wait waits for the question that is under way. Its context has ended.
func (q *poller) wait() { q.asked.Wait() }
