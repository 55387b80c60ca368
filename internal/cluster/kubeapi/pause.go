package kubeapi

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
)

const (
	// The longest pause after the first failure in a row; each further one doubles it.
	minPause = time.Second
	maxPause = 5 * time.Minute
	// backSpread is the longest pause after the watch works again. The watches of a cluster come back
	// at different times after a long outage; this spreads the writers of a node, and those of nodes
	// whose watches came back at once.
	backSpread = 5 * time.Second
)

// An awayError is the error of a request that the API server did not answer, or answered with 5xx
// without a time to wait.
type awayError struct {
	error
	back <-chan struct{} // is closed when the watch works again after the request was sent
}

func (a *awayError) Unwrap() error { return a.error }

// isAway reports whether err says that the API server is away.
func isAway(err error) bool {
	var refused *Refused
	return err != nil && (!errors.As(err, &refused) || refused.Code >= http.StatusInternalServerError &&
		refused.RetryAfter == 0)
}

// Pause returns how long to wait after failures in a row, the last with err: a random time up to a
// limit that doubles, so that the nodes of a cluster do not come back in step; that comes after
// what the API server asks for, as it asks all of them for the same. A right that is missing is no
// special case: an API server that starts answers 403, too, until it has read the roles.
func Pause(err error, failures int) time.Duration {
	limit := maxPause
	if shift := max(failures, 1) - 1; shift < 9 {
		limit = min(minPause<<shift, maxPause)
	}
	pause := rand.N(limit)
	var refused *Refused
	if errors.As(err, &refused) {
		pause += refused.RetryAfter
	}
	return pause
}

// Keep calls step at once, and then each time one of the channels that wake returns is closed, one
// call after the other, until ctx ends. After an error it calls step again after a Pause, and not
// before; but soon after the watch works again, if the error of a Client's request says that the
// API server was away. It logs the first of several errors in a row, and when step works again;
// what names step there. The channels are taken before step, so that nothing is missed.
func Keep(ctx context.Context, c clock.Clock, what string, wake func() []<-chan struct{},
	step func(context.Context) error) {
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
			if !feed.WaitAny(ctx, channels...) {
				return
			}
			continue
		}
		failures++
		pause := Pause(err, failures)
		if failures == 1 {
			log.Info("Cannot talk to the API server; trying until it works", "task", what, "reason", err.Error())
		} else {
			log.V(2).Info("Cannot talk to the API server", "task", what, "reason", err.Error(), "after",
				pause.Round(time.Millisecond).String())
		}
		var back <-chan struct{}
		var away *awayError
		if errors.As(err, &away) {
			back = away.back
		}
		over := c.After(pause)
		select {
		case <-ctx.Done():
			return
		case <-over:
			continue
		case <-back:
		}
		select {
		case <-ctx.Done():
			return
		case <-over:
		case <-c.After(rand.N(backSpread)):
		}
	}
}
