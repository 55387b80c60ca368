package kubelet

import (
	"testing"
	"time"
)

func TestLogIsBounded(t *testing.T) {
	t.Parallel()
	l := newEventLog()
	for range 2 * logLength {
		l.add(Event{Kind: Listed})
	}
	events, _ := l.after(0)
	if len(events) > logLength || len(events) < logLength/2 {
		t.Errorf("the log has %d events, want %d to %d", len(events), logLength/2, logLength)
	}
	newest, _ := l.after(2*logLength - 1)
	if len(newest) != 1 || newest[0].Seq != 2*logLength {
		t.Errorf("after the last but one come %v, want the last", newest)
	}
	if none, _ := l.after(2 * logLength); len(none) != 0 {
		t.Errorf("after the last come %v", none)
	}
}

func TestLimiter(t *testing.T) {
	t.Parallel()
	var l limiter
	now := time.Now()
	allowed := func(calls int) int {
		n := 0
		for range calls {
			if l.allow(now) {
				n++
			}
		}
		return n
	}
	if got := allowed(100); got != answersAtOnce {
		t.Errorf("%d calls at once were answered, want %d", got, answersAtOnce)
	}
	now = now.Add(50 * time.Millisecond)
	if got := allowed(100); got != 5 {
		t.Errorf("%d calls were answered 50 ms later, want 5", got)
	}
	now = now.Add(time.Hour)
	if got := allowed(100); got != answersAtOnce {
		t.Errorf("%d calls were answered after a rest, want %d", got, answersAtOnce)
	}
}
