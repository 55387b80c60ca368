package daemon

import (
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestReload: SIGHUP does not end a daemon that has only begun. It puts a changed configuration file
// in force; an invalid file changes nothing.
func TestReload(t *testing.T) {
	t.Parallel()
	const shared = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n"
	s := open(t, node.Setup{})
	file := s.write("config.yaml", "version: v1\n")
	s.Args = []string{"--config-file", file}
	s.start()
	s.logs("Starting")
	s.signal(s.Running(), syscall.SIGHUP)
	s.allocatable(8)

	// The devices that the new configuration does not have leave slowly; they are Unhealthy at once.
	s.write("config.yaml", shared)
	s.signal(s.Running(), syscall.SIGHUP)
	s.allocatable(16)

	s.write("config.yaml", shared+"flags: {migStrategy: many}\n")
	s.signal(s.Running(), syscall.SIGHUP)
	s.says("the file is not valid", func(now status) bool { return strings.Contains(now.ConfigError, `"many"`) })
	s.allocatable(16)

	s.write("config.yaml", "version: v1\n")
	s.signal(s.Running(), syscall.SIGHUP)
	s.allocatable(8)
	s.says("the file is valid", func(now status) bool { return now.ConfigError == "" })

	// What the plan leaves out is told, and the rest is served.
	s.write("config.yaml", "selectors: [{indices: [0], exclude: true}, {indices: [1], rename: nvidia.com/many, replicas: 100000000000}, {indices: [9], replicas: 2}]\n")
	s.signal(s.Running(), syscall.SIGHUP)
	s.allocatable(6)
	s.says("what is left out, and why", func(now status) bool {
		return len(now.LeftOut) == 2 && strings.Contains(now.LeftOut[0], "excluded by selectors[0]") &&
			strings.Contains(now.LeftOut[1], "kubelet accepts") &&
			len(now.Warnings) == 2 && strings.Contains(now.Warnings[0], "selectors[2] selects no device") &&
			strings.Contains(now.Warnings[1], "devices fit")
	})
}
