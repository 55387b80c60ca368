package simulator

import (
	"cmp"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

//go:embed models/*.yaml profiles/*.yaml
var embedded embed.FS

// A Profile is a machine to simulate, as described by its YAML file.
type Profile struct {
	// Name is the file's name without its ending. The UUIDs of the GPUs are derived from it.
	Name string `json:"-"`
	// Description describes the machine in one line.
	Description string `json:"description"`
	// Driver is the driver's version, such as "580.95.05".
	Driver string `json:"driver"`
	// CUDA is the newest CUDA version supported by the driver, such as "13.0".
	CUDA string `json:"cuda"`
	// Model is the default model of the GPUs: a file in models, or a key of Models.
	Model string `json:"model"`
	// Models are additional models by key. They take precedence over the files in models.
	Models map[string]Model `json:"models,omitempty"`
	// GPUs are the GPUs by ascending PCI address: NVML's order.
	GPUs []GPU `json:"gpus"`
	// NVSwitches are the PCI addresses of the switches at the end of all NVLinks. Without switches,
	// NVLinks has the connections.
	NVSwitches []string `json:"nvswitches,omitempty"`
	// NVLinks is the matrix of direct NVLinks: one row for each GPU, with the number of lanes to
	// each GPU, separated by blanks.
	NVLinks []string `json:"nvlinks,omitempty"`
	// Fabric is the multi-node NVLink fabric of the GPUs; nil without one.
	Fabric *Fabric `json:"fabric,omitempty"`
	// VirtualMachine is true for a virtual machine, where the driver resets no GPU.
	VirtualMachine bool `json:"virtualMachine,omitempty"`
	// Faults are faults of the machine from the start, in their order.
	Faults []Fault `json:"faults,omitempty"`

	ends [][]linkEnd // the other ends of NVLinks: by position of the GPU, and number of its NVLink
}

// A GPU is one GPU of a Profile.
type GPU struct {
	// BDF is the PCI address, such as "0000:1b:00.0".
	BDF string `json:"bdf"`
	// PCIe is the path to the GPU through the PCIe tree: NUMA node, host bridge, and the switches
	// below, separated by slashes, such as "0/1/0". The more first steps two paths share, the
	// nearer are the GPUs.
	PCIe string `json:"pcie"`
	// NUMA is the NUMA node in sysfs, if different from the first step of PCIe; -1 if the firmware
	// does not say.
	NUMA *int `json:"numa,omitempty"`
	// Minor is the N of /dev/nvidiaN; by default the GPU's position in the list.
	Minor *int `json:"minor,omitempty"`
	// UUID is NVML's name of the GPU; by default derived from the profile's name and the GPU's
	// position.
	UUID string `json:"uuid,omitempty"`
	// Model is the key of the GPU's model, if different from the profile's Model.
	Model string `json:"model,omitempty"`
	// MIG is the MIG layout of the GPU, by the names of the MIG devices; nil if MIG mode is off.
	// Devices with fewer compute slices than their GPU instance ("1c.3g.40gb") fill one GPU
	// instance after another.
	MIG []string `json:"mig,omitempty"`

	// VGPU makes the GPU a virtual one of a hypervisor; nil for a physical GPU.
	VGPU *VGPU `json:"vgpu,omitempty"`

	model Model
	pci   nvml.PciInfo
	root  string // the PCIe root complex, one for each host bridge
	numa  int
	minor int
}

// A Fabric is a multi-node NVLink fabric: the UUID of its cluster, and the machine's clique.
type Fabric struct {
	Cluster string `json:"cluster"`
	Clique  uint32 `json:"clique"`
}

var clusterForm = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
})

// A VGPU is the hypervisor's driver as reported by a virtual GPU: its version and branch, of 10
// bytes at most.
type VGPU struct {
	HostDriver string `json:"hostDriver"`
	HostBranch string `json:"hostBranch"`
}

