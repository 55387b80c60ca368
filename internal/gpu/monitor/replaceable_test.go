package monitor_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
)

// TestProcessWithHangingCall: the process waits for the call for ten seconds and then ends, instead
// of being replaced.
func TestProcessWithHangingCall(t *testing.T) {
	replaced := fmt.Errorf("%w: its library is another one now", inventory.ErrDriverReplaced)
	other := errors.New("no configuration")
	for name, test := range map[string]struct {
		err   error
		hangs time.Duration
		after time.Duration
		want  error // nil for an error that requests no new process
	}{
		"nothing hangs":       {replaced, 0, 0, replaced},
		"a call that returns": {replaced, 2500 * time.Millisecond, 2500 * time.Millisecond, replaced},
		"a call that hangs":   {replaced, time.Hour, 10 * time.Second, nil},
		"another error":       {other, time.Hour, 0, other},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				got := monitor.Replaceable(t.Context(), test.err, func() []inventory.Call {
					if time.Since(start) >= test.hangs {
						return nil
					}
					return []inventory.Call{{Function: "nvmlDeviceGetMemoryInfo", GPU: 3, Since: start}}
				})
				if took := time.Since(start); took != test.after {
					t.Errorf("it took %v, want %v", took, test.after)
				}
				if test.want != nil {
					if !errors.Is(got, test.want) {
						t.Errorf("got %v, want %v", got, test.want)
					}
					return
				}
				if errors.Is(got, inventory.ErrDriverReplaced) || !strings.Contains(got.Error(),
					"nvmlDeviceGetMemoryInfo of GPU 3 does not return") {
					t.Errorf("got %v", got)
				}
			})
		})
	}
}
