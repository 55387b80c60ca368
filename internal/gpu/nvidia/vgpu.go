package nvidia

import (
	"bytes"
	"io/fs"
	"path"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Offsets and values in the configuration space of a PCI device. A virtual GPU has a
// vendor-specific capability: its ID, the next capability, its length, the signature, and records
// of ID, length (including these two bytes) and content.
const (
	pciSpace           = 256  // bytes; without CAP_SYS_ADMIN only the first 64 are readable
	pciStatus          = 0x06 // contains the bit pciHasCapabilities
	pciHasCapabilities = 0x10
	pciCapabilities    = 0x34 // offset of the first capability
	pciVendorSpecific  = 0x09
	vgpuSignature      = "VF"
	vgpuHostDriver     = 0  // record with the version and branch of the host driver
	vgpuText           = 10 // bytes of each
)

// sysfsVGPU returns the hypervisor information of a virtual GPU. It needs a privileged process.
func sysfsVGPU(root fs.FS, bdf string) inventory.VGPU {
	space, err := fs.ReadFile(root, path.Join(pciDevices, bdf, "config"))
	if err != nil || len(space) < pciSpace || space[pciStatus]&pciHasCapabilities == 0 {
		return inventory.VGPU{}
	}
	for at := pciCapabilities; space[at] != 0; {
		to := int(space[at] &^ 3) // a capability is aligned to 4 bytes
		space[at] = 0             // follow each capability once: the list may be circular
		if space[to] == pciVendorSpecific {
			return parseVGPU(space[to:min(len(space), to+int(space[to+2]))])
		}
		at = to + 1
	}
	return inventory.VGPU{}
}

// parseVGPU reads a vendor-specific capability.
func parseVGPU(capability []byte) inventory.VGPU {
	const header, host = 3, 2 + 2*vgpuText // length of the record of the host driver
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
