package cudacheck

import (
	"context"
	"fmt"
	"sync"
)

// Tries are the running tries, by UUID of the device, so that code outside the loop can cancel
// them.
type tries struct {
	mu  sync.Mutex
	all map[string]*runningTry
}

// A runningTry is a running try.
type runningTry struct {
	cancel context.CancelFunc
	done   chan struct{}   // closed when the try has ended
	ended  <-chan struct{} // closed when the process has exited; nil without a process; set before done is closed
}

func newTries() *tries { return &tries{all: map[string]*runningTry{}} }

// begin registers a try of a device. The returned context ends when the try is cancelled. The try
// calls end with a channel that is closed when its process has exited.
func (t *tries) begin(ctx context.Context, uuid string) (context.Context, func(ended <-chan struct{})) {
	ctx, cancel := context.WithCancel(ctx)
	u := &runningTry{cancel: cancel, done: make(chan struct{})}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all[uuid] = u
	return ctx, func(ended <-chan struct{}) {
		u.ended = ended
		close(u.done)
		cancel()
	}
}

// Release cancels the running proofs, and waits until their processes have exited. No proof starts
// while the driver is released. The error names a device whose process was still running when ctx
// ended.
func (p *Proofs) Release(ctx context.Context) error {
	p.tries.mu.Lock()
	all := map[string]*runningTry{}
	for uuid, u := range p.tries.all {
		u.cancel()
		all[uuid] = u
	}
	p.tries.mu.Unlock()
	for uuid, u := range all {
		if !within(ctx, u.done) || u.ended != nil && !within(ctx, u.ended) {
			return fmt.Errorf("a process of this program that tries CUDA on %s is still running: a call into the "+
				"driver may hang",
				uuid)
		}
	}
	return nil
}

// within waits until a channel is closed, and returns false if ctx ended first.
func within(ctx context.Context, end <-chan struct{}) bool {
	select {
	case <-end:
		return true
	default:
	}
	select {
	case <-end:
		return true
	case <-ctx.Done():
		return false
	}
}
