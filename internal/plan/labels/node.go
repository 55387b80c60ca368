package labels

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// nodeSuffixes are the keys, without Prefix, of labels about the node and its driver.
var nodeSuffixes = []string{
	"gfd.timestamp", "gpu.machine", "gpu.mode", "gpu.clique",
	"cuda.driver.major", "cuda.driver.minor", "cuda.driver.rev",
	"cuda.driver-version.full", "cuda.driver-version.major", "cuda.driver-version.minor",
	"cuda.driver-version.revision", "cuda.runtime.major", "cuda.runtime.minor",
	"cuda.runtime-version.full", "cuda.runtime-version.major", "cuda.runtime-version.minor",
	"mig.capable", "mig.strategy", "mps.capable",
	"vgpu.present", "vgpu.host-driver-version", "vgpu.host-driver-branch",
}

// addDriver adds the versions. It omits versions of an unknown driver, or in another form than X.Y or
// X.Y.Z.
func (b *builder) addDriver(d inventory.Driver) {
	if parts := strings.Split(d.Version, "."); len(parts) == 2 || len(parts) == 3 {
		parts = append(parts, "")
		b.put("cuda.driver-version.full", d.Version)
		for i, names := range [][2]string{
			{"cuda.driver-version.major", "cuda.driver.major"},
			{"cuda.driver-version.minor", "cuda.driver.minor"},
			{"cuda.driver-version.revision", "cuda.driver.rev"},
		} {
			b.put(names[0], parts[i])
			b.put(names[1], parts[i])
		}
	}
	if major, minor, ok := strings.Cut(d.CUDA, "."); ok {
		b.put("cuda.runtime-version.full", d.CUDA)
		b.put("cuda.runtime-version.major", major)
		b.put("cuda.runtime-version.minor", minor)
		b.put("cuda.runtime.major", major)
		b.put("cuda.runtime.minor", minor)
	}
}

// addVGPU adds the labels of the hypervisor, as reported by virtual GPUs; the last GPU counts.
func (b *builder) addVGPU() {
	present := false
	for _, g := range b.gpus {
		if !g.VGPU.Present {
			continue
		}
		present = true
		b.put("vgpu.host-driver-version", g.VGPU.HostDriver)
		b.put("vgpu.host-driver-branch", g.VGPU.HostBranch)
	}
	b.put("vgpu.present", strconv.FormatBool(present))
}

// addNode adds the common labels of all GPUs of the node.
func (b *builder) addNode() {
	capable, partitioned, cliques := false, false, map[string]bool{}
	for _, g := range b.gpus {
		capable = capable || g.MIG != inventory.MIGUnsupported
		partitioned = partitioned || g.MIG == inventory.MIGEnabled
		if g.Clique != "" {
			cliques[g.Clique] = true
		}
	}
	b.put("mig.capable", strconv.FormatBool(capable))
	shared := b.options.Resources.Sharing.Mode == resource.MPS && !partitioned
	units := b.options.Resources.Units.MPS
	b.put("mps.capable", strconv.FormatBool(shared || units || b.options.ClaimsByMPS))
	b.put("gpu.mode", mode(b.gpus[0].Class))
	if len(cliques) == 1 {
		for clique := range cliques {
			b.put("gpu.clique", clique)
		}
	}
}

// mode returns the purpose of GPUs of a PCI class.
func mode(class string) string {
	switch {
	case strings.HasPrefix(class, "0x0302"):
		return "compute"
	case strings.HasPrefix(class, "0x0300"):
		return "graphics"
	}
	return "unknown"
}

// family returns the name of the chip generation of a compute capability.
func family(c inventory.ComputeCapability) string {
	switch {
	case c.Major == 7 && c.Minor < 5:
		return "volta"
	case c.Major == 8 && c.Minor < 9:
		return "ampere"
	}
	names := map[int]string{
		1: "tesla", 2: "fermi", 3: "kepler", 5: "maxwell", 6: "pascal", 7: "turing", 8: "ada-lovelace", 9: "hopper",
		10: "blackwell", 12: "blackwell", 13: "rubin",
	}
	if name, known := names[c.Major]; known {
		return name
	}
	return "undefined"
}

// mib returns an amount of memory in the unit of labels.
func mib(bytes uint64) string { return fmt.Sprint(bytes >> 20) }
