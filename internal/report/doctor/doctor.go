// Package doctor judges a node: from what is known of its driver, its device nodes, its container
// runtimes, its kubelet and the daemon that runs on it, to findings, each with evidence and the
// commands that repair it.
//
// It is pure. Package nodefacts fills in the facts; package cli prints the findings.
package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// Severity is how bad a finding is.
type Severity int

// The severities, the least first.
const (
	OK Severity = iota
	Info
	NotChecked // something could not be seen
	Warning
	Error
)

// severities are the names of the severities.
var severities = [...]string{OK: "ok", Info: "info", NotChecked: "not checked", Warning: "warning", Error: "error"}

func (s Severity) String() string {
	if s < 0 || int(s) >= len(severities) {
		return fmt.Sprintf("Severity(%d)", int(s))
	}
	return severities[s]
}

// MarshalText returns the name of a severity.
func (s Severity) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// A Finding is the result of a check, or one of several.
type Finding struct {
	// Check is the name of the check.
	Check    string   `json:"check"`
	Severity Severity `json:"severity"`
	// Message is a sentence without a full stop.
	Message string `json:"message"`
	// Evidence are files of the node, with what they say, and values.
	Evidence []string `json:"evidence,omitempty"`
	// Remedy are commands, in their order, for a shell of root on the node; those of gpu-device-plugin
	// are for the daemon's container.
	Remedy []string `json:"remedy,omitempty"`
}

// A Fact is a reading of a part of the node.
type Fact[T any] struct {
	Value T
	// Missing says why Value is not known, and how it can be made known; empty if it is known.
	Missing string
	// Hung says that Value is missing because reading it did not return.
	Hung bool
}

// NodeFacts are what is known of a node. Paths are those that the node has.
type NodeFacts struct {
	Settings      Settings
	Today         time.Time         // zero if it does not matter
	Simulated     bool              // the GPUs are; the files of the driver are then those of the simulated node
	WSL           bool              // the node is Windows' subsystem for Linux
	GPUs          Fact[[]PCIDevice] // without those that are given to virtual machines
	GPUsGivenAway Fact[[]PCIDevice]
	NVSwitches    Fact[[]PCIDevice]
	Module        Fact[string]   // the version of the loaded kernel module; empty if it is not loaded
	Modules       Fact[[]string] // the names of all kernel modules that are loaded
	Library       Fact[NVMLLibrary]
	Devices       Fact[Devices]  // of the node
	Container     Fact[Devices]  // of the container in which doctor runs; Missing if it runs in none
	Processes     Fact[[]string] // the names of those that run, cut to 15 bytes by the kernel
	Runtime       Fact[Runtime]
	Toolkit       Fact[Toolkit]
	Specs         Fact[[]Spec]
	SELinux       Fact[SELinux]
	Kubelet       Fact[Kubelet]
	PodResources  Fact[PodResourcesAnswer]
	Daemon        Fact[Daemon]
}

// Settings are the options of the daemon that matter for its node.
type Settings struct {
	// Problem says why the configuration file is not used; then the other settings are without it.
	Problem    string
	ConfigFile string
	// CDI, Envvar and VolumeMounts say which device list strategies are used; DeviceNodes, that
	// containers get device nodes, too.
	CDI, Envvar, VolumeMounts, DeviceNodes bool
	// CDIFolder is the folder of the daemon's CDI specs, and CDIVendor their vendor.
	CDIFolder, CDIVendor string
	// KernelLog says that XIDs are read from the kernel's log, too.
	KernelLog bool
	// MPS says that GPUs are shared by MPS.
	MPS bool
	// Claims says that GPUs are given by Dynamic Resource Allocation.
	Claims bool
	// DriverRoot is the folder of the node below which the driver is installed.
	DriverRoot string
	// Companions are what containers are to have beside their GPUs.
	Companions []CompanionModule
}

// A Check looks at a part of the facts. It has one finding at least.
type Check struct {
	Name  string
	About string // what is checked
	Needs string // what doctor has to see for it
	judge func(*NodeFacts, *findings)
}