// A Model has the properties of all GPUs of a product.
type Model struct {
	Name string `json:"name"`
	// Brand is tesla, geforce or nvidia; by default nvidia.
	Brand        string `json:"brand,omitempty"`
	Architecture string `json:"architecture"`
	// Addressing is none, hmm or ats; if unset, the driver does not report it.
	Addressing string `json:"addressing,omitempty"`
	Compute    string `json:"compute"`
	// MemoryMiB is the total memory in NVML.
	MemoryMiB uint64 `json:"memoryMiB"`
	// PCI is the device ID and the vendor ID in NVML's format.
	PCI string `json:"pci"`
	// Class is the PCI class; by default 0x030200, a 3D controller.
	Class  string       `json:"class,omitempty"`
	NVLink NVLink       `json:"nvlink,omitempty"`
	MIG    []MIGProfile `json:"mig,omitempty"`
	// MemorySlices is the number of memory slices in MIG mode; by default 8.
	MemorySlices int `json:"memorySlices,omitempty"`

	architecture  uint32
	brand         nvml.BrandType
	addressing    nvml.DeviceAddressingModeType
	major, minor  int
	pciDevice     uint32
	computeSlices int // limit for all instances together
}

// NVLink is the number and version of a Model's NVLinks.
type NVLink struct {
	Links   int    `json:"links"`
	Version string `json:"version"`
}

// A MIGProfile is a size of GPU instances of a Model.
type MIGProfile struct {
	// Name is the profile's name, such as "1g.10gb" or "1g.10gb+me".
	Name string `json:"name"`
	// ID is the number printed by nvidia-smi mig -lgip.
	ID uint32 `json:"id"`
	// Count is the number of instances that fit on a GPU.
	Count int `json:"count"`
	// The resources of an instance.
	SMs         uint32 `json:"sms"`
	MemoryMiB   uint64 `json:"memoryMiB"`
	CopyEngines uint32 `json:"copyEngines"`
	Decoders    uint32 `json:"decoders,omitempty"`
	JPEGs       uint32 `json:"jpegs,omitempty"`
	OFAs        uint32 `json:"ofas,omitempty"`

	number int   // NVML's GPU_INSTANCE_PROFILE_ constant
	slices int   // compute slices
	memory int   // memory slices
	starts []int // possible first memory slices of an instance
}

// Names returns the names of the embedded profiles, sorted.
func Names() []string {
	return embeddedNames("profiles")
}

// embeddedNames returns the names of the files in an embedded directory, sorted and without their
// ending.
func embeddedNames(folder string) []string {
	files, err := fs.Glob(embedded, folder+"/*.yaml")
	if err != nil {
		panic(err) // folder is a constant
	}
	for i, f := range files {
		files[i] = strings.TrimSuffix(path.Base(f), ".yaml")
	}
	return files
}

// maxProfile is the largest accepted profile file, in bytes.
const maxProfile = 1 << 20

// Load returns the embedded profile with a name (see Names), or, if the name ends in .yaml or .yml,
// the profile in the file at that path.
func Load(nameOrPath string) (Profile, error) {
	if ext := filepath.Ext(nameOrPath); ext == ".yaml" || ext == ".yml" {
		data, err := statefile.Read(nameOrPath, maxProfile)
		if err != nil {
			return Profile{},
				fmt.Errorf("read simulator profile: %w: give the path of a file that can be read, or one of %s",
					err, strings.Join(Names(), ", "))
		}
		return parse(nameOrPath, data)
	}
	file := "profiles/" + nameOrPath + ".yaml"
	data, err := embedded.ReadFile(file)
	if err != nil {
		return Profile{}, fmt.Errorf("no simulator profile is called %q: give one of %s, or the path of a file that "+
			"ends in .yaml", nameOrPath, strings.Join(Names(), ", "))
	}
	return parse(file, data)
}

// parse decodes and completes the profile of a file.
func parse(file string, data []byte) (Profile, error) {
	var p Profile
	if err := yaml.UnmarshalStrict(data, &p); err != nil {
		return Profile{}, fmt.Errorf("read simulator profile %s: %w: correct it; a profile has the keys description, "+
			"driver, cuda, model, models, gpus (bdf, pcie, numa, minor, uuid, model, mig, vgpu), nvswitches, "+
			"nvlinks, fabric and faults",
			file, trimDecoder(err))
	}
	p.Name = strings.TrimSuffix(filepath.Base(file), filepath.Ext(file))
	if err := p.complete(); err != nil {
		return Profile{}, fmt.Errorf("read simulator profile %s: %w", file, err)
	}
	return p, nil
}

