package simulator

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// architectures are the chip generations a Model can have.
var architectures = map[string]uint32{
	"pascal": nvml.DEVICE_ARCH_PASCAL, "volta": nvml.DEVICE_ARCH_VOLTA, "turing": nvml.DEVICE_ARCH_TURING,
	"ampere": nvml.DEVICE_ARCH_AMPERE, "ada": nvml.DEVICE_ARCH_ADA, "hopper": nvml.DEVICE_ARCH_HOPPER,
	"blackwell": nvml.DEVICE_ARCH_BLACKWELL,
}

// brands are the brands a Model can have.
var brands = map[string]nvml.BrandType{"tesla": nvml.BRAND_TESLA, "geforce": nvml.BRAND_GEFORCE,
	"nvidia": nvml.BRAND_NVIDIA}

// addressingModes are the addressing modes a Model can have.
var addressingModes = map[string]nvml.DeviceAddressingModeType{
	"": nvml.DEVICE_ADDRESSING_MODE_NONE, "none": nvml.DEVICE_ADDRESSING_MODE_NONE,
	"hmm": nvml.DEVICE_ADDRESSING_MODE_HMM, "ats": nvml.DEVICE_ADDRESSING_MODE_ATS,
}

// nvlinkVersions are NVML's numbers for the versions of NVLink.
var nvlinkVersions = map[string]nvml.NvlinkVersion{
	"1.0": nvml.NVLINK_VERSION_1_0, "2.0": nvml.NVLINK_VERSION_2_0, "2.2": nvml.NVLINK_VERSION_2_2,
	"3.0": nvml.NVLINK_VERSION_3_0, "3.1": nvml.NVLINK_VERSION_3_1, "4.0": nvml.NVLINK_VERSION_4_0,
	"5.0": nvml.NVLINK_VERSION_5_0,
}

// instanceProfiles are NVML's numbers for the GPU instance profiles, by compute slices and
// attribute. A second profile of one slice, with more memory, has the number secondOneSlice.
var instanceProfiles = map[string]int{
	"1g": nvml.GPU_INSTANCE_PROFILE_1_SLICE, "2g": nvml.GPU_INSTANCE_PROFILE_2_SLICE,
	"3g": nvml.GPU_INSTANCE_PROFILE_3_SLICE, "4g": nvml.GPU_INSTANCE_PROFILE_4_SLICE,
	"6g": nvml.GPU_INSTANCE_PROFILE_6_SLICE, "7g": nvml.GPU_INSTANCE_PROFILE_7_SLICE,
	"8g":    nvml.GPU_INSTANCE_PROFILE_8_SLICE,
	"1g+me": nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1, "2g+me": nvml.GPU_INSTANCE_PROFILE_2_SLICE_REV1,
	"1g+gfx": nvml.GPU_INSTANCE_PROFILE_1_SLICE_GFX, "2g+gfx": nvml.GPU_INSTANCE_PROFILE_2_SLICE_GFX,
	"3g+gfx": nvml.GPU_INSTANCE_PROFILE_3_SLICE_GFX, "4g+gfx": nvml.GPU_INSTANCE_PROFILE_4_SLICE_GFX,
	"1g-me": nvml.GPU_INSTANCE_PROFILE_1_SLICE_NO_ME, "2g-me": nvml.GPU_INSTANCE_PROFILE_2_SLICE_NO_ME,
	"1g+me.all": nvml.GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME, "2g+me.all": nvml.GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME,
}

const secondOneSlice = nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV2

// firstInstanceID is the ID of the first GPU instance, by the number of such instances in a GPU. As
// in the driver, there is one ID for the instance of the whole GPU, two for halves, four for
// quarters, and the rest for eighths.
var firstInstanceID = map[int]int{1: 0, 2: 1, 4: 3, 8: 7}

