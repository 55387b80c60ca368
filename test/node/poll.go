package node

import (
	"context"
	"fmt"
	"time"
)

// Poll asks often until ask has no error, and returns the last one if that does not happen in time.
// If it needs a daemon, Poll also ends with that; daemon may be nil.
func Poll(ctx context.Context, within time.Duration, daemon *Daemon, ask func(ctx context.Context) error) error {
	late := time.After(within)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	var ended <-chan struct{}
	if daemon != nil {
		ended = daemon.Ended()
	}
	for {
		err := ask(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ended:
			return fmt.Errorf("the daemon has ended: %w", daemon.Err())
		case <-late:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
