package simulator

import (
	"fmt"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// parseBDF returns NVML's description of the PCI device with an address such as "0000:1b:00.0".
func parseBDF(s string) (nvml.PciInfo, error) {
	var p nvml.PciInfo
	if _, err := fmt.Sscanf(s, "%4x:%2x:%2x.0", &p.Domain, &p.Bus, &p.Device); err != nil || s != bdf(p) {
		return nvml.PciInfo{}, fmt.Errorf("%q is not a PCI address such as 0000:1b:00.0, in quotes and lower case", s)
	}
	put(p.BusId[:], fmt.Sprintf("%08X:%02X:%02X.0", p.Domain, p.Bus, p.Device))
	put(p.BusIdLegacy[:], fmt.Sprintf("%04X:%02X:%02X.0", p.Domain, p.Bus, p.Device))
	return p, nil
}

// bdf returns a PCI address in the format of sysfs.
func bdf(p nvml.PciInfo) string { return fmt.Sprintf("%04x:%02x:%02x.0", p.Domain, p.Bus, p.Device) }

// put writes a C string.
func put(to []int8, s string) {
	for i := range s {
		to[i] = int8(s[i])
	}
}

// pcieRoot returns the PCIe root complex of the GPU at position i. GPUs below one host bridge share
// a root complex, whose bus is just before the bus of their first GPU.
func (p *Profile) pcieRoot(i int) string {
	bridge := func(g GPU) string {
		steps := strings.SplitN(g.PCIe, "/", 3)
		return strings.Join(steps[:min(len(steps), 2)], "/")
	}
	first := slices.IndexFunc(p.GPUs, func(g GPU) bool { return bridge(g) == bridge(p.GPUs[i]) })
	pci := p.GPUs[first].pci
	return fmt.Sprintf("pci%04x:%02x", pci.Domain, max(pci.Bus, 1)-1)
}
