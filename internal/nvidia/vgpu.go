package nvidia

import (
	"bytes"
	"io/fs"
	"path"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// Places and values in the configuration space of a PCI device. A virtual GPU has a vendor-specific capability: its ID, the next
// capability, its length, the signature, and then records of ID, length (with these two bytes) and content.
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

// sysfsVGPU returns what a GPU tells of the hypervisor, if it is a virtual one. Only a privileged process can read it.
func sysfsVGPU(root fs.FS, bdf string) inventory.VGPU {
	space, err := fs.ReadFile(root, path.Join(pciDevices, bdf, "config"))
	if err != nil || len(space) < pciSpace || space[pciStatus]&pciHasCapabilities == 0 {
		return inventory.VGPU{}
	}
	space = space[:pciSpace]
	// A capability begins at a multiple of 4, so that a list without an end has been followed for long enough after 64.
	for at, n := int(space[pciCapabilities]), 0; at != 0 && at+2 < len(space) && n < pciSpace/4; at, n = int(space[at+1]), n+1 {
		if space[at] == pciVendorSpecific {
			return parseVGPU(space[at:min(len(space), at+int(space[at+2]))])
		}
	}
	return inventory.VGPU{}
}

// parseVGPU reads a vendor-specific capability.
func parseVGPU(capability []byte) inventory.VGPU {
	const header = 3
	if len(capability) < header || !bytes.HasPrefix(capability[header:], []byte(vgpuSignature)) {
		return inventory.VGPU{}
	}
	found := inventory.VGPU{Present: true}
	for records := capability[header+len(vgpuSignature):]; len(records) >= 2; {
		id, length := records[0], int(records[1])
		if length < 2 || length > len(records) {
			break
		}
		if content := records[2:length]; id == vgpuHostDriver && len(content) >= 2*vgpuText {
			text := func(b []byte) string { return string(bytes.Trim(b, "\x00")) }
			found.HostDriver, found.HostBranch = text(content[:vgpuText]), text(content[vgpuText:2*vgpuText])
			break
		}
		records = records[length:]
	}
	return found
}
