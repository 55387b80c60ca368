package nvidia

import (
	"slices"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// displayOnly are the models that NVML counts and that run no work: the display adapter of a DGX
// Station.
var displayOnly = []string{"DGX Display", "NVIDIA DGX Display"}

// A gpu is what a session knows of the GPU at one NVML index. Its slices are replaced, never
// written to.
type gpu struct {
	device device
	pci    nvml.PciInfo
	// seen is the GPU as it last answered; zero as long as it could not be identified. Its slices are
	// shared with published Snapshots: they are replaced, never written to.
	seen inventory.GPU
	// described says that what never changes was read.
	described  bool
	memory     nvml.Return // what the call for MemoryBytes answered last
	hidden     bool        // displayOnly
	migDevices []migDevice
	told       bool                   // the driver told this process of one of its GPU instances
	untold     inventory.Signal[bool] // the driver refuses to; unknown before it was asked
	unread     []inventory.LeftOut    // the MIG devices that could not be read
	nvlink     nvlink
	lanes      int               // how many lanes of NVLink it has, as far as that is known; else 0
	linked     bool              // the links were read
	ways       []way             // that were found with them
	results    callResults       // how the GPU answered last
	refused    error             // why its events could not be registered for
	reading    inventory.Reading // the last one
	read       bool              // there was one
	fresh      bool              // nobody was told of it
	hurried    bool              // the driver is slow, and a caller waits for the GPU: its Report can wait
	reported   time.Time         // when the following were read
	report     inventory.Report
	// persistence and energy are as inventory.Reading has them.
	persistence inventory.Signal[bool]
	energy      inventory.Signal[uint64]
}

// ask reads the GPU of a slot into g.seen, as far as it answers.
func (s *scanner) ask(sl *slot, g *gpu, a *callResults) {
	index := sl.record.gpu
	device, ret := sl.api.DeviceGetHandleByIndex(index)
	if !a.must("nvmlDeviceGetHandleByIndex", ret) {
		return
	}
	uuid, ret := device.GetUUID()
	if !a.must("nvmlDeviceGetUUID", ret) {
		return
	}
	if g.seen.UUID != uuid {
		g.refused = s.register(sl, uuid, device)
	}
	pci, ret := device.GetPciInfo()
	if !a.must("nvmlDeviceGetPciInfo", ret) {
		return
	}
	minor, ret := device.GetMinorNumber()
	if !a.must("nvmlDeviceGetMinorNumber", ret) {
		return
	}
	if g.seen.UUID != uuid || g.pci != pci {
		*g = gpu{pci: pci, seen: inventory.GPU{UUID: uuid, BDF: bdf(pci)}, refused: g.refused}
	}
	g.device, g.seen.Index, g.seen.Minor = device, index, minor
	if !g.described {
		g.described = s.describe(g, a)
	}
	if g.hidden || a.gone() {
		return
	}
	memory, ret := device.GetMemoryInfo()
	if g.memory = ret; a.may("nvmlDeviceGetMemoryInfo", ret) {
		g.seen.MemoryBytes = memory.Total
	}
	if !a.gone() {
		s.readMIG(g, a)
	}
}

// describe reads what never changes, and reports whether that is now known.
func (s *scanner) describe(g *gpu, a *callResults) bool {
	if model, ret := g.device.GetName(); a.may("nvmlDeviceGetName", ret) {
		g.seen.Model = model
		g.hidden = slices.Contains(displayOnly, model)
	}
	if brand, ret := g.device.GetBrand(); a.may("nvmlDeviceGetBrand", ret) {
		g.seen.Brand = brands[brand]
	}
	if architecture, ret := g.device.GetArchitecture(); a.may("nvmlDeviceGetArchitecture", ret) {
		g.seen.Architecture = architectures[architecture]
	}
	if capability, ret := g.device.GetCudaComputeCapability(); a.may("nvmlDeviceGetCudaComputeCapability", ret) {
		g.seen.ComputeCapability = capability
	}
	if memory, ret := g.device.GetMemoryInfoV2(); a.may("nvmlDeviceGetMemoryInfo_v2", ret) {
		g.seen.ReservedBytes = memory.Reserved
	}
	if mode, ret := g.device.GetAddressingMode(); a.may("nvmlDeviceGetAddressingMode", ret) {
		g.seen.AddressingMode = addressingModes[nvml.DeviceAddressingModeType(mode.Value)]
	}
	g.seen.PCIeRoot = sysfsPCIeRoot(s.root, g.seen.BDF)
	g.seen.NUMANode = sysfsNUMANode(s.root, g.seen.BDF)
	g.seen.Class, _ = attribute(s.root, g.seen.BDF, "class")
	g.seen.VGPU = sysfsVGPU(s.root, g.seen.BDF)
	g.seen.Binding = s.binding(g.seen.BDF)
	return a.contact == inventory.ContactGood
}

// binding returns what tells the GPU's being bound to the driver from another time that it was; 0
// where nothing does.
func (s *scanner) binding(bdf string) uint64 {
	for _, b := range s.bound {
		if b.bdf == bdf {
			return b.entry
		}
	}
	return 0
}

// architectures are the names of the chip generations, by NVML's numbers.
var architectures = map[nvml.DeviceArchitecture]string{
	nvml.DEVICE_ARCH_KEPLER:    "kepler",
	nvml.DEVICE_ARCH_MAXWELL:   "maxwell",
	nvml.DEVICE_ARCH_PASCAL:    "pascal",
	nvml.DEVICE_ARCH_VOLTA:     "volta",
	nvml.DEVICE_ARCH_TURING:    "turing",
	nvml.DEVICE_ARCH_AMPERE:    "ampere",
	nvml.DEVICE_ARCH_ADA:       "ada",
	nvml.DEVICE_ARCH_HOPPER:    "hopper",
	nvml.DEVICE_ARCH_BLACKWELL: "blackwell",
	nvml.DEVICE_ARCH_RUBIN:     "rubin",
}

// brands are the names of the brands, by NVML's numbers: those that NVIDIA's Go library gives them.
var brands = map[nvml.BrandType]string{
	nvml.BRAND_QUADRO:              "Quadro",
	nvml.BRAND_TESLA:               "Tesla",
	nvml.BRAND_NVS:                 "NVS",
	nvml.BRAND_GRID:                "Grid",
	nvml.BRAND_GEFORCE:             "GeForce",
	nvml.BRAND_TITAN:               "Titan",
	nvml.BRAND_NVIDIA_VAPPS:        "NvidiaVApps",
	nvml.BRAND_NVIDIA_VPC:          "NvidiaVPC",
	nvml.BRAND_NVIDIA_VCS:          "NvidiaVCS",
	nvml.BRAND_NVIDIA_VWS:          "NvidiaVWS",
	nvml.BRAND_NVIDIA_CLOUD_GAMING: "NvidiaCloudGaming",
	nvml.BRAND_QUADRO_RTX:          "QuadroRTX",
	nvml.BRAND_NVIDIA_RTX:          "NvidiaRTX",
	nvml.BRAND_NVIDIA:              "Nvidia",
	nvml.BRAND_GEFORCE_RTX:         "GeForceRTX",
	nvml.BRAND_TITAN_RTX:           "TitanRTX",
}

// addressingModes are the names of the addressing modes, by NVML's numbers.
var addressingModes = map[nvml.DeviceAddressingModeType]string{
	nvml.DEVICE_ADDRESSING_MODE_NONE: "None",
	nvml.DEVICE_ADDRESSING_MODE_HMM:  "HMM",
	nvml.DEVICE_ADDRESSING_MODE_ATS:  "ATS",
}
