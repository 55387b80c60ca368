package simulator

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// A stall keeps calls from returning, for a time or until restored: calls with a name, or all, on
// one GPU, or anywhere.
type stall struct {
	call           string
	slot           int // or anywhere
	delay          time.Duration
	hasCount       bool // only a number of calls stall
	remainingCalls uint64
}

func (s *stall) String() string {
	how := "hangs"
	if s.delay > 0 {
		how = fmt.Sprintf("takes %v longer", s.delay)
	}
	if s.hasCount {
		how += fmt.Sprintf(", %d times more", s.remainingCalls)
	}
	return cmp.Or(s.call, "every call") + " " + how
}

// strikes reports whether a call on a GPU (nil: on none) stalls.
func (s *stall) strikes(call string, g *gpu) bool {
	return (s.call == "" || s.call == call) && (s.slot == anywhere || g != nil && s.slot == g.slot) &&
		!(s.hasCount && s.remainingCalls == 0)
}

// stallLocked returns when a call on a GPU (nil: on none) may continue. It releases node.mu during
// the wait. Each stall affects a call once: passed are the stalls that have affected this call, and
// the result adds the new ones.
func (n *Node) stallLocked(call string, g *gpu, passed []*stall) []*stall {
	for !n.closed {
		i := slices.IndexFunc(n.stalls, func(s *stall) bool {
			return s.strikes(call, g) && !slices.Contains(passed, s)
		})
		if i < 0 {
			break
		}
		s := n.stalls[i]
		if s.hasCount {
			s.remainingCalls--
		}
		passed = append(passed, s)
		n.sufferLocked(s)
	}
	return passed
}

// sufferLocked returns at the end of a stall. It releases node.mu during the wait.
func (n *Node) sufferLocked(s *stall) {
	var over <-chan time.Time // never for a hang
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
