package kubelet

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/utils/clock"
)

const (
	// settleTime is how long after a call by which kubelet allocates devices the next question about
	// pods is sent. Kubelet inserts devices into what pods hold within microseconds after the answer
	// to Allocate. The rest is for a kubelet that waits for a CPU.
	settleTime = 50 * time.Millisecond
	// chooseTime is how long the call of Allocate is waited for that follows GetPreferredAllocation.
	// It comes within microseconds, or after a tenth of a second where kubelet waits for a CPU. A
	// kubelet that ends or fails the pod sends none.
	chooseTime = time.Second
	// hurryAfter is how long a question waits for a pause of settleTime. From then on a pause of
	// hurriedTime is enough: a kubelet that allocates again and again within settleTime does not wait
	// for a CPU for so long.
	hurryAfter  = time.Second
	hurriedTime = 10 * time.Millisecond
	// listPause is the shortest time between two questions about pods. Kubelet refuses more than 100
	// questions a second, of all programs together, and more than 10 at once.
	listPause = 25 * time.Millisecond
)

// A pace says when kubelet is asked about pods. A question about them has kubelet forget pods that
// have ended, and with them the devices that it is allocating to a pod at that moment: it would
// give them to the next pod, too (kubernetes/kubernetes#137534). So none is sent while kubelet
// allocates.
type pace struct {
	clock clock.Clock

	mu    sync.Mutex // guards all following fields
	calls int        // by which kubelet allocates now
	ended time.Time  // the last of them
	more  bool       // a call of Allocate follows that one
	next  time.Time  // no question is sent before
}

// allocating notes that a call begins by which kubelet allocates devices. It returns at once. The
// function that it returns is called with whether a call of Allocate follows.
func (p *pace) allocating() (ended func(more bool)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls++
	return func(more bool) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.calls--
		p.ended, p.more = p.clock.Now(), more
	}
}

// begin waits until a question may be sent, and notes that it is. It fails at the end of ctx.
func (p *pace) begin(ctx context.Context) error {
	began := p.clock.Now()
	for {
		pause := settleTime
		if p.clock.Since(began) >= hurryAfter {
			pause = hurriedTime
		}
		wait := p.tryBegin(pause)
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

// tryBegin returns when to try again. It returns 0 if the question is sent now: no call was made
// for as long as pause.
func (p *pace) tryBegin(pause time.Duration) (wait time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.clock.Now()
	if p.calls > 0 {
		return pause
	}
	quiet := p.ended.Add(pause)
	if p.more {
		quiet = p.ended.Add(chooseTime)
	}
	if wait := max(quiet.Sub(now), p.next.Sub(now)); wait > 0 {
		return min(wait, pause) // a call of Allocate may end a longer one
	}
	p.next = now.Add(listPause)
	return 0
}
