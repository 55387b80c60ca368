package daemon

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"slices"
	"testing"

	now "github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestHolders: status --holders names the container of each device that a pod holds, by the kubelet's
// account at that moment, and says why where the kubelet does not answer. driver preflight names the
// pod.
func TestHolders(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	s.start()
	s.shows(8, 8)
	s.admitOf("p", gpu, 2)
	ask := func(more ...string) (told now.Status) {
		out, err := exec.CommandContext(t.Context(), binary, append([]string{"status", "-o", "json", "--control-socket",
			s.ControlSocket()}, more...)...).Output()
		if err == nil {
			err = json.Unmarshal(out, &told)
		}
		if err != nil {
			t.Log(err)
		}
		return told
	}
	s.eventually("status names the holders", func() bool { return len(ask("--holders").Holders) == 2 })
	for _, h := range ask("--holders").Holders {
		known := slices.ContainsFunc(ask().GPUs, func(d now.Device) bool { return d.UUID == h.Device })
		if h.Pod != "p" || h.Container == "" || h.Namespace == "" || h.Claim != "" || !known {
			t.Errorf("holder %+v", h)
		}
	}
	if told := ask(); told.Holders != nil || told.HoldersError != "" {
		t.Errorf("without --holders: %v, %s", told.Holders, told.HoldersError)
	}
	s.eventually("driver preflight names the pod", func() bool {
		var report struct {
			Verdict string
			Holders []struct {
				Kind, Name string
				Resources  []string
			}
		}
		out, err := exec.CommandContext(t.Context(), binary, "driver", "preflight", "-o", "json", "--control-socket", s.ControlSocket(),
			"--pod-resources-socket", s.PodResourcesSocket()).Output()
		t.Logf("%v: %s", err, out)
		var ended *exec.ExitError
		return errors.As(err, &ended) && ended.ExitCode() == 2 && json.Unmarshal(out, &report) == nil &&
			report.Verdict == "in use" && len(report.Holders) == 1 && report.Holders[0].Kind == "pod" &&
			slices.Equal(report.Holders[0].Resources, []string{gpu})
	})
	if err := os.Remove(s.PodResourcesSocket()); err != nil {
		t.Fatal(err)
	}
	s.Stop()
	s.eventually("status says why it does not name them", func() bool {
		told := ask("--holders")
		return told.HoldersError != "" && len(told.Holders) == 0 && len(told.GPUs) == 8
	})
}
