// Package quiet is for tests whose clock is stepped beside goroutines that work in real time.
package quiet

import (
	"runtime/metrics"
	"time"
)

// Wait returns when no goroutine of this process has anything to do, but after the limit at the
// latest. On a machine that has much to do, hours of a clock that is stepped regardless go by while
// a request or a system call is under way.
func Wait(limit time.Duration) {
	busy := []metrics.Sample{
		{Name: "/sched/goroutines/running:goroutines"}, // this one, too
		{Name: "/sched/goroutines/runnable:goroutines"},
		{Name: "/sched/goroutines/not-in-go:goroutines"}, // the one that waits for signals, too, if there is one
	}
	for late := time.Now().Add(limit); time.Now().Before(late); {
		<-time.After(time.Millisecond) // the scheduler looks for data that came over sockets
		metrics.Read(busy)
		n := uint64(0)
		for _, sample := range busy {
			n += sample.Value.Uint64()
		}
		if n <= 2 {
			return
		}
	}
}
