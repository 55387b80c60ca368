package kubeapi

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
)

const (
	// The limit of the delay after the first failure; each further failure in a row doubles it, up to
	// maxBackoff.
	minBackoff = time.Second
	maxBackoff = 5 * time.Minute
	// restoreSpread is the longest delay after the watch works again. After a long outage the watches
	// of a cluster return at different times; this delay spreads the writers of one node, and nodes
	// whose watches return together.
	restoreSpread = 5 * time.Second
)

// An unavailableError is the error of a request without a response, or with a response 5xx without
// Retry-After.
type unavailableError struct {
	error
	restored <-chan struct{} // closed when the watch works again after the request was sent
}

func (a *unavailableError) Unwrap() error { return a.error }

// isUnavailable reports whether err means an unavailable API server.
func isUnavailable(err error) bool {
	status := statusOf(err)
	return err != nil && (status == nil || status.Code >= http.StatusInternalServerError && retryAfter(err) == 0)
}

// Backoff returns the delay after a number of failures in a row; err is the last one. The delay is
// random up to a doubling limit, because the nodes of a cluster must not return together. The API
// server's Retry-After is the same for all nodes, and is added. A missing right is no
// special case: a starting API server also responds 403 before reading the roles.
func Backoff(err error, failures int) time.Duration {
	limit := maxBackoff
	if shift := max(failures, 1) - 1; shift < 9 {
		limit = min(minBackoff<<shift, maxBackoff)
	}
	delay := rand.N(limit)
	return delay + retryAfter(err)
}

// maxRetryAfter limits the delay that a response can request.
const maxRetryAfter = 10 * time.Minute

// retryAfter returns the delay that a response requests; 0 if there is none.
func retryAfter(err error) time.Duration {
	seconds, _ := apierrors.SuggestsClientDelay(err)
	return min(time.Duration(seconds)*time.Second, maxRetryAfter)
}

// A Retry counts the failures in a row of one task, and logs the first of them and the next
// success. What is the name of the task in the log.
type Retry struct {
	What     string
	failures int
}

// Failed records a failure. Failed returns the delay of the next attempt, and a channel that
// is closed when the watch works again; nil if the watch does not matter. After the channel is closed,
// the delay is RestoreDelay.
func (r *Retry) Failed(ctx context.Context, err error) (delay time.Duration, restored <-chan struct{}) {
	log := klog.FromContext(ctx)
	r.failures++
	delay = Backoff(err, r.failures)
	if r.failures == 1 {
		log.Info("Cannot talk to the API server; retrying until it works", "task", r.What, "reason", err.Error())
	} else {
		log.V(2).Info("Cannot talk to the API server", "task", r.What, "reason", err.Error(), "after",
			delay.Round(time.Millisecond).String())
	}
	var away *unavailableError
	if errors.As(err, &away) {
		restored = away.restored
	}
	return delay, restored
}

// Succeeded records a success.
func (r *Retry) Succeeded(ctx context.Context) {
	if r.failures > 0 {
		klog.FromContext(ctx).Info("The API server accepts requests again", "task", r.What)
	}
	r.failures = 0
}

// RestoreDelay returns a random delay of requests after the watch works again.
func RestoreDelay() time.Duration { return rand.N(restoreSpread) }

// RunWithRetry calls step at once, and again each time one of the channels of wake is closed, until
// ctx ends. Calls do not overlap. After an error, RunWithRetry waits for Backoff, or until shortly after the
// watch of an unavailable API server works again. RunWithRetry logs the first of several errors in a
// row, and the next success; what is the name of the task in the log. The call of wake comes before
// the call of step, to miss no change.
func RunWithRetry(ctx context.Context, c clock.Clock, what string, wake func() []<-chan struct{},
	step func(context.Context) error) {
	retry := Retry{What: what}
	for {
		events := wake()
		err := step(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			if retry.Succeeded(ctx); !feed.WaitAny(ctx, events...) {
				return
			}
			continue
		}
		delay, restored := retry.Failed(ctx, err)
		elapsed := c.After(delay)
		select {
		case <-ctx.Done():
			return
		case <-elapsed:
			continue
		case <-restored:
		}
		select {
		case <-ctx.Done():
			return
		case <-elapsed:
		case <-c.After(RestoreDelay()):
		}
	}
}
