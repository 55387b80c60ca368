package cudacheck

import (
	"context"
	"fmt"
	"sync"
)

// Tries are those that are under way, by UUID of the device, so that they can be ended from outside
// of the loop.
type tries struct {
	mu  sync.Mutex
	all map[string]*underWay
}

// An underWay is a try that has begun.
type underWay struct {
	cancel context.CancelFunc
	done   chan struct{}   // closed when the try has ended
	ended  <-chan struct{} // closed when its process has ended; nil if it had none. It is there when done is closed
}

func newTries() *tries { return &tries{all: map[string]*underWay{}} }

// begin has a try of a device be known. The context that it returns ends when the try is to be
// given up. The try calls end with what tells of the end of its process.
func (t *tries) begin(ctx context.Context, uuid string) (context.Context, func(ended <-chan struct{})) {
	ctx, cancel := context.WithCancel(ctx)
	u := &underWay{cancel: cancel, done: make(chan struct{})}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all[uuid] = u
	return ctx, func(ended <-chan struct{}) {
		u.ended = ended
		close(u.done)
		cancel()
	}
}

// Release gives up the proofs that are under way, and waits until their processes have ended. None
// begins while the driver is released. The error names a device whose process had not ended when
// ctx ended.
func (p *Proofs) Release(ctx context.Context) error {
	p.tries.mu.Lock()
	all := map[string]*underWay{}
	for uuid, u := range p.tries.all {
		u.cancel()
		all[uuid] = u
	}
	p.tries.mu.Unlock()
	for uuid, u := range all {
		if !within(ctx, u.done) || u.ended != nil && !within(ctx, u.ended) {
			return fmt.Errorf("a process of this program that tries CUDA on %s has not ended: a call into the driver may hang",
				uuid)
		}
	}
	return nil
}

// within waits for the end of something, and reports whether it came before the end of ctx.
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
