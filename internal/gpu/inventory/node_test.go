package inventory_test

import (
	"maps"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

func TestControlNodes(t *testing.T) {
	t.Parallel()
	want := map[inventory.ControlNodes]string{
		inventory.NodeControl: "nvidiactl", inventory.NodeUVM: "nvidia-uvm", inventory.NodeUVMTools: "nvidia-uvm-tools",
		inventory.NodeModeset: "nvidia-modeset", inventory.NodeIMEXChannel0: "nvidia-caps-imex-channels/channel0",
		inventory.NodeGDRCopy: "gdrdrv", inventory.NodeGDS: "nvidia-fs0", inventory.NodeRDMA: "infiniband/rdma_cm",
	}
	if diff := cmp.Diff(want, maps.Collect(inventory.AllControlNodes.All())); diff != "" {
		t.Errorf("all nodes (-want +got):\n%s", diff)
	}
	some := inventory.NodeUVM | inventory.NodeModeset
	for node := range want {
		if got, want := some.Has(node), node == inventory.NodeUVM || node == inventory.NodeModeset; got != want {
			t.Errorf("%d is in the set: %v, want %v", node, got, want)
		}
	}
	if got := some.String(); got != "nvidia-uvm,nvidia-modeset" {
		t.Errorf("the set is %q", got)
	}
	for node, path := range some.All() {
		if node != inventory.NodeUVM || path != "nvidia-uvm" {
			t.Errorf("first node of the set is %d, %q", node, path)
		}
		break
	}
}
