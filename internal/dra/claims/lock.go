package claims

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// locks are those of claims and GPUs: calls of kubelet's that are about different claims run beside
// each other. The call that asked first gets a lock first.
type locks struct {
	mu   sync.Mutex               // guards the following field
	tail map[string]chan struct{} // of who asked last for a lock, by name; closed when that gives it back
}

// heldLocks are the locks that a call or the loop has.
type heldLocks struct {
	locks    *locks
	names    []string
	released []chan struct{}
	// waited says that another call or the loop had a lock when it was asked for.
	waited bool
	// patience is how long it waits for each lock; 0 for as long as the call may.
	patience time.Duration
}

// begin returns a holding without locks.
func (l *locks) begin() *heldLocks { return &heldLocks{locks: l} }

// soon is begin for the loop: it does not wait for calls, which may be waiting for the driver, and
// tries again.
func (l *locks) beginBriefly() *heldLocks { return &heldLocks{locks: l, patience: lockPatience} }

// end gives all locks back.
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

// claim takes the lock of a claim. It comes before those of GPUs.
func (h *heldLocks) claim(ctx context.Context, uid string) error { return h.take(ctx, "claim "+uid) }

// gpus takes the locks of GPUs that are not taken yet. All that a call needs are taken at once:
// their order is what keeps two calls from waiting for each other.
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
			go func() { // who asked later waits for this one
				<-before
				h.locks.release(name, until)
			}()
			return fmt.Errorf("wait until another call for the claim or its GPUs has ended: %w", ctx.Err())
		}
	}
	h.names, h.released = append(h.names, name), append(h.released, until)
	return nil
}
