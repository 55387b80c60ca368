package monitor_test

import (
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
)

// TestDeviceNodesThatAppearLaterArePublished: the first CUDA program loads nvidia-uvm, and the setup of
// an IMEX domain creates its channel. Containers need both.
func TestDeviceNodesThatAppearLaterArePublished(t *testing.T) {
	n := newNode(1)
	n.control = inventory.NodeControl
	watch(t, n, func(t *testing.T, m *monitor.Monitor) {
		for _, control := range []inventory.ControlNodes{
			inventory.NodeControl | inventory.NodeUVM,
			inventory.NodeControl | inventory.NodeUVM | inventory.NodeIMEXChannel0,
			inventory.NodeControl,
		} {
			n.set(func(n *node) { n.control = control })
			pass(31 * time.Second)
			if got := m.Snapshots().Value().Control; got != control {
				t.Errorf("the Snapshot has %v, the node %v", got, control)
			}
		}
	})
}
