package nvidia

import (
	"slices"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// displayOnly are models that run no work, although NVML counts them: the display adapter of a DGX
// Station.
var displayOnly = []string{"DGX Display", "NVIDIA DGX Display"}

// A gpu is a session's state of the GPU at one NVML index. Its slices are replaced, never written
// to.
type gpu struct {
	device device
	pci    nvml.PciInfo
	// lastSeen is the GPU at its last answer; zero until it could be identified. Its slices are shared
	// with published Snapshots: they are replaced, never written to.
	lastSeen inventory.GPU
	// the constant properties were read
	isDescribed     bool
	memory          nvml.Return // last result of the call for MemoryBytes
	isHidden        bool        // displayOnly
	migDevices      []migDevice
	instancesShown  bool                   // the driver showed this process a GPU instance
	instancesHidden inventory.Signal[bool] // the driver hides GPU instances; unknown before the first call
	unread          []inventory.LeftOut    // MIG devices that could not be read
	nvlink          nvlink
	lanes           int               // number of NVLink lanes; 0 if unknown
	linksRead       bool              // the links were read
	paths           []pciePath        // found with the links
	results         callResults       // results of the last calls
	eventsError     error             // why registering for its events failed
	reading         inventory.Reading // the last Reading
	hasReading      bool              // the first Reading was made
	isUnreturned    bool              // the Reading was not returned yet
	skipReport      bool              // the driver is slow and a caller waits: no Report now
	reportTime      time.Time         // when the following fields were read
	report          inventory.Report
	// persistence and energy are as in inventory.Reading.
	persistence inventory.Signal[bool]
	energy      inventory.Signal[uint64]
}

// identify reads the GPU of a slot into g.lastSeen, as far as the GPU answers.
func (s *scanner) identify(sl *slot, g *gpu, a *callResults) {
	index := sl.record.gpu
	device, ret := sl.api.DeviceGetHandleByIndex(index)
	if !a.must("nvmlDeviceGetHandleByIndex", ret) {
		return
	}
	uuid, ret := device.GetUUID()
	if !a.must("nvmlDeviceGetUUID", ret) {
		return
	}
	if g.lastSeen.UUID != uuid {
		g.eventsError = s.register(sl, uuid, device)
	}
	pci, ret := device.GetPciInfo()
	if !a.must("nvmlDeviceGetPciInfo", ret) {
		return
	}
	minor, ret := device.GetMinorNumber()
	if !a.must("nvmlDeviceGetMinorNumber", ret) {
		return
	}
	if g.lastSeen.UUID != uuid || g.pci != pci {
		*g = gpu{pci: pci, lastSeen: inventory.GPU{UUID: uuid, BDF: bdf(pci)}, eventsError: g.eventsError}
	}
	g.device, g.lastSeen.Index, g.lastSeen.Minor = device, index, minor
	if !g.isDescribed {
		g.isDescribed = s.describe(g, a)
	}
	if g.isHidden || a.isUseless() {
		return
	}
	memory, ret := device.GetMemoryInfo()
	if g.memory = ret; a.may("nvmlDeviceGetMemoryInfo", ret) {
		g.lastSeen.MemoryBytes = memory.Total
	}
	if !a.isUseless() {
		s.readMIG(g, a)
	}
}

// describe reads the constant properties, and reports whether they are known.
func (s *scanner) describe(g *gpu, a *callResults) bool {
	if model, ret := g.device.GetName(); a.may("nvmlDeviceGetName", ret) {
		g.lastSeen.Model = model
		g.isHidden = slices.Contains(displayOnly, model)
	}
	if brand, ret := g.device.GetBrand(); a.may("nvmlDeviceGetBrand", ret) {
		g.lastSeen.Brand = brands[brand]
	}
	if architecture, ret := g.device.GetArchitecture(); a.may("nvmlDeviceGetArchitecture", ret) {
		g.lastSeen.Architecture = architectures[architecture]
	}
	if capability, ret := g.device.GetCudaComputeCapability(); a.may("nvmlDeviceGetCudaComputeCapability", ret) {
		g.lastSeen.ComputeCapability = capability
	}
	if memory, ret := g.device.GetMemoryInfoV2(); a.may("nvmlDeviceGetMemoryInfo_v2", ret) {
		g.lastSeen.ReservedBytes = memory.Reserved
	}
	if mode, ret := g.device.GetAddressingMode(); a.may("nvmlDeviceGetAddressingMode", ret) {
		g.lastSeen.AddressingMode = addressingModes[nvml.DeviceAddressingModeType(mode.Value)]
	}
	g.lastSeen.PCIeRoot = sysfsPCIeRoot(s.root, g.lastSeen.BDF)
	g.lastSeen.NUMANode = sysfsNUMANode(s.root, g.lastSeen.BDF)
	g.lastSeen.Class, _ = attribute(s.root, g.lastSeen.BDF, "class")
	g.lastSeen.VGPU = sysfsVGPU(s.root, g.lastSeen.BDF)
	g.lastSeen.Binding = s.binding(g.lastSeen.BDF)
	return a.contact == inventory.ContactGood
}

// binding returns a number that changes with each binding of the GPU to the driver; 0 if unknown.
func (s *scanner) binding(bdf string) uint64 {
	for _, b := range s.initialBindings {
		if b.bdf == bdf {
			return b.entry
		}
	}
	return 0
}

// architectures are the names of chip generations, by NVML's numbers.
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

// brands are the names of brands in NVIDIA's Go library, by NVML's numbers.
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
