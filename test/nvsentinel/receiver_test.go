package nvsentinel_test

import (
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/nvsentinel"
)

// TestReceiver holds the stand-in to the cases to which make recipes holds the real connector.
func TestReceiver(t *testing.T) {
	t.Parallel()
	r := nvsentinel.New(t)
	nvsentinel.Check(t, r.Socket, r)
}
