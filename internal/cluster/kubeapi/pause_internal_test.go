package kubeapi

import (
	"context"
	"net/http"
	"testing"
	"time"
)

// TestIsAway: an answer says that the API server is there, but for one with 5xx and without a time
// to wait.
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
