// Package doctor judges a node. Its input is the facts about the driver, device nodes, container
// runtime, kubelet and daemon; its output is findings with evidence and repair commands.
//
// The package is pure. Package nodefacts reads the facts; package cli prints the findings.
package doctor

import (
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
)

// The codes that kubectl gpu why looks for. The program knows them by their text.
const (
	// codeNoGPUs is the code of each problem because of which containers start without GPUs.
	codeNoGPUs = "containers-get-no-gpus"
	// codeNeedsClass is the code of a node whose pods with GPUs need a runtime class.
	codeNeedsClass = "pods-need-runtime-class"
)

// NodeFacts are the facts about a node. Paths are paths on the node.
type NodeFacts struct {
	Settings      Settings
	Today         time.Time                   // zero if irrelevant
	Simulated     bool                        // the GPUs and the driver's files are simulated
	WSL           bool                        // the node is Windows Subsystem for Linux
	GPUs          diagnosis.Fact[[]PCIDevice] // without GPUs of virtual machines
	GPUsGivenAway diagnosis.Fact[[]PCIDevice]
	NVSwitches    diagnosis.Fact[[]PCIDevice]
	Module        diagnosis.Fact[string]   // version of the loaded kernel module; empty if it is not loaded
	Modules       diagnosis.Fact[[]string] // names of all loaded kernel modules
	Library       diagnosis.Fact[NVMLLibrary]
	Devices       diagnosis.Fact[Devices]  // of the node
	Container     diagnosis.Fact[Devices]  // of doctor's container; Missing outside of containers
	Processes     diagnosis.Fact[[]string] // names of running processes, which the kernel cuts to 15 bytes
	Runtime       diagnosis.Fact[Runtime]
	Toolkit       diagnosis.Fact[Toolkit]
	Specs         diagnosis.Fact[[]Spec]
	SELinux       diagnosis.Fact[SELinux]
	Kubelet       diagnosis.Fact[Kubelet]
	PodResources  diagnosis.Fact[PodResourcesAnswer]
	Daemon        diagnosis.Fact[Daemon]
	// NextBoot are the findings of preflight about the driver's modules at each boot.
	NextBoot diagnosis.Fact[[]diagnosis.Finding]
}

// Settings are the daemon's options that affect checks of the node.
type Settings struct {
	// Problem is why the configuration file is not used. The other settings are then computed
	// without the file.
	Problem    string
	ConfigFile string
	// CDI, Envvar and VolumeMounts are the device list strategies in use. DeviceNodes is true if
	// containers also get device nodes.
	CDI, Envvar, VolumeMounts, DeviceNodes bool
	// CDIFolder is the folder of the daemon's CDI specs, and CDIVendor their vendor.
	CDIFolder, CDIVendor string
	// KernelLog is true if XIDs are also read from the kernel log.
	KernelLog bool
	// MPS is true if GPUs are shared by MPS.
	MPS bool
	// Claims is true if GPUs are offered by Dynamic Resource Allocation.
	Claims bool
	// DriverRoot is the folder of the node with the driver installation.
	DriverRoot string
	// Companions are the modules that containers get besides their GPUs.
	Companions []CompanionModule
	// Reader is where the remedies are read.
	Reader Reader
}

// A Check judges a part of the facts. Every check has at least one finding.
type Check struct {
	Name  string
	About string // subject of the check
	Needs string // sources that doctor must be able to read
	judge func(*NodeFacts, *findings)
}

