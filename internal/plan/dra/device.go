package dra

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Limits of the API server.
const (
	maxValue      = 64 // bytes of a string or a version
	maxProperties = 32 // attributes and capacities of a device
)

// The values of the attribute type.
const (
	typeGPU = "gpu"
	typeMIG = "mig"
)

// memorySlice begins the name of a memory slice's capacity; its number follows.
const memorySlice = "memorySlice"

// wholeGPU returns the device of a GPU outside MIG mode.
func wholeGPU(g inventory.GPU, driver inventory.Driver, number int, links links) Device {
	d := newDevice(fmt.Sprintf("gpu-%d", number), typeGPU, g.UUID, g, driver, g.Fitness())
	links.describe(g, d)
	return d
}

// migName returns the name of a MIG device on the GPU with a number, or why the device has none.
// NVIDIA's driver knows only compute instances that fill the GPU instance; other names also contain
// the ID of the compute instance.
func migName(number int, m inventory.MIGDevice) (name, reason string) {
	if m.Placement.Size <= 0 {
		return "", "where it lies on the GPU could not be read; only a privileged process may ask the driver for it"
	}
	profile := strings.Trim(notInName.ReplaceAllString(strings.ReplaceAll(strings.ToLower(m.Profile), ".", ""), "-"),
		"-")
	name = fmt.Sprintf("gpu-%d-mig-%s-%d-%d", number, profile, m.Placement.Profile, m.Placement.Start)
	if m.Attributes.CISlices != m.Attributes.GISlices {
		name += fmt.Sprintf("-%d", m.CI)
	}
	if len(name) > 63 || !deviceName.MatchString(name) {
		return "", fmt.Sprintf("%q cannot be the name of a device", name)
	}
	return name, ""
}

var (
	notInName = regexp.MustCompile(`[^a-z0-9-]`)
	// deviceName matches a DNS label of any length. A count in the pattern would take 50 kB.
	deviceName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?$`)
)

// engines are the exclusive parts of MIG devices, with the names of NVIDIA's driver for their
// capacities and counters.
var engines = []struct {
	capacity, counter string
	of                func(inventory.MIGAttributes) int
}{
	{"multiprocessors", "multiprocessors", func(a inventory.MIGAttributes) int { return a.Multiprocessors }},
	{"copyEngines", "copy-engines", func(a inventory.MIGAttributes) int { return a.CopyEngines }},
	{"decoders", "decoders", func(a inventory.MIGAttributes) int { return a.Decoders }},
	{"encoders", "encoders", func(a inventory.MIGAttributes) int { return a.Encoders }},
	{"jpegEngines", "jpeg-engines", func(a inventory.MIGAttributes) int { return a.JPEGs }},
	{"ofaEngines", "ofa-engines", func(a inventory.MIGAttributes) int { return a.OFAs }},
}

// migDevice returns the device for a MIG device.
func migDevice(name string, g inventory.GPU, m inventory.MIGDevice, driver inventory.Driver) Device {
	d := newDevice(name, typeMIG, m.UUID, g, driver, inventory.Worst(g.Fitness(), m.Health))
	d.text("parentUUID", g.UUID)
	d.text("profile", m.Profile)
	d.Capacity[MemoryCapacity] = Capacity(min(m.MemoryBytes, math.MaxInt64))
	for _, e := range engines {
		d.Capacity[e.capacity] = Capacity(e.of(m.Attributes))
	}
	if len(d.Attributes)+len(d.Capacity)+m.Placement.Size > maxProperties {
		return d // slices of memory are the least important: no selector needs them
	}
	for i := range m.Placement.Size {
		d.Capacity[fmt.Sprintf("%s%d", memorySlice, m.Placement.Start+i)] = 1
	}
	return d
}

// newDevice returns a device with the common attributes of GPUs and MIG devices.
func newDevice(name, kind, uuid string, g inventory.GPU, driver inventory.Driver, health inventory.Health) Device {
	d := Device{Name: name, Attributes: map[string]Attribute{}, Capacity: map[string]Capacity{}, Taints: taints(health)}
	d.text("type", kind)
	d.text("uuid", uuid)
	d.text("productName", g.Model)
	d.text("brand", g.Brand)
	d.text("architecture", architecture(g.Architecture))
	d.text("addressingMode", g.AddressingMode)
	if g.ComputeCapability.Major > 0 {
		d.version("cudaComputeCapability", g.ComputeCapability.String())
	}
	d.version("driverVersion", driver.Version)
	d.version("cudaDriverVersion", driver.CUDA)
	d.text("pcieBusID", g.BDF)
	d.text("resource.kubernetes.io/pciBusID", g.BDF)
	d.text("resource.kubernetes.io/pcieRoot", g.PCIeRoot)
	if g.NUMANode >= 0 {
		d.Attributes["resource.kubernetes.io/numaNode"] = Attribute{Int, strconv.Itoa(g.NUMANode)}
	}
	if g.MemoryBytes > 0 {
		d.Capacity[MemoryCapacity] = Capacity(min(g.MemoryBytes, math.MaxInt64))
	}
	return d
}

// text sets an attribute. It omits an unknown value, and any value refused by the API server, with
// the whole slice.
func (d Device) text(name, value string) {
	if value != "" && len(value) <= maxValue && utf8.ValidString(value) {
		d.Attributes[name] = Attribute{String, value}
	}
}

// version sets an attribute of type version, like text.
func (d Device) version(name, value string) {
	if value = semantic(value); value != "" && len(value) <= maxValue {
		d.Attributes[name] = Attribute{Version, value}
	}
}

var oneToThree = regexp.MustCompile(`^\d+(\.\d+){0,2}$`)

// semantic returns the semantic version for one to three numbers: three numbers without leading
// zeros. It is empty for any other text.
func semantic(version string) string {
	if !oneToThree.MatchString(version) {
		return ""
	}
	parts := strings.Split(version+strings.Repeat(".0", 2-strings.Count(version, ".")), ".")
	for i, part := range parts {
		if parts[i] = strings.TrimLeft(part, "0"); parts[i] == "" {
			parts[i] = "0"
		}
	}
	return strings.Join(parts, ".")
}

// architecture returns the name of a chip generation in the form of NVIDIA's driver.
func architecture(name string) string {
	switch name {
	case "":
		return ""
	case "ada":
		return "Ada Lovelace"
	}
	return strings.ToUpper(name[:1]) + name[1:]
}
