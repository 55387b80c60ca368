package daemon

import (
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestKernelLog: XIDs that the kernel logs and the driver does not report count while the
// configuration wants that.
func TestKernelLog(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	file := s.write("config.yaml", "version: v1\n")
	s.Args = []string{"--config-file", file}
	s.start()
	s.shows(8, 8)
	s.inject(simulator.Fault{Kind: simulator.KindLoggedXID, GPU: "1", XID: 119}) // nobody reads it

	s.write("config.yaml", "version: v1\nhealth: {kernelLog: true}\n")
	s.signal(s.Running(), syscall.SIGHUP)
	s.eventually("the kernel's log is read", func() bool {
		s.inject(simulator.Fault{Kind: simulator.KindLoggedXID, GPU: "3", XID: 119})
		return unhealthy(s.known()) > 0
	})
	s.shows(8, 7)
	s.inject(simulator.Fault{Kind: simulator.KindLoggedSXID, XID: 20034})
	s.says("an NVSwitch has failed", func(now status) bool {
		return len(now.NVSwitches) == 1 && strings.HasSuffix(now.NVSwitches[0], ": SXid 20034")
	})
}

// unhealthy counts the devices that kubelet knows as Unhealthy.
func unhealthy(devices map[string]string) (n int) {
	for _, state := range devices {
		if state == "Unhealthy" {
			n++
		}
	}
	return n
}
