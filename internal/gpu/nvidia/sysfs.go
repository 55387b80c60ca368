package nvidia

import (
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"strconv"
	"strings"
	"syscall"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

const (
	pciDevices  = "sys/bus/pci/devices"
	switchClass = "0x0680" // "bridge, other": an NVSwitch
)

// boundFolders are the directories with an entry for each GPU bound to the driver, named by PCI
// address. The first readable one counts. In place of the second one, a container runtime may mount
// the state at the start of the container.
var boundFolders = []string{"sys/bus/pci/drivers/nvidia", "proc/driver/nvidia/gpus"}

// bdf returns a PCI address in the format of sysfs. GPUs and NVSwitches are function 0 of their
// device. Virtual functions of a GPU (SR-IOV) are other functions, found only in the text of the
// address.
func bdf(pci nvml.PciInfo) string {
	function := 0
	for i, c := range pci.BusId[:len(pci.BusId)-2] {
		if c == 0 {
			break
		}
		if f := pci.BusId[i+1]; c == '.' && '0' <= f && f <= '7' && pci.BusId[i+2] == 0 {
			function = int(f - '0')
		}
	}
	return fmt.Sprintf("%04x:%02x:%02x.%d", pci.Domain, pci.Bus, pci.Device, function)
}

// A binding is the binding of a GPU to the driver: the PCI address, and the inode number of its
// sysfs entry. The kernel gives each entry of sysfs its own number.
type binding struct {
	bdf   string
	entry uint64 // 0 if unknown
}

// boundGPUs lists the GPUs bound to the driver, by ascending PCI address; nil if unreadable.
func boundGPUs(root fs.FS) []binding {
	for _, folder := range boundFolders {
		entries, err := fs.ReadDir(root, folder)
		if err != nil {
			continue
		}
		var bound []binding
		for _, e := range entries {
			if !strings.Contains(e.Name(), ":") { // "bind", "unbind" and the like
				continue
			}
			b := binding{bdf: e.Name()}
			if info, err := e.Info(); err == nil {
				if stat, ok := info.Sys().(*syscall.Stat_t); ok {
					b.entry = stat.Ino
				}
			}
			bound = append(bound, b)
		}
		return bound
	}
	return nil
}

// sysfsNUMANode returns the NUMA node of a PCI device, or inventory.NoNUMANode.
// nvmlDeviceGetNumaNodeId does not serve: it returns the node of the GPU's own memory, which has no
// CPU.
func sysfsNUMANode(root fs.FS, bdf string) int {
	text, _ := attribute(root, bdf, "numa_node")
	node, err := strconv.Atoi(text)
	if err != nil {
		return inventory.NoNUMANode
	}
	return max(node, inventory.NoNUMANode)
}

var pcieRoot = regexp.MustCompile(`^pci[0-9a-f]{4,8}:[0-9a-f]{2}$`)

// sysfsPCIeRoot returns the PCIe root complex of a PCI device; empty if unknown.
func sysfsPCIeRoot(root fs.FS, bdf string) string {
	target, err := fs.ReadLink(root, path.Join(pciDevices, bdf))
	if err != nil {
		return ""
	}
	for element := range strings.SplitSeq(target, "/") {
		if pcieRoot.MatchString(element) {
			return element
		}
	}
	return ""
}

// sysfsNVSwitch reports whether a PCI device is an NVSwitch.
func sysfsNVSwitch(root fs.FS, bdf string) bool {
	class, ok := attribute(root, bdf, "class")
	return ok && strings.HasPrefix(class, switchClass)
}

// attribute reads an attribute of a PCI device.
func attribute(root fs.FS, bdf, name string) (string, bool) {
	b, err := fs.ReadFile(root, path.Join(pciDevices, bdf, name))
	return strings.TrimSpace(string(b)), err == nil
}