// Checks are all checks. Findings of equal severity are printed in this order.
var Checks = []Check{
	{
		"gpus", "GPUs on the PCI bus are bound to the driver `nvidia`", "`/sys/bus/pci`", gpus,
	},
	{
		"driver", "the kernel module is loaded, NVML's library exists, their versions match, and NVIDIA maintains " +
			"the driver branch",
		"`/proc/driver/nvidia/version` or `/sys/module/nvidia/version`; the driver root", driver,
	},
	{
		"next-boot", "the driver's modules for the kernels of this and of the next boot exist, fit, are signed " +
			"where the kernel demands that, and support the GPUs",
		"`/boot`, `/lib/modules`, `/proc`, `/sys`; see [Driver](driver.md)", nextBoot,
	},
	{
		"device-nodes", "`/dev/nvidia*` exist with the driver's device numbers, on the node and in the daemon's " +
			"container",
		"`/proc/devices`, `/proc/driver/nvidia/gpus`, the node's `/dev`", deviceNodes,
	},
	{
		"companions", "GDRCopy, GPUDirect Storage and MOFED are loaded if they are configured",
		"`/proc/modules`, the node's `/dev`, the configuration", companions,
	},
	{
		"driver-upgrade", "an upgrade of the GPU operator's driver container finds the pods that use GPUs",
		"a running daemon, the configuration", driverUpgrade,
	},
	{
		"persistence", "persistence mode is on", "a running daemon, or the node's processes", persistence,
	},
	{
		"kernel-log", "XIDs that some drivers only log are read from the kernel log",
		"`/sys/bus/pci`; the configuration",
		kernelLog,
	},
	{
		"fabric-manager", "Fabric Manager is running on nodes with NVSwitches",
		"`/sys/bus/pci`; a running daemon, or the node's processes",
		fabricManager,
	},
	{
		"container-runtime",
		"the kubelet's container runtime starts with its configuration, reads all of it, and, where CDI is used, has " +
			"CDI on and reads the daemon's folder",
		"the node's processes, the configuration of the kubelet and of the runtime, and the containerd program",
		containerRuntime,
	},
	{
		"nvidia-runtime",
		"NVIDIA's runtime exists if the device list strategy needs it, as the default or as a runtime class, and " +
			"with the cgroup driver of runc; whether `runtime: none` works",
		"as `container-runtime`", nvidiaRuntime,
	},
	{
		"visible-devices",
		"a pod cannot get all GPUs by `NVIDIA_VISIBLE_DEVICES`, and NVIDIA's runtime accepts the device list " +
			"strategy and lets containers open devices",
		"`config.toml` of NVIDIA's runtime, in `/etc/nvidia-container-runtime` or beside its program", visibleDevices,
	},
	{
		"daemon-reload", "containers keep their GPUs at `systemctl daemon-reload`",
		"as `container-runtime`; the node's `/dev/char`",
		daemonReload,
	},
	{
		"cdi-specs", "CDI specs for NVIDIA's devices can be read, name existing files, and name each device once",
		"the node's `/etc/cdi` and `/var/run/cdi`, its `/dev`, and the driver's files", cdiSpecs,
	},
	{
		"selinux", "SELinux lets the daemon and containers with GPUs work", "`/sys/fs/selinux`", selinux,
	},
	{
		"kubelet", "the kubelet's folder exists, its socket answers, and no other device plugin or DRA driver " +
			"registers GPUs",
		"the folder of `--kubelet-socket`; for DRA drivers also `plugins_registry` beside it", kubelet,
	},
	{
		"pod-resources", "the kubelet's PodResources service answers", "the socket of `--pod-resources-socket`",
		podResources,
	},
	{
		"dra", "GPUs of Dynamic Resource Allocation are in ResourceSlices as wanted, the kubelet has registered the " +
			"driver, no device plugin offers these GPUs, and the API server keeps the published fields (taints, and " +
			"counters and shares where needed)",
		"a running daemon; PodResources", allocation,
	},
	{
		"daemon", "the daemon answers, is ready, and reports no faults and no warnings",
		"the socket of `--control-socket`",
		daemon,
	},
	{
		"mps", "the MPS control daemons answer if GPUs are shared by MPS, and none is running otherwise",
		"a running daemon, or the node's processes", mps,
	},
}

// Examine judges the facts. The worst findings come first.
func Examine(f NodeFacts) []diagnosis.Finding {
	all := findings{check: "configuration"}
	if f.Settings.Problem != "" {
		all.fail("config-invalid", f.Settings.Problem, nil, "gpu-device-plugin config check "+f.Settings.ConfigFile)
	}
	for _, c := range Checks {
		all.check = c.Name
		c.judge(&f, &all)
	}
	for i, one := range all.list {
		all.list[i].Remedy = nil
		for _, command := range one.Remedy {
			all.list[i].Remedy = append(all.list[i].Remedy, f.Settings.Reader.command(command))
		}
	}
	diagnosis.SortWorstFirst(all.list)
	return all.list
}

// findings collects the findings of a check.
type findings struct {
	check string
	list  []diagnosis.Finding
}

func (f *findings) add(s diagnosis.Severity, code, message string, evidence, remedy []string) {
	f.list = append(f.list,
		diagnosis.Finding{Check: f.check, Code: code, Severity: s, Message: message, Evidence: evidence,
			Remedy: remedy})
}

func (f *findings) ok(message string, evidence ...string) {
	f.add(diagnosis.OK, "", message, evidence, nil)
}

func (f *findings) skip(message string, remedy ...string) {
	f.add(diagnosis.NotChecked, "", message, nil, remedy)
}

func (f *findings) info(code, message string, evidence []string, remedy ...string) {
	f.add(diagnosis.Info, code, message, evidence, remedy)
}

func (f *findings) warn(code, message string, evidence []string, remedy ...string) {
	f.add(diagnosis.Warning, code, message, evidence, remedy)
}

func (f *findings) fail(code, message string, evidence []string, remedy ...string) {
	f.add(diagnosis.Error, code, message, evidence, remedy)
}

// hasProblem reports whether the check has a finding worse than ok.
func (f *findings) hasProblem() bool {
	return slices.ContainsFunc(f.list,
		func(one diagnosis.Finding) bool { return one.Check == f.check && one.Severity != diagnosis.OK })
}

// hasWarning reports whether the check has a warning or an error.
func (f *findings) hasWarning() bool {
	return slices.ContainsFunc(f.list,
		func(one diagnosis.Finding) bool { return one.Check == f.check && one.Severity >= diagnosis.Warning })
}

// require reports whether a fact is known. It adds a finding for an unknown fact.
func require[T any](f *findings, fact diagnosis.Fact[T]) bool {
	switch {
	case fact.Hung:
		f.warn("read-hangs", fact.Missing, nil, "dmesg | tail -50")
	case fact.Missing != "":
		f.skip(fact.Missing)
	}
	return fact.Missing == ""
}
