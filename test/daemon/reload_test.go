package daemon

import (
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestReload: SIGHUP puts a changed configuration file in force; one that is not valid leaves what was.
func TestReload(t *testing.T) {
	t.Parallel()
	const shared = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n"
	s := open(t, node.Setup{})
	file := s.write("config.yaml", "version: v1\n")
	s.Args = []string{"--config-file", file}
	s.start()
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
}
