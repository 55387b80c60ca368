package daemon

import (
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

const (
	configLabel = "nvidia.com/device-plugin.config"
	nodeName    = "node-1"
)

// chosen is a node whose daemon takes its configuration from a label: whole has each GPU once,
// shared twice, and whole is the default.
func chosen(t *testing.T, label string) (*stage, *apiserver.Server) {
	t.Helper()
	s, server := openAgent(t, "", "--node-config-default", "whole")
	if err := os.Mkdir(s.Path("configs"), 0o700); err != nil {
		t.Fatal(err)
	}
	s.write("configs/whole", "version: v1\n")
	s.write("configs/shared", "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n")
	s.write("configs/broken", "version: v1\nflags: {migStrategy: many}\n")
	s.Args = append(s.Args, "--node-config-dir", s.Path("configs"))
	relabel(t, server, label)
	return s, server
}

func relabel(t *testing.T, server *apiserver.Server, label string) {
	t.Helper()
	err := server.ChangeNode(nodeName, func(n *corev1.Node) {
		n.Labels = map[string]string{}
		if label != "" {
			n.Labels[configLabel] = label
		}
	})
	if err != nil {
		t.Fatal(err)
	}
}

// registrations returns how often the daemon has registered.
func (s *stage) registrations() int {
	n := 0
	for _, e := range s.Events(0) {
		if e.Kind == standin.Registering {
			n++
		}
	}
	return n
}

// TestALabelOfTheNodeChoosesTheConfiguration: a change is a reload, a name that nobody knows and a
// broken file change nothing, and no registration ends.
func TestALabelOfTheNodeChoosesTheConfiguration(t *testing.T) {
	t.Parallel()
	s, server := chosen(t, "shared")
	s.start()
	s.allocatable(16)
	s.logs("shared")

	// A command in the daemon's container shows what the daemon does, and what it would do with
	// another file.
	plan := []string{"plan", "--simulate", s.Profile, "--node-config-dir", s.Path("configs")}
	if text := s.command(plan...); !strings.Contains(text, "nvidia.com/gpu: 16") {
		t.Errorf("plan prints:\n%s", text)
	}
	if text := s.command(append(plan, "--config-file", s.Path("configs/whole"))...); !strings.Contains(text,
		"nvidia.com/gpu: 8") {
		t.Errorf("plan prints:\n%s", text)
	}
	s.says("the file", func(now status) bool { return now.ConfigFile == s.Path("configs/shared") })

	relabel(t, server, "unknown")
	s.says("the label names no file", func(now status) bool { return strings.Contains(now.ConfigError, configLabel+"=unknown") })
	s.write("configs/unknown", "version: v1\nselectors: [{indices: [0], exclude: true}]\n")
	s.allocatable(7)
	s.says("the file is there", func(now status) bool { return now.ConfigError == "" && now.ConfigFile == s.Path("configs/unknown") })

	relabel(t, server, "broken")
	s.says("the file is broken", func(now status) bool { return strings.Contains(now.ConfigError, `"many"`) })
	s.allocatable(7)
	relabel(t, server, "")
	s.allocatable(8)
	s.says("all is well", func(now status) bool { return now.ConfigError == "" && now.ConfigFile == s.Path("configs/whole") })
	if n := s.registrations(); n != 1 {
		t.Errorf("the daemon registered %d times, want once", n)
	}
}

// TestTheLastConfigurationHoldsWhileTheAPIServerIsAway: a node that starts then offers what it did
// before; one that has never had a configuration offers the default, and corrects that.
func TestTheLastConfigurationHoldsWhileTheAPIServerIsAway(t *testing.T) {
	t.Parallel()
	s, server := chosen(t, "shared")
	server.Stop()
	s.start()
	s.allocatable(8)
	s.says("the label is not known, and why", func(now status) bool {
		return strings.Contains(now.ConfigError, "is not known") && strings.Contains(now.APIServerError, "refused")
	})
	if err := server.Resume(); err != nil {
		t.Fatal(err)
	}
	s.allocatable(16)
	s.says("the label is known", func(now status) bool { return now.ConfigError == "" && now.APIServerError == "" })
	s.eventually("the choice is saved", func() bool {
		text, err := os.ReadFile(s.Path("state/node-config.json"))
		return err == nil && strings.Contains(string(text), `"shared"`)
	})

	server.Stop()
	s.stop()
	mark := s.Mark()
	s.start()
	first := s.next(mark, standin.Listed)
	if len(first.Devices) != 16 {
		t.Errorf("the first list has %d devices, want those of the last configuration", len(first.Devices))
	}
	// The black hole does not keep it either.
	if err := server.Resume(); err != nil {
		t.Fatal(err)
	}
	server.SetBlackHole(true)
	s.stop()
	mark = s.Mark()
	s.start()
	if first := s.next(mark, standin.Listed); len(first.Devices) != 16 {
		t.Errorf("the first list has %d devices, want those of the last configuration", len(first.Devices))
	}
	server.SetBlackHole(false)
	relabel(t, server, "whole")
	s.allocatable(8)
}

// TestTheMPSControlDaemonFollowsTheLabel: it needs the same configuration as the device plugin.
func TestTheMPSControlDaemonFollowsTheLabel(t *testing.T) {
	t.Parallel()
	s, server := chosen(t, "shared")
	s.Args = append([]string{"mps-control-daemon", "--mps-root-ctr-path", s.Path("mps")}, s.Args...)
	s.start()
	s.logs(`"Chose the configuration file" path="` + s.Path("configs/shared") + `"`)
	relabel(t, server, "whole")
	s.logs(`"Configuration changed" path="` + s.Path("configs/whole") + `"`)
}
