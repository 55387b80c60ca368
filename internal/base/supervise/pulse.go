package supervise

import (
	"context"
	"errors"
)

// A Pulse shows that a loop is not stuck: the loop offers a heartbeat at each wait, and Check takes
// it. Create a Pulse with NewPulse.
type Pulse struct{ beats chan struct{} }

// NewPulse returns the Pulse of a loop.
func NewPulse() Pulse { return Pulse{make(chan struct{})} }

// Heartbeat returns the channel for the loop's heartbeats: a case of the select in which the loop
// waits.
func (p Pulse) Heartbeat() chan<- struct{} { return p.beats }

// Check returns nil once the loop waits, or an error if ctx ends first.
func (p Pulse) Check(ctx context.Context) error {
	select {
	case <-p.beats:
		return nil
	case <-ctx.Done():
		return errors.New("its loop makes no progress")
	}
}
