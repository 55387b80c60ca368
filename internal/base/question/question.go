// Package question asks another program once for all concurrent callers.
package question

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"k8s.io/utils/clock"
)

// Timeout is the longest wait of a caller before its question is sent.
const Timeout = 10 * time.Second

// A Question has answers of type T, which all callers share.
type Question[T any] struct {
	clock clock.PassiveClock
	fresh time.Duration
	begin func(context.Context) error
	sent  atomic.Uint64 // how many questions were sent

	turn       chan struct{} // full while a caller asks; guards all following fields
	number     uint64        // the last answered question
	answer     T
	answerTime time.Time
}

// New returns a question whose answer is reused until it is older than fresh. begin waits until the
// question may be sent; after an error it is not sent. A nil begin sends at once.
func New[T any](c clock.PassiveClock, fresh time.Duration, begin func(context.Context) error) *Question[T] {
	return &Question[T]{clock: c, fresh: fresh, begin: begin, turn: make(chan struct{}, 1)}
}

// Ask returns the answer, which it gets by send. It returns an error of send or begin, or when ctx
// ends or the Timeout is over while another caller asks. Callers that came before the question was
// sent share its answer.
func (q *Question[T]) Ask(ctx context.Context, send func() (T, error)) (answer T, err error) {
	before := q.sent.Load()
	limited, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	select {
	case q.turn <- struct{}{}:
		defer func() { <-q.turn }()
	case <-limited.Done():
		return answer, fmt.Errorf("wait for the answer to an earlier question: %w", limited.Err())
	}
	if old := q.fresh == 0 || q.clock.Since(q.answerTime) > q.fresh; old && q.number <= before {
		if q.begin != nil {
			if err := q.begin(limited); err != nil {
				return answer, err
			}
		}
		number := q.sent.Add(1)
		if answer, err = send(); err != nil {
			return answer, err
		}
		q.number, q.answer, q.answerTime = number, answer, q.clock.Now()
	}
	return q.answer, nil
}
