package kubeapi

import (
	"context"
	"net/http"
	"testing"
	"time"
)

// TestIsUnavailable: an answer says that the API server is there, but for one with 5xx and without a time
// to wait.
func TestIsUnavailable(t *testing.T) {
	t.Parallel()
	for err, want := range map[error]bool{
		nil: false, context.DeadlineExceeded: true,
		&StatusError{Code: http.StatusServiceUnavailable}:                          true,
		&StatusError{Code: http.StatusInternalServerError}:                         true,
		&StatusError{Code: http.StatusServiceUnavailable, RetryAfter: time.Second}: false,
		&StatusError{Code: http.StatusTooManyRequests}:                             false,
		&StatusError{Code: http.StatusForbidden}:                                   false,
	} {
		if got := isUnavailable(err); got != want {
			t.Errorf("%+v: %v, want %v", err, got, want)
		}
	}
}
