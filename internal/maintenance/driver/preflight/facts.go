// Package preflight judges whether the NVIDIA driver of a node can be unloaded, changed, and loaded
// again: now, and after the next restart of the node. Its input is the facts about kernels, kernel
// modules, GPUs, and the users of the driver; its output is findings and the list of holders.
//
// The package is pure. Package driverfacts reads the facts.
package preflight

import (
	"cmp"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
)

// Facts are the facts about a node. Paths are paths on the node.
type Facts struct {
	Target        *Target // the wanted driver; nil for the present one
	System        diagnosis.Fact[System]
	Kernel        diagnosis.Fact[string]      // release of the running kernel
	NextBoot      diagnosis.Fact[NextBoot]    // kernel of the next boot
	Sets          diagnosis.Fact[[]ModuleSet] // of the kernels of this and of the next boot
	Loaded        diagnosis.Fact[[]LoadedModule]
	Driver        diagnosis.Fact[Driver]
	GPUs          diagnosis.Fact[[]GPU]
	Signatures    diagnosis.Fact[Signatures]
	Owners        diagnosis.Fact[[]Owner]
	FabricManager diagnosis.Fact[Companion]
	IMEX          diagnosis.Fact[Companion]
	Memory        diagnosis.Fact[Memory]
	Space         diagnosis.Fact[[]Space]
	Displays      diagnosis.Fact[[]Display]
	Processes     diagnosis.Fact[Processes]
	Devices       diagnosis.Fact[[]PodDevice]
	Claims        diagnosis.Fact[[]Claim]
}

// A Target is the driver that the node is to get.
type Target struct {
	// Name is the target as the user named it: a version, a branch such as 580, or a folder.
	Name string
	// Version is the version or the branch; empty if a folder does not tell its version.
	Version string
	// Folder is true if the target is a folder. Files are the kernel modules in the folder.
	Folder bool
	Files  []*ModuleFile
	// Problem is why the folder cannot be used; empty if it can.
	Problem string
}

// matches reports whether a driver version is the target.
func (t *Target) matches(version string) bool {
	return version == t.Version || strings.HasPrefix(version, t.Version+".")
}

// System is the operating system of the node.
type System struct {
	ID   string // of /etc/os-release, such as ubuntu or talos
	Name string // PRETTY_NAME
	// Image is true if the system is replaced as a whole, by another image or deployment.
	Image bool
}

// NextBoot is the kernel of the next boot.
type NextBoot struct {
	Release string
	Source  string // file that decides
}

// A ModuleSet is the NVIDIA kernel modules of a kernel release.
type ModuleSet struct {
	Release string
	Exists  bool          // the release has a folder of modules
	Files   []*ModuleFile // in the order of their paths
	Headers bool          // modules can be built: the kernel's headers are there
	// Sources are the driver versions whose sources DKMS has.
	Sources []string
	// Partial is true if the limit of files was reached.
	Partial bool
}

// A ModuleFile is a file with a kernel module of the driver.
type ModuleFile struct {
	Path string
	// Part is core, uvm, modeset, drm or peermem.
	Part     string
	Version  string // of the driver; empty if the file has none
	Vermagic string // kernel release and options for which the module was built
	License  string
	Signed   bool
	Signer   string // name of the key's owner; empty if the signature does not tell it
	// Listed is true if modprobe finds the file, by modules.dep.
	Listed bool
	// Unread is why the content is unknown, such as a compression; empty if it is known.
	Unread string
}

// Core is the Part of the module nvidia.
const Core = "core"

// release returns the kernel release for which the module was built; empty if unknown.
func (m *ModuleFile) release() string {
	release, _, _ := strings.Cut(m.Vermagic, " ")
	return release
}

// Open reports whether this is one of the open kernel modules.
func (m *ModuleFile) Open() bool { return strings.Contains(m.License, "GPL") }

// A LoadedModule is a row of /proc/modules.
type LoadedModule struct {
	Name       string
	References int      // by processes, and by the modules in Users
	Users      []string // names of modules
}

// Driver is the loaded driver.
type Driver struct {
	Version string // empty if the driver is not loaded
	Open    bool   // open kernel modules
}

// A GPU is an NVIDIA GPU on the PCI bus.
type GPU struct {
	Address string
	Device  uint16 // PCI device ID
	Module  string // name of the driver that the GPU is bound to; empty for none
}

// Signatures is what the kernel demands of modules.
type Signatures struct {
	SecureBoot diagnosis.Fact[bool]
	Lockdown   string // none, integrity or confidentiality; empty if unknown
	Enforced   bool   // module.sig_enforce
	// Keys are the names of the owners of the kernel's keys; empty if they cannot be seen.
	Keys []string
}

// required reports whether the kernel refuses modules without a known signature.
func (s Signatures) required() bool {
	return s.Enforced || s.Lockdown == "integrity" || s.Lockdown == "confidentiality"
}

