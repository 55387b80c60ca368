package node

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// stop is an error that makes Wait give up at once.
type stop struct{ error }

// Unwrap returns the reason.
func (s stop) Unwrap() error { return s.error }

// Wait calls ask every interval until it returns nil. When ctx ends first, the error says what ask
// answered last before that.
func Wait(ctx context.Context, interval time.Duration, ask func(context.Context) error) error {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	last := errors.New("none")
	for {
		err := ask(ctx)
		if err == nil || errors.As(err, &stop{}) {
			return err
		}
		if ctx.Err() == nil {
			last = err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return fmt.Errorf("%w; last answer: %w", context.Cause(ctx), last)
		}
	}
}
