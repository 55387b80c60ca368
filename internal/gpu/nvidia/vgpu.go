package nvidia

import (
	"bytes"
	"io/fs"
	"path"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Places and values in the configuration space of a PCI device. A virtual GPU has a vendor-specific
// capability: its ID, the next capability, its length, the signature, and then records of ID,
// length (with these two bytes) and content.
const (
	pciSpace           = 256  // bytes; a process without CAP_SYS_ADMIN reads the first 64
	pciStatus          = 0x06 // with the bit pciHasCapabilities
	pciHasCapabilities = 0x10
	pciCapabilities    = 0x34 // where the first capability is
	pciVendorSpecific  = 0x09
	vgpuSignature      = "VF"
	vgpuHostDriver     = 0  // the record with the version and the branch of the host's driver
	vgpuText           = 10 // bytes of each
)

// sysfsVGPU returns what a GPU tells of the hypervisor, if it is a virtual one. Only a privileged
// process can read it.
func sysfsVGPU(root fs.FS, bdf string) inventory.VGPU {
	space, err := fs.ReadFile(root, path.Join(pciDevices, bdf, "config"))
	if err != nil || len(space) < pciSpace || space[pciStatus]&pciHasCapabilities == 0 {
		return inventory.VGPU{}
	}
	for at := pciCapabilities; space[at] != 0; {
		to := int(space[at] &^ 3) // a capability begins at a multiple of 4
		space[at] = 0             // each is followed once: the list may have no end
		if space[to] == pciVendorSpecific {
			return parseVGPU(space[to:min(len(space), to+int(space[to+2]))])
		}
		at = to + 1
	}
	return inventory.VGPU{}
}

// parseVGPU reads a vendor-specific capability.
func parseVGPU(capability []byte) inventory.VGPU {
	const header, host = 3, 2 + 2*vgpuText // the length of the record of the host's driver
	records, present := bytes.CutPrefix(capability[min(header, len(capability)):], []byte(vgpuSignature))
	found := inventory.VGPU{Present: present}
	for present && len(records) >= host {
		id, length := records[0], int(records[1])
		if length < 2 || length > len(records) {
			break
		}
		if id == vgpuHostDriver && length >= host {
			text := func(b []byte) string { return string(bytes.Trim(b, "\x00")) }
			found.HostDriver, found.HostBranch = text(records[2:2+vgpuText]), text(records[2+vgpuText:host])
			break
		}
		records = records[length:]
	}
	return found
}
