package inventory_test

import (
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/equality"
)

// TestEqual: a Snapshot differs from another by whatever it says of the node, and not by its
// number.
func TestEqual(t *testing.T) {
	t.Parallel()
	gpu := func() inventory.GPU {
		return inventory.GPU{MIGDevices: []inventory.MIGDevice{{}}, Links: []inventory.Link{{}}}
	}
	equality.Check(t, gpu, inventory.GPU.Equal)
	equality.Check(t, func() inventory.Snapshot {
		return inventory.Snapshot{GPUs: []inventory.GPU{gpu()}, LeftOut: []inventory.LeftOut{{}}}
	}, inventory.Snapshot.Equal, ".Generation")
}
