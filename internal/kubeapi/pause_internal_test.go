package kubeapi

import (
	"context"
	"net/http"
	"testing"
	"testing/synctest"
	"time"
)

// TestIsAway: an answer says that the API server is there, but for one with 5xx and without a time to wait.
func TestIsAway(t *testing.T) {
	t.Parallel()
	for err, want := range map[error]bool{
		nil: false, context.DeadlineExceeded: true,
		&Refused{Code: http.StatusServiceUnavailable}:                          true,
		&Refused{Code: http.StatusInternalServerError}:                         true,
		&Refused{Code: http.StatusServiceUnavailable, RetryAfter: time.Second}: false,
		&Refused{Code: http.StatusTooManyRequests}:                             false,
		&Refused{Code: http.StatusForbidden}:                                   false,
	} {
		if got := isAway(err); got != want {
			t.Errorf("%+v: %v, want %v", err, got, want)
		}
	}
}

// TestAnyOf: each of the channels wakes, and nothing is left behind. Without channels only the end of the context does.
func TestAnyOf(t *testing.T) {
	for name, tt := range map[string]struct{ channels, closed int }{ // closed: its number; -1 for the context's end
		"one": {1, 0}, "the first of two": {2, 0}, "the second of two": {2, 1},
		"none": {0, -1}, "not the one": {1, -1}, "none of two": {2, -1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { // it fails if a goroutine does not end
				ctx, cancel := context.WithCancel(context.Background())
				var closing []chan struct{}
				var channels []<-chan struct{}
				for range tt.channels {
					c := make(chan struct{})
					closing, channels = append(closing, c), append(channels, c)
				}
				time.AfterFunc(time.Second, func() {
					if tt.closed < 0 {
						cancel()
					} else {
						close(closing[tt.closed])
					}
				})
				began := time.Now()
				if got := AnyOf(ctx, channels); got != (tt.closed >= 0) || time.Since(began) != time.Second {
					t.Errorf("AnyOf() = %v after %v", got, time.Since(began))
				}
				synctest.Wait()
			})
		})
	}
}