// trimDecoder removes the YAML library's introduction of an error, which names steps of the library
// instead of the file.
func trimDecoder(err error) error {
	text := err.Error()
	for _, prefix := range []string{
		"error converting YAML to JSON: ", "error unmarshaling JSON: while decoding JSON: ", "yaml: ", "json: ",
	} {
		text = strings.TrimPrefix(text, prefix)
	}
	return errors.New(text)
}

// modelOf returns the model with a key: from known, or an embedded model, which is added to known.
func modelOf(key string, known map[string]Model) (Model, error) {
	if m, ok := known[key]; ok {
		return m, nil
	}
	data, err := embedded.ReadFile("models/" + key + ".yaml")
	if err != nil {
		keys := slices.AppendSeq(embeddedNames("models"), maps.Keys(known))
		slices.Sort(keys)
		return Model{}, fmt.Errorf("model %q is not known: give one of %s, or describe it under models",
			key, strings.Join(slices.Compact(keys), ", "))
	}
	var m Model
	if err := yaml.UnmarshalStrict(data, &m); err != nil {
		return Model{}, fmt.Errorf("read simulator model %s: %w", key, err)
	}
	known[key] = m
	return m, nil
}

// complete fills in defaults, and refuses an invalid machine.
func (p *Profile) complete() error {
	if _, err := branch(p.Driver); err != nil {
		return err
	}
	if _, err := cudaVersion(p.CUDA); err != nil {
		return err
	}
	models := maps.Clone(p.Models)
	if models == nil {
		models = map[string]Model{}
	}
	if len(p.GPUs) == 0 {
		return errors.New("gpus is empty: list at least one GPU with bdf and pcie")
	}
	if f := p.Fabric; f != nil && !clusterForm().MatchString(f.Cluster) {
		return fmt.Errorf("fabric: cluster %q is not a UUID in lower case", f.Cluster)
	}
	for i := range p.GPUs {
		if err := p.completeGPU(i, models); err != nil {
			return fmt.Errorf("gpus[%d]: %w", i, err)
		}
	}
	for i, g := range p.GPUs[1:] {
		if g.BDF <= p.GPUs[i].BDF {
			return fmt.Errorf("gpus[%d]: bdf %s does not follow %s: list the GPUs by ascending PCI address",
				i+1, g.BDF, p.GPUs[i].BDF)
		}
	}
	for i, g := range p.GPUs {
		if j := slices.IndexFunc(p.GPUs[:i], func(o GPU) bool {
			return o.UUID == g.UUID || o.minor == g.minor
		}); j >= 0 {
			return fmt.Errorf("gpus[%d]: has the uuid or the minor of gpus[%d]", i, j)
		}
	}
	if err := p.completeLinks(); err != nil {
		return err
	}
	_, err := build(*p)
	return err
}

// completeGPU completes the GPU at position i. It adds loaded models to models.
func (p *Profile) completeGPU(i int, models map[string]Model) error {
	g := &p.GPUs[i]
	pci, err := parseBDF(g.BDF)
	if err != nil {
		return err
	}
	g.Model = cmp.Or(g.Model, p.Model)
	m, err := modelOf(g.Model, models)
	if err != nil {
		return err
	}
	if err := m.complete(); err != nil {
		return fmt.Errorf("model %s: %w", g.Model, err)
	}
	g.model, g.pci = m, pci
	g.pci.PciDeviceId = m.pciDevice
	node, err := firstStep(g.PCIe)
	if err != nil {
		return err
	}
	g.numa, g.minor = node, i
	if g.NUMA != nil {
		g.numa = *g.NUMA
	}
	if g.Minor != nil {
		g.minor = *g.Minor
	}
	g.root = p.pcieRoot(i)
	g.UUID = cmp.Or(g.UUID, "GPU-"+deriveUUID(p.Name, "gpu", fmt.Sprint(i)))
	return nil
}
