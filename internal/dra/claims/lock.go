package claims

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// locks are the locks of claims and GPUs, so that calls for different claims run
// concurrently. Waiting callers get a lock in the order of their calls.
type locks struct {
	mu   sync.Mutex               // guards the following field
	tail map[string]chan struct{} // the newest caller of each lock, by name; closed on release
}

// heldLocks are the locks that a call or the loop holds.
type heldLocks struct {
	locks    *locks
	names    []string
	released []chan struct{}
	// waited says that a lock was taken by another holder at first.
	waited bool
	// patience limits the wait for each lock; 0 for no limit beside ctx.
	patience time.Duration
}

// begin returns heldLocks without locks.
func (l *locks) begin() *heldLocks { return &heldLocks{locks: l} }

// beginBriefly is begin for the loop: it waits only lockPatience for each lock, because
// calls may wait for the driver. The loop retries.
func (l *locks) beginBriefly() *heldLocks { return &heldLocks{locks: l, patience: lockPatience} }

// end releases all locks.
func (h *heldLocks) end() {
	for i, name := range h.names {
		h.locks.release(name, h.released[i])
	}
	h.names, h.released = nil, nil
}

func (l *locks) release(name string, until chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.tail[name] == until {
		delete(l.tail, name)
	}
	close(until)
}

// gpus takes the locks of GPUs, except locks that are already held. Take all GPU locks of
// a call at once: their order prevents deadlocks.
func (h *heldLocks) claim(ctx context.Context, uid string) error { return h.take(ctx, "claim "+uid) }

// gpus takes the locks of GPUs, except locks that are already held. All GPU locks of a
// call must be taken at once: their order prevents deadlocks.
func (h *heldLocks) gpus(ctx context.Context, uuids []string) error {
	for _, uuid := range slices.Sorted(slices.Values(uuids)) {
		if err := h.take(ctx, "gpu "+uuid); err != nil {
			return err
		}
	}
	return nil
}

func (h *heldLocks) take(ctx context.Context, name string) error {
	if slices.Contains(h.names, name) {
		return nil
	}
	until := make(chan struct{})
	h.locks.mu.Lock()
	before := h.locks.tail[name]
	h.locks.tail[name] = until
	h.locks.mu.Unlock()
	if before != nil {
		h.waited = true
		if h.patience > 0 {
			limited, cancel := context.WithTimeout(ctx, h.patience)
			defer cancel()
			ctx = limited
		}
		select {
		case <-before:
		case <-ctx.Done():
			go func() { // later callers wait for the channel
				<-before
				h.locks.release(name, until)
			}()
			return fmt.Errorf("another call for the claim or its GPUs is in progress: %w", ctx.Err())
		}
	}
	h.names, h.released = append(h.names, name), append(h.released, until)
	return nil
}
