package nodefacts_test

import (
	"io/fs"
	"testing"
	"testing/fstest"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/nodefacts"
)

// TestPCIGPUs: NVIDIA's display devices count, with any driver or none, but for those that are given to virtual machines.
func TestPCIGPUs(t *testing.T) {
	t.Parallel()
	node := fstest.MapFS{}
	add := func(address, vendor, class, driver string) {
		folder := "sys/bus/pci/devices/" + address
		node[folder+"/vendor"] = &fstest.MapFile{Data: []byte(vendor + "\n")}
		node[folder+"/class"] = &fstest.MapFile{Data: []byte(class + "\n")}
		if driver != "" {
			node["sys/bus/pci/drivers/"+driver+"/bind"] = &fstest.MapFile{}
			node[folder+"/driver"] = &fstest.MapFile{Mode: fs.ModeSymlink | 0o777, Data: []byte("../../drivers/" + driver)}
		}
	}
	if got := nodefacts.PCIGPUs(node); got != 0 {
		t.Errorf("%d GPUs on a node without any", got)
	}
	add("0000:1b:00.0", "0x10de", "0x030200", "nvidia")
	add("0000:1c:00.0", "0x10de", "0x030000", "nouveau")
	add("0000:1d:00.0", "0x10de", "0x030200", "")
	add("0000:1e:00.0", "0x10de", "0x030200", "vfio-pci")
	add("0000:1f:00.0", "0x10de", "0x068000", "nvidia-nvswitch")
	add("0000:20:00.0", "0x1a03", "0x030000", "ast")
	if got := nodefacts.PCIGPUs(node); got != 3 {
		t.Errorf("%d GPUs, want 3", got)
	}
}
