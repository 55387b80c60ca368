package daemon

import (
	"encoding/json"
	"errors"
	"os/exec"
	"slices"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestDriverPreflight: beside a daemon, driver preflight names the pods with devices by the kubelet's
// account.
func TestDriverPreflight(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	s.start()
	s.shows(8, 8)
	s.admitOf("p", gpu, 1)
	var report struct {
		Verdict string
		Holders []struct {
			Kind, Name string
			Resources  []string
		}
	}
	s.eventually("preflight names the pod", func() bool {
		out, err := exec.CommandContext(t.Context(), binary, "driver", "preflight", "-o", "json", "--control-socket", s.ControlSocket(),
			"--pod-resources-socket", s.PodResourcesSocket()).Output()
		var ended *exec.ExitError
		if !errors.As(err, &ended) || ended.ExitCode() != 2 || json.Unmarshal(out, &report) != nil {
			t.Logf("%v: %s", err, out)
			return false
		}
		return true
	})
	if report.Verdict != "in use" || len(report.Holders) != 1 || report.Holders[0].Kind != "pod" ||
		!slices.Equal(report.Holders[0].Resources, []string{gpu}) {
		t.Errorf("the report: %+v", report)
	}
}
