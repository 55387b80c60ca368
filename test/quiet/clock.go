package quiet

import (
	"time"

	"k8s.io/utils/clock"
)

// A Clock is a stepped clock that goes on by itself, too: what waits by it goes on without a step,
// and after a step what is old is old.
type Clock struct {
	clock.RealClock // timers run in real time
	stepped         clock.PassiveClock
	began           time.Time
}

// Ticking returns a Clock that is ahead of a stepped one by the time since the call.
func Ticking(stepped clock.PassiveClock) Clock { return Clock{stepped: stepped, began: time.Now()} }

// Now returns what the stepped clock shows, and the real time since the Clock was made.
func (c Clock) Now() time.Time { return c.stepped.Now().Add(time.Since(c.began)) }

// Since returns the time since t by Now.
func (c Clock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }
