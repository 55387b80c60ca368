package kubeapi

import (
	"context"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// TestIsUnavailable: an answer says that the API server is there, but for one with 5xx and without a time
// to wait.
func TestIsUnavailable(t *testing.T) {
	t.Parallel()
	for err, want := range map[error]bool{
		nil: false, context.DeadlineExceeded: true,
		apierrors.NewServiceUnavailable("a"):         true,
		apierrors.NewInternalError(context.Canceled): true,
		apierrors.NewTimeoutError("a", 1):            false,
		apierrors.NewTooManyRequestsError("a"):       false,
		apierrors.NewUnauthorized("a"):               false,
	} {
		if got := isUnavailable(err); got != want {
			t.Errorf("%+v: %v, want %v", err, got, want)
		}
	}
}
