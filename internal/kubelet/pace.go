package kubelet

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/utils/clock"
)

const (
	// settleTime is the pause between an allocating call of the kubelet and the next query
	// about pods. The kubelet records the devices of a pod within microseconds after the
	// answer to Allocate. The rest of the pause is for a kubelet that waits for a CPU.
	settleTime = 50 * time.Millisecond
	// chooseTime is how long to wait for the call of Allocate after GetPreferredAllocation.
	// The call comes within microseconds, or after a tenth of a second if the kubelet waits
	// for a CPU. A kubelet that stops or fails the pod sends no call.
	chooseTime = time.Second
	// hurryAfter is how long a question waits for a pause of settleTime. Afterwards a pause of
	// hurriedTime suffices: a kubelet that allocates repeatedly within settleTime does not wait for a
	// CPU.
	hurryAfter  = time.Second
	hurriedTime = 10 * time.Millisecond
	// listPause is the shortest time between two questions about pods. The kubelet refuses more than
	// 100 questions a second from all programs together, and more than 10 at once.
	listPause = 25 * time.Millisecond
)

// A pace decides when to query the kubelet about pods. A query makes the kubelet forget
// ended pods, and also the devices just being allocated: the next pod would get the same
// devices (kubernetes/kubernetes#137534). So queries wait while the kubelet allocates.
type pace struct {
	clock clock.Clock

	mu    sync.Mutex // guards all following fields
	calls int        // allocating calls in progress
	ended time.Time  // the last of them
	more  bool       // a call of Allocate follows
	next  time.Time  // no question is sent before
}

// allocating records the beginning of a call by which kubelet allocates devices, and returns at
// once. The caller calls the returned function at the end, and says whether a call of Allocate
// follows.
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

// begin waits until a question may be sent, and records the question. It returns an error when ctx
// ends.
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
			return fmt.Errorf("the kubelet is not asked which pods hold devices while it allocates devices to pods: %w",
				ctx.Err())
		}
	}
}

// tryBegin returns when to try again. It returns 0 if the question is sent now, because no call was
// made during the pause.
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
		return min(wait, pause) // a call of Allocate may end a longer pause
	}
	p.next = now.Add(listPause)
	return 0
}
