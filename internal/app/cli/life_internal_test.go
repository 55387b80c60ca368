package cli

import (
	"context"
	"errors"
	"io"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/logwriter"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// TestEndOfADaemon: an error is returned, or logged if the log is JSON. No new process is requested
// once this process is to end.
func TestEndOfADaemon(t *testing.T) {
	broken := errors.New("broken")
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for name, test := range map[string]struct {
		ctx  context.Context
		json bool
		err  error
		want error
	}{
		"well":                   {t.Context(), false, nil, nil},
		"well, in JSON":          {t.Context(), true, nil, nil},
		"broken":                 {t.Context(), false, broken, broken},
		"broken, in JSON":        {t.Context(), true, broken, ExitStatus(1)},
		"replaced, and it ended": {over, false, inventory.ErrDriverReplaced, inventory.ErrDriverReplaced},
	} {
		got := untilItEnds(test.ctx, func(_ context.Context, p *ownProcess) error {
			if p.log == nil || p.signals == nil {
				t.Errorf("%s: %+v", name, p)
			}
			p.json = test.json
			return test.err
		})
		if !errors.Is(got, test.want) || (got == nil) != (test.want == nil) {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}

// TestFormatOfTheLog: the format may change in both directions.
func TestFormatOfTheLog(t *testing.T) {
	p := &ownProcess{log: logwriter.New(io.Discard)}
	defer p.logAs(config.LogText)
	for i, format := range []config.LoggingFormat{config.LogText, config.LogJSON, config.LogJSON, config.LogText,
		config.LogText, config.LogJSON} {
		if p.logAs(format); p.json != (format == config.LogJSON) {
			t.Errorf("change %d to %v: JSON is %v", i, format, p.json)
		}
	}
}

// TestReexecutionsAreCounted: the count is in a variable, which is unset at first.
func TestReexecutionsAreCounted(t *testing.T) {
	for value, want := range map[string]int{"": 0, "2": 2, "x": 0} {
		if t.Setenv(reexecuted, value); reexecutions() != want {
			t.Errorf("%q: %d", value, reexecutions())
		}
	}
}

// TestMPSRoot: the control daemons need no directory of the host, and accept a given directory.
func TestMPSRoot(t *testing.T) {
	t.Setenv("MPS_ROOT", "")
	if root, given := mpsEnv("MPS_ROOT"); root != "/run/nvidia/mps" || !given {
		t.Errorf("got %q, %v", root, given)
	}
	t.Setenv("MPS_ROOT", "/mine")
	if root, given := mpsEnv("MPS_ROOT"); root != "/mine" || !given {
		t.Errorf("got %q, %v", root, given)
	}
	if other, given := mpsEnv("NO_SUCH_VARIABLE"); other != "" || given {
		t.Errorf("got %q, %v", other, given)
	}
}
