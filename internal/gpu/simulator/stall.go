package simulator

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// A stall keeps calls from returning, for a time or until it is restored: those with a name, or
// all, on one GPU, or anywhere.
type stall struct {
	call    string
	slot    int // or anywhere
	delay   time.Duration
	counted bool // only the next calls stall, as many as are left
	left    uint64
}

func (s *stall) String() string {
	how := "hangs"
	if s.delay > 0 {
		how = fmt.Sprintf("takes %v longer", s.delay)
	}
	if s.counted {
		how += fmt.Sprintf(", %d times more", s.left)
	}
	return cmp.Or(s.call, "every call") + " " + how
}

// strikes reports whether a call on a GPU (nil: on none) is one that stalls.
func (s *stall) strikes(call string, g *gpu) bool {
	return (s.call == "" || s.call == call) && (s.slot == anywhere || g != nil && s.slot == g.slot) &&
		!(s.counted && s.left == 0)
}

// stallLocked returns when a call on a GPU (nil: on none) may go on. It gives up node.mu while it
// waits. Each stall strikes a call once: passed are those that have struck this one, and the result
// is passed with those that have since.
func (n *Node) stallLocked(call string, g *gpu, passed []*stall) []*stall {
	for !n.closed {
		i := slices.IndexFunc(n.stalls, func(s *stall) bool { return s.strikes(call, g) && !slices.Contains(passed, s) })
		if i < 0 {
			break
		}
		s := n.stalls[i]
		if s.counted {
			s.left--
		}
		passed = append(passed, s)
		n.sufferLocked(s)
	}
	return passed
}

// sufferLocked returns when a stall is over or restored. It gives up node.mu while it waits.
func (n *Node) sufferLocked(s *stall) {
	var over <-chan time.Time // never, of a hang
	if s.delay > 0 {
		timer := time.NewTimer(s.delay)
		defer timer.Stop()
		over = timer.C
	}
	for !n.closed && slices.Contains(n.stalls, s) {
		changed := n.changed
		n.mu.Unlock()
		select {
		case <-over:
			n.mu.Lock()
			return
		case <-changed:
			n.mu.Lock()
		}
	}
}
