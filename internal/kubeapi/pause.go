package kubeapi

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

const (
	// The longest pause after the first failure in a row; each further one doubles it.
	minPause = time.Second
	maxPause = 5 * time.Minute
)

// Pause returns how long to wait after failures in a row, the last with err: a random time up to a limit that doubles, so that the
// nodes of a cluster do not come back in step; and not less than the API server asks for. A right that is missing is no special case: an
// API server that starts answers 403, too, until it has read the roles.
func Pause(err error, failures int) time.Duration {
	limit := maxPause
	if shift := max(failures, 1) - 1; shift < 9 {
		limit = min(minPause<<shift, maxPause)
	}
	pause := rand.N(limit)
	var refused *Refused
	if errors.As(err, &refused) && refused.RetryAfter > 0 {
		pause = refused.RetryAfter + rand.N(refused.RetryAfter/4+1)
	}
	return pause
}

// Keep calls step at once, and then each time one of the channels that wake returns is closed, one call after the other, until ctx
// ends. After an error it calls step again after a Pause, and not before. It logs the first of several errors in a row, and when
// step works again; what is what step does. The channels are taken before step, so that nothing is missed.
func Keep(ctx context.Context, c clock.Clock, what string, wake func() []<-chan struct{}, step func(context.Context) error) {
	log := klog.FromContext(ctx)
	failures := 0
	for {
		channels := wake()
		err := step(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			if failures > 0 {
				log.Info("The API server takes requests again", "task", what)
			}
			failures = 0
			if !anyOf(ctx, channels) {
				return
			}
			continue
		}
		failures++
		pause := Pause(err, failures)
		if failures == 1 {
			log.Info("Cannot talk to the API server; trying until it works", "task", what, "reason", err.Error())
		} else {
			log.V(2).Info("Cannot talk to the API server", "task", what, "reason", err.Error(), "after", pause.Round(time.Millisecond).String())
		}
		select {
		case <-ctx.Done():
			return
		case <-c.After(pause):
		}
	}
}

// anyOf waits until one of the channels is closed; it reports false if ctx ended first.
func anyOf(ctx context.Context, channels []<-chan struct{}) bool {
	if len(channels) == 1 {
		select {
		case <-ctx.Done():
			return false
		case <-channels[0]:
			return true
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	woken := make(chan struct{}, len(channels))
	for _, channel := range channels {
		go func() {
			select {
			case <-ctx.Done():
			case <-channel:
				woken <- struct{}{}
			}
		}()
	}
	select {
	case <-ctx.Done():
		return false
	case <-woken:
		return true
	}
}
