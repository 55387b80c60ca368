package nvidia

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// A worker makes calls into the driver, one at a time, for callers that cannot wait for ever. A call into the driver
// cannot be cancelled: one whose caller has given up keeps the worker until it returns, if it ever does.
//
// There is a goroutine only while a call is being made.
type worker struct {
	turn    chan struct{}        // holds a token while a call is being made
	current atomic.Pointer[call] // the call being made
}

// A call is one turn of a worker.
type call struct {
	settled atomic.Bool // by the worker, which has returned, or by the caller, which has given up: the first one
	late    atomic.Bool // somebody has waited for it until a deadline passed
	done    chan struct{}
}

func newWorker() *worker { return &worker{turn: make(chan struct{}, 1)} }

// do makes the call f when it is the caller's turn and waits until f returns or ctx ends. When the deadline of ctx
// passes the error is inventory.ErrNoAnswer; so it is, at once, while an earlier call hangs. After an error the caller
// must not touch what f writes. When f returns after its caller has given up, forsaken runs too, unless it is nil.
func (w *worker) do(ctx context.Context, f, forsaken func()) error {
	if w.hangs() {
		return fmt.Errorf("%w: an earlier call has not returned", inventory.ErrNoAnswer)
	}
	if err := w.take(ctx); err != nil {
		return err
	}
	return w.run(ctx, f, forsaken)
}

// hangs reports whether the call being made hangs: somebody has waited for it in vain.
func (w *worker) hangs() bool {
	c := w.current.Load()
	return c != nil && c.late.Load()
}

// take waits for the turn, also behind a call that hangs.
func (w *worker) take(ctx context.Context) error {
	if ctx.Err() == nil { // else no call may begin, though it be the turn
		select {
		case w.turn <- struct{}{}:
			return nil
		case <-ctx.Done():
		}
	}
	return w.current.Load().outlived(ctx)
}

// release gives the turn back.
func (w *worker) release() { <-w.turn }

// run makes the call f in the turn that the caller has taken, and gives the turn back when f has returned.
func (w *worker) run(ctx context.Context, f, forsaken func()) error {
	c := &call{done: make(chan struct{})}
	w.current.Store(c)
	go func() {
		f()
		if !c.settled.CompareAndSwap(false, true) && forsaken != nil {
			forsaken()
		}
		w.current.Store(nil)
		w.release()
		close(c.done)
	}()
	select {
	case <-c.done:
		return nil
	case <-ctx.Done():
	}
	if c.settled.CompareAndSwap(false, true) {
		return c.outlived(ctx)
	}
	<-c.done // f has returned
	return nil
}

// outlived says why a caller whose ctx ended goes without an answer. A call that outlives a deadline is late: nobody
// else waits for it. One whose caller was told to stop is not.
func (c *call) outlived(ctx context.Context) error {
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return ctx.Err()
	}
	if c != nil {
		c.late.Store(true)
	}
	return inventory.ErrNoAnswer
}