// complete parses the text values of the file, and refuses an invalid model.
func (m *Model) complete() error {
	var ok bool
	if m.architecture, ok = architectures[m.Architecture]; !ok {
		return fmt.Errorf("architecture %q is not known: give one such as hopper", m.Architecture)
	}
	if m.brand, ok = brands[cmp.Or(m.Brand, "nvidia")]; !ok {
		return fmt.Errorf("brand %q is not known: give tesla, geforce or nvidia", m.Brand)
	}
	if m.addressing, ok = addressingModes[m.Addressing]; !ok {
		return fmt.Errorf("addressing %q is not known: give none, hmm or ats", m.Addressing)
	}
	if _, err := fmt.Sscanf(m.Compute, "%d.%d", &m.major, &m.minor); err != nil {
		return fmt.Errorf("compute %q is not a compute capability such as \"9.0\"", m.Compute)
	}
	device, err := strconv.ParseUint(m.PCI, 16, 32)
	if err != nil {
		return fmt.Errorf("pci %q is not a device ID and vendor ID such as 233010DE", m.PCI)
	}
	m.pciDevice = uint32(device)
	if m.Name == "" || m.MemoryMiB == 0 {
		return errors.New("name and memoryMiB must be given")
	}
	if m.NVLink.Links < 0 || m.NVLink.Links > nvml.NVLINK_MAX_LINKS {
		return fmt.Errorf("nvlink.links is %d: give 0 to %d", m.NVLink.Links, nvml.NVLINK_MAX_LINKS)
	}
	if _, ok := nvlinkVersions[m.NVLink.Version]; !ok && m.NVLink.Links > 0 {
		return fmt.Errorf("nvlink.version %q is not known: give one such as \"4.0\"", m.NVLink.Version)
	}
	profiles := make([]MIGProfile, len(m.MIG))
	copy(profiles, m.MIG) // all GPUs of the kind share the caller's model
	m.MIG = profiles
	m.MemorySlices = cmp.Or(m.MemorySlices, 8)
	for i := range m.MIG {
		if err := m.completeMIG(i); err != nil {
			return fmt.Errorf("mig[%d]: %w", i, err)
		}
		m.computeSlices = max(m.computeSlices, m.MIG[i].slices)
	}
	for i := range m.MIG {
		m.place(&m.MIG[i])
	}
	return nil
}

// place computes the possible first memory slices of a profile: multiples of its size with enough
// compute slices. A GPU with seven compute slices lacks the eighth.
func (m *Model) place(p *MIGProfile) {
	eighths := 1
	for eighths < m.computeSlices {
		eighths *= 2
	}
	for start := 0; start+p.memory <= m.MemorySlices; start += p.memory {
		if start*eighths/m.MemorySlices+p.slices <= m.computeSlices {
			p.starts = append(p.starts, start)
		}
	}
}

// completeMIG completes the MIG profile at position i.
func (m *Model) completeMIG(i int) error {
	p := &m.MIG[i]
	compute, rest, _ := strings.Cut(p.Name, ".")
	attribute := ""
	if at := strings.IndexAny(rest, "+-"); at >= 0 {
		attribute = rest[at:]
	}
	number, ok := instanceProfiles[compute+attribute]
	if !ok {
		return fmt.Errorf("name %q is not a MIG profile such as 1g.10gb or 1g.10gb+me", p.Name)
	}
	for _, other := range m.MIG[:i] {
		if other.number == number {
			number = secondOneSlice
		}
	}
	p.number = number
	p.slices = int(compute[0] - '0')
	p.memory = int(math.Ceil(float64(p.MemoryMiB) * float64(m.MemorySlices) / float64(m.MemoryMiB)))
	if p.Count < 1 || p.MemoryMiB == 0 || p.MemoryMiB > m.MemoryMiB {
		return fmt.Errorf("%s: count must be at least 1, and memoryMiB between 1 and the GPU's", p.Name)
	}
	if _, ok := firstInstanceID[m.MemorySlices/p.memory]; !ok || m.MemorySlices%p.memory != 0 {
		return fmt.Errorf("%s: memoryMiB is %d of %d memory slices: instances have all, a half, a quarter or an eighth",
			p.Name, p.memory, m.MemorySlices)
	}
	return nil
}

// branch returns the driver branch of a version: 580 for "580.95.05".
func branch(version string) (int, error) {
	first, _, _ := strings.Cut(version, ".")
	b, err := strconv.Atoi(first)
	if err != nil || b < 1 {
		return 0, fmt.Errorf("driver %q is not a version such as 580.95.05", version)
	}
	return b, nil
}

// cudaVersion returns a CUDA version in NVML's format: 13000 for "13.0".
func cudaVersion(version string) (int, error) {
	var major, minor int
	if _, err := fmt.Sscanf(version, "%d.%d", &major, &minor); err != nil {
		return 0, fmt.Errorf("cuda %q is not a version such as \"13.0\", in quotes", version)
	}
	return major*1000 + minor*10, nil
}

// firstStep returns the NUMA node at the start of a path through the PCIe tree.
func firstStep(way string) (int, error) {
	steps := strings.Split(way, "/")
	node, err := strconv.Atoi(steps[0])
	if err != nil || node < 0 || len(steps) < 2 {
		return 0, fmt.Errorf("pcie %q is not a way such as 0/1/0: NUMA node, host bridge, switches", way)
	}
	return node, nil
}

// deriveUUID returns a UUID derived from the given names alone: version 8, reserved for such uses.
func deriveUUID(names ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(names, "\x00")))
	sum[6] = sum[6]&0x0f | 0x80
	sum[8] = sum[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", sum[0:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
}