// Checks are all checks, in the order in which their findings are printed if these are equally bad.
var Checks = []Check{
	{
		"gpus", "GPUs on the PCI bus are bound to the driver `nvidia`", "`/sys/bus/pci`", gpus,
	},
	{
		"driver", "the kernel module is loaded, NVML's library is there, both have one version, and NVIDIA maintains " +
			"its branch",
		"`/proc/driver/nvidia/version` or `/sys/module/nvidia/version`; the driver root", driver,
	},
	{
		"device-nodes", "`/dev/nvidia*` are there with the driver's device numbers, on the node and in the daemon's " +
			"container",
		"`/proc/devices`, `/proc/driver/nvidia/gpus`, the node's `/dev`", deviceNodes,
	},
	{
		"companions", "GDRCopy, GPUDirect Storage and MOFED are loaded where containers are to have them",
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
		"kernel-log", "XIDs that some drivers only log are read from the kernel's log", "`/sys/bus/pci`; the configuration",
		kernelLog,
	},
	{
		"fabric-manager", "Fabric Manager runs where there are NVSwitches",
		"`/sys/bus/pci`; a running daemon, or the node's processes",
		fabricManager,
	},
	{
		"container-runtime",
		"the container runtime that the kubelet uses starts with its configuration, reads all of it, and has CDI on, " +
			"with the daemon's folder, where CDI is used",
		"the node's processes, the configuration of the kubelet and of the runtime, and the containerd program",
		containerRuntime,
	},
	{
		"nvidia-runtime",
		"NVIDIA's runtime is there where the device list strategy needs it: as the default, or as a runtime class, " +
			"with cgroups as those of runc; whether `runtime: none` works",
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
		"cdi-specs", "CDI specs for NVIDIA's devices can be read, name files that exist, and do not name one device twice",
		"the node's `/etc/cdi` and `/var/run/cdi`, its `/dev`, and the driver's files", cdiSpecs,
	},
	{
		"selinux", "SELinux lets the daemon and containers with GPUs work", "`/sys/fs/selinux`", selinux,
	},
	{
		"kubelet", "kubelet's folder is there, its socket answers, and no other device plugin or DRA driver registers GPUs",
		"the folder of `--kubelet-socket`; for DRA drivers also `plugins_registry` beside it", kubelet,
	},
	{
		"pod-resources", "kubelet's PodResources service answers", "the socket of `--pod-resources-socket`", podResources,
	},
	{
		"dra", "GPUs that are given by Dynamic Resource Allocation are in slices as they are to be, with a driver " +
			"that kubelet has registered, no device plugin has them, and the API server keeps what is published " +
			"(taints, and counters and shares where they are needed)",
		"a running daemon; PodResources", allocation,
	},
	{
		"daemon", "the daemon answers, is ready, and reports no faults and no warnings", "the socket of `--control-socket`",
		daemon,
	},
	{
		"mps", "the MPS control daemons answer where GPUs are shared by MPS, and none runs where they are not",
		"a running daemon, or the node's processes", mps,
	},
}

// Examine judges the facts. The worst findings come first.
func Examine(f NodeFacts) []Finding {
	all := findings{check: "configuration"}
	if f.Settings.Problem != "" {
		all.fail(f.Settings.Problem, nil, "gpu-device-plugin config check "+f.Settings.ConfigFile)
	}
	for _, c := range Checks {
		all.check = c.Name
		c.judge(&f, &all)
	}
	slices.SortStableFunc(all.list, func(a, b Finding) int { return cmp.Compare(b.Severity, a.Severity) })
	return all.list
}

// Worst returns the greatest severity of the findings.
func Worst(all []Finding) Severity {
	worst := OK
	for _, f := range all {
		worst = max(worst, f.Severity)
	}
	return worst
}

// findings collects the findings of a check.
type findings struct {
	check string
	list  []Finding
}

func (f *findings) add(s Severity, message string, evidence, remedy []string) {
	f.list = append(f.list, Finding{Check: f.check, Severity: s, Message: message, Evidence: evidence, Remedy: remedy})
}

func (f *findings) ok(message string, evidence ...string) { f.add(OK, message, evidence, nil) }

func (f *findings) info(message string, evidence []string, remedy ...string) {
	f.add(Info, message, evidence, remedy)
}

func (f *findings) skip(message string, remedy ...string) { f.add(NotChecked, message, nil, remedy) }

func (f *findings) warn(message string, evidence []string, remedy ...string) {
	f.add(Warning, message, evidence, remedy)
}

func (f *findings) fail(message string, evidence []string, remedy ...string) {
	f.add(Error, message, evidence, remedy)
}

// found reports whether the check has a finding that is worse than ok.
func (f *findings) found() bool {
	return slices.ContainsFunc(f.list, func(one Finding) bool { return one.Check == f.check && one.Severity != OK })
}

// known reports whether a fact is known. If it is not, that is a finding.
func known[T any](f *findings, fact Fact[T]) bool {
	switch {
	case fact.Hung:
		f.warn(fact.Missing, nil, "dmesg | tail -50")
	case fact.Missing != "":
		f.skip(fact.Missing)
	}
	return fact.Missing == ""
}