// An Owner is what installed the driver.
type Owner struct {
	Kind     string // one of the constants below
	Version  string // empty if unknown
	Evidence string // a file
}

// The kinds of owners.
const (
	Dpkg            = "dpkg packages"
	RPM             = "rpm packages"
	RunFile         = "NVIDIA's .run installer"
	DriverContainer = "the GPU operator's driver container"
	GKE             = "GKE's driver installer"
	GPUDriver       = "gpu-driver"
	Image           = "the image of the system"
)

// A Companion is a service that must have the version of the driver.
type Companion struct {
	Runs    bool
	Version string // empty if unknown
	Source  string // where the version was found
}

// Memory is the state of coherent GPU memory.
type Memory struct {
	Mode  string // value of CoherentGPUMemoryMode; empty if it is not set
	Nodes []int  // NUMA nodes with memory and without processors
}

// Space is the free space of a file system.
type Space struct {
	Path string
	Free uint64 // bytes
}

// A Display is a console or a screen on a GPU.
type Display struct {
	Name     string // file below /sys/class
	Console  bool   // console of the kernel
	Evidence string
}

// Processes are the processes that use the driver.
type Processes struct {
	Users []Process
	// Number counts all processes, and Closed those whose open files could not be read. Unread are the
	// PIDs of processes that were not read in time.
	Number, Closed int
	Unread         []int
}

// A Process has device nodes or libraries of the driver open.
type Process struct {
	PID       int
	Name      string
	Devices   []string // device nodes, in order
	Library   bool     // libcuda is mapped
	Service   string   // unit of systemd; empty for none
	Container string   // ID of the container; empty outside of containers
	PodUID    string
	// Namespace, Pod and ContainerName are empty if the node does not tell them.
	Namespace, Pod, ContainerName string
	// Known is true for a service of the driver that was recognized by its name alone.
	Known bool
}

// A PodDevice is a device that the kubelet gave to a container.
type PodDevice struct {
	Namespace, Pod, Container string
	Resource                  string // empty for a claim
	Claim                     string // NAMESPACE/NAME of the claim; empty for a resource
}

// A Claim is a prepared ResourceClaim.
type Claim struct{ Namespace, Name string }

// releases returns the known kernel releases, each once, with the words for its boot.
func (f *Facts) releases() (all []boot) {
	if f.Kernel.Known() {
		all = append(all, boot{f.Kernel.Value, "this boot"})
	}
	if f.NextBoot.Known() {
		if len(all) > 0 && all[0].release == f.NextBoot.Value.Release {
			all[0].when = "this and the next boot"
			return all
		}
		all = append(all, boot{f.NextBoot.Value.Release, "the next boot"})
	}
	return all
}

type boot struct{ release, when string }

func (b boot) String() string { return "kernel " + b.release + " (" + b.when + ")" }

// set returns the modules of a release; false if they are unknown.
func (f *Facts) set(release string) (ModuleSet, bool) {
	i := slices.IndexFunc(f.Sets.Value, func(s ModuleSet) bool { return s.Release == release })
	if !f.Sets.Known() || i < 0 {
		return ModuleSet{}, false
	}
	return f.Sets.Value[i], true
}

// files returns the modules that modprobe would load with a release, or those of the target folder.
func (f *Facts) files(release string) []*ModuleFile {
	if f.Target != nil && f.Target.Folder {
		return filter(f.Target.Files, func(m *ModuleFile) bool { return m.release() == release })
	}
	set, _ := f.set(release)
	if listed := filter(set.Files, func(m *ModuleFile) bool { return m.Listed }); slices.ContainsFunc(listed, isCore) {
		return listed
	}
	return set.Files
}

func isCore(m *ModuleFile) bool { return m.Part == Core }

//go:noinline
func filter[T any](all []T, is func(T) bool) (some []T) {
	for _, one := range all {
		if is(one) {
			some = append(some, one)
		}
	}
	return some
}

// owned reports whether the driver has an owner of a kind.
func (f *Facts) owned(kind string) bool {
	return slices.ContainsFunc(f.Owners.Value, func(o Owner) bool { return o.Kind == kind })
}

// wanted returns the version of the driver in question: of the target, or of the present driver;
// empty if unknown.
func (f *Facts) wanted() string {
	if f.Target != nil {
		return f.Target.Version
	}
	if f.Driver.Value.Version != "" {
		return f.Driver.Value.Version
	}
	for _, m := range f.files(f.Kernel.Value) {
		if isCore(m) && m.Version != "" {
			return m.Version
		}
	}
	return ""
}

// name returns the words for the driver in question.
func (f *Facts) name() string {
	switch {
	case f.Target != nil && f.Target.Folder:
		return "driver " + cmp.Or(f.Target.Version, "of "+f.Target.Name)
	case f.wanted() != "":
		return "driver " + f.wanted()
	}
	return "the driver"
}
