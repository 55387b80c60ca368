package kubelet

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/utils/clock"
)

const (
	// settleTime is how long after a call by which kubelet allocates devices the next question about pods is sent. Kubelet inserts devices
	// into what pods hold within microseconds after the answer to Allocate. The rest is for a kubelet that waits for a CPU.
	settleTime = 50 * time.Millisecond
	// chooseTime is how long the call of Allocate is waited for that follows GetPreferredAllocation. It comes within microseconds, or after a
	// tenth of a second where kubelet waits for a CPU. A kubelet that ends or fails the pod sends none.
	chooseTime = time.Second
	// listPause is the shortest time between two questions about pods. Kubelet refuses more than 100 questions a second, of all programs
	// together, and more than 10 at once.
	listPause = 25 * time.Millisecond
)

// A pace says when kubelet is asked about pods. A question about them has kubelet forget pods that have ended, and with them the devices
// that it is allocating to a pod at that moment: it would give them to the next pod, too (kubernetes/kubernetes#137534). So none is sent
// while kubelet allocates.
type pace struct {
	clock clock.Clock

	mu    sync.Mutex // guards all following fields
	calls int        // by which kubelet allocates now
	next  time.Time  // no question is sent before
}

// allocating notes that a call begins by which kubelet allocates devices. It returns at once. The function that it returns is called with
// whether a call of Allocate follows.
func (p *pace) allocating() (ended func(more bool)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls++
	return func(more bool) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.calls--
		pause := settleTime
		if more {
			pause = chooseTime
		}
		p.next = p.clock.Now().Add(pause)
	}
}

// begin waits until a question may be sent, and notes that it is. It fails at the end of ctx: a kubelet that allocates all the time is not
// asked.
func (p *pace) begin(ctx context.Context) error {
	for {
		wait := p.tryBegin()
		if wait == 0 {
			return nil
		}
		timer := p.clock.NewTimer(wait)
		select {
		case <-timer.C():
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("kubelet is not asked which pods hold devices while it allocates devices to pods: %w", ctx.Err())
		}
	}
}

// tryBegin returns when to try again. It returns 0 if the question is sent now.
func (p *pace) tryBegin() (wait time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.clock.Now()
	switch wait := p.next.Sub(now); {
	case p.calls > 0:
		return settleTime
	case wait > 0:
		return min(wait, settleTime) // a call of Allocate may end a longer one
	}
	p.next = now.Add(listPause)
	return 0
}
