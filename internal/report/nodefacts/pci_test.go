package nodefacts_test

import (
	"fmt"
	"io/fs"
	"testing"
	"testing/fstest"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodefacts"
)

// TestPCIGPUs: NVIDIA's display devices count, with any driver or none, except for devices assigned
// to virtual machines.
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
	if own, away := nodefacts.PCIGPUs(node); own != 0 || away != 0 {
		t.Errorf("%d and %d GPUs on a node without any", own, away)
	}
	add("0000:1b:00.0", "0x10de", "0x030200", "nvidia")
	add("0000:1c:00.0", "0x10de", "0x030000", "nouveau")
	add("0000:1d:00.0", "0x10de", "0x030200", "")
	add("0000:1e:00.0", "0x10de", "0x030200", "vfio-pci")
	add("0000:1f:00.0", "0x10de", "0x068000", "nvidia-nvswitch")
	add("0000:20:00.0", "0x1a03", "0x030000", "ast")
	want := 1
	for i, driver := range []string{"nvgrace-gpu-vfio-pci", "nvidia_vgpu_vfio", "nvidia-vgpu-vfio", "pci-stub",
		"xen-pciback", "pciback"} {
		add(fmt.Sprintf("0000:3%d:00.0", i), "0x10de", "0x030200", driver)
		want++
	}
	for i := range 160 { // with any driver, or none
		address := fmt.Sprintf("0000:%x:%02x.%d", 0x40+i/100, i%100/8, i%8)
		add(address, "0x10de", "0x030200", []string{"", "nvidia", "vfio-pci"}[i%3])
		node["sys/bus/pci/devices/"+address+"/physfn"] = &fstest.MapFile{Mode: fs.ModeSymlink | 0o777,
			Data: []byte("../0000:1b:00.0")}
		want++
	}
	if own, away := nodefacts.PCIGPUs(node); own != 3 || away != want {
		t.Errorf("%d GPUs, and %d given to virtual machines, want 3 and %d", own, away, want)
	}
}
