package doctor

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Runtime is the kubelet's container runtime.
type Runtime struct {
	Name string // Containerd, CRIO or Docker
	// Distribution is the installer of the runtime; Packages if there is nothing special.
	Distribution Distribution
	// Service is the systemd unit or the snap to restart after a change of the configuration.
	Service string
	// Found says how the runtime was found.
	Found string
	// Config is the main configuration file, even if it does not exist yet. Files are the files
	// that were read, in order; empty if the defaults apply.
	Config string
	Files  []string
	// Problems are the unreadable files, with reasons.
	Problems []string
	// Readings are the interpretations of the files. There are several if the runtime's version is
	// unknown and matters.
	Readings []Reading
}

// The names of container runtimes.
const (
	Containerd = "containerd"
	CRIO       = "CRI-O"
	Docker     = "Docker"
)

// A Reading is the effective configuration in some versions of a container runtime.
type Reading struct {
	Versions string // such as "2.0 to 2.2"; empty if irrelevant
	// Refused is why the runtime does not start with the files.
	Refused string
	// Disabled is true if the CRI plugin of containerd, which the kubelet needs, is switched off.
	Disabled bool
	// CDI is true if CDI is on, and CDIExists if the runtime supports CDI. CDISetting is the setting
	// in the files; nil if unset.
	CDI, CDIExists bool
	CDISetting     *bool
	// CDIFolders are the folders of CDI specs.
	CDIFolders []string
	// Default is the name of the handler of pods without a runtime class.
	Default  string
	Handlers []RuntimeHandler
	// Ignored are handlers in the files that the runtime ignores, with reasons.
	Ignored []string
}

// A RuntimeHandler is a low-level runtime with which a container runtime starts containers.
type RuntimeHandler struct {
	Name    string
	Program string // path; empty for the default
	Absent  bool   // the program does not exist
	Systemd bool   // systemd creates the cgroups
	Implied bool   // a default that no file mentions
}

// nvidia reports whether the handler is NVIDIA's runtime.
func (h RuntimeHandler) nvidia() bool {
	return strings.HasPrefix(path.Base(h.Program), "nvidia-container-runtime")
}

// NVIDIA returns NVIDIA's handler, preferably the default handler.
func (r Reading) NVIDIA() (h RuntimeHandler, isDefault, found bool) {
	for _, h := range r.Handlers {
		if h.Name == r.Default && h.nvidia() {
			return h, true, true
		}
	}
	i := slices.IndexFunc(r.Handlers, RuntimeHandler.nvidia)
	if i < 0 {
		return RuntimeHandler{}, false, false
	}
	return r.Handlers[i], false, true
}

// title returns the names of the runtime and its distribution.
func (r Runtime) title() string {
	if r.Distribution == Packages {
		return r.Name
	}
	return r.Name + " of " + string(r.Distribution)
}

// evidence returns the files of the configuration, and how the runtime was found.
func (r Runtime) evidence(says ...string) []string {
	files := r.title() + " has no configuration file"
	if len(r.Files) > 0 {
		files = strings.Join(r.Files, ", ")
	}
	all := append([]string{files}, says...)
	if r.Found != "" {
		all = append(all, r.Found)
	}
	return all
}

// eachReading judges each interpretation of the runtime's files. If the findings differ, the result
// depends on the unknown version of the runtime, and the reported severity is the lowest of them.
func eachReading(f *NodeFacts, r *findings, judge func(Runtime, Reading, *findings)) {
	one := f.Runtime.Value
	var first []diagnosis.Finding
	var each []string
	differ, least := false, diagnosis.Error
	for i, reading := range one.Readings {
		to := findings{check: r.check}
		judge(one, reading, &to)
		if i == 0 {
			first = to.list
		}
		differ = differ || !slices.EqualFunc(first, to.list, func(a, b diagnosis.Finding) bool {
			return a.Severity == b.Severity && a.Message == b.Message
		})
		worst := diagnosis.Finding{Message: "no problem"}
		for _, finding := range to.list {
			if finding.Severity > worst.Severity {
				worst = finding
			}
		}
		least = min(least, worst.Severity)
		each = append(each, reading.Versions+": "+worst.Message)
	}
	switch message := "The version of " + one.title() + " is unknown, and the result depends on it. " +
		strings.Join(each, ". "); {
	case !differ:
		r.list = append(r.list, first...)
	case least > diagnosis.NotChecked:
		r.add(least, "runtime-version-unknown", message, one.evidence(),
			[]string{one.versionCommand(), one.checkCommand()})
	default:
		r.skip(message, one.versionCommand())
	}
}

// Toolkit is the configuration of NVIDIA's container runtime.
type Toolkit struct {
	File string // empty if there is none, and the defaults apply
	// Problem is why the file could not be read.
	Problem string
	// EnvvarUnprivileged is true if NVIDIA_VISIBLE_DEVICES works in unprivileged containers, and
	// VolumeMounts if mounts can name devices.
	EnvvarUnprivileged, VolumeMounts bool
	Mode                             string // auto, legacy, cdi, jit-cdi or csv
	// NoCgroups is true if NVIDIA's runtime sets no cgroup rules for the devices that it adds.
	NoCgroups bool
}

func containerRuntime(f *NodeFacts, r *findings) {
	if !require(r, f.Runtime) {
		return
	}
	one := f.Runtime.Value
	for _, p := range one.Problems {
		r.warn("runtime-config-unreadable",
			"A configuration file of "+one.title()+" cannot be read", []string{p}, one.checkCommand())
	}
	judgeIgnored(one, r)
	eachReading(f, r, func(one Runtime, reading Reading, to *findings) {
		switch {
		case reading.Refused != "":
			to.fail("runtime-config-refused",
				one.title()+" does not start with its configuration: "+reading.Refused,
				one.evidence(), one.checkCommand())
			return
		case reading.Disabled:
			to.fail("cri-disabled", "The CRI plugin of "+one.title()+" is disabled, and the kubelet cannot use it",
				one.evidence("disabled_plugins has cri"),
				"# in "+one.Config+": remove cri from disabled_plugins", one.restart())
			return
		}
		judgeCDI(f, one, reading, to)
	})
	if !r.hasProblem() {
		r.ok(one.title()+" is set up for the device list strategy", one.evidence()...)
	}
}

// judgeIgnored judges whether the runtime reads all handlers in its files.
func judgeIgnored(one Runtime, r *findings) {
	var versions, lines []string
	for _, reading := range one.Readings {
		if len(reading.Ignored) > 0 {
			versions = append(versions, reading.Versions)
			lines = append(lines, reading.Ignored...)
		}
	}
	if len(lines) == 0 {
		return
	}
	slices.Sort(lines)
	r.warn("runtimes-ignored", one.title()+" ("+strings.Join(versions, ", ")+") ignores runtimes in its "+
		"configuration: they are in a section that the runtime does not read",
		one.evidence(slices.Compact(lines)...), one.edit("move the runtimes to the section that is read")...)
}

// judgeCDI judges whether a runtime supports CDI names of devices.
func judgeCDI(f *NodeFacts, one Runtime, reading Reading, to *findings) {
	setting := "enable_cdi is not set"
	if reading.CDISetting != nil {
		setting = fmt.Sprintf("enable_cdi = %v", *reading.CDISetting)
	}
	used := "the device list strategy uses it"
	if !f.Settings.CDI {
		used = "ResourceClaims use it"
	}
	finds := func(folder string) bool { return sameFolder(folder, f.Settings.CDIFolder) }
	switch uses := f.Settings.CDI || f.Settings.Claims; {
	case !uses && !reading.CDI && reading.CDISetting != nil:
		to.info("cdi-off", "CDI is off in "+one.title()+"; the device list strategy does not use it",
			one.evidence(setting))
	case !uses:
	case !reading.CDIExists:
		to.fail(codeNoGPUs,
			one.title()+" is too old for CDI, and "+used+": containers get no GPUs", one.evidence(), one.upgrade())
	case !reading.CDI:
		to.fail(codeNoGPUs, "CDI is off in "+one.title()+", and "+used+": containers get no GPUs",
			one.evidence(setting), one.enableCDI()...)
	case !slices.ContainsFunc(reading.CDIFolders, finds):
		to.fail(codeNoGPUs,
			one.title()+" does not look for CDI specs in "+f.Settings.CDIFolder+": containers get no GPUs",
			one.evidence("cdi_spec_dirs = "+strings.Join(reading.CDIFolders, ", ")),
			"gpu-device-plugin --cdi-dir "+append(reading.CDIFolders,
				"/var/run/cdi")[0]+"   # or add the folder to cdi_spec_dirs")
	}
}

// sameFolder compares the paths of folders. /var/run is a link to /run.
func sameFolder(a, b string) bool {
	clean := func(p string) string {
		if rest, ok := strings.CutPrefix(path.Clean(p), "/var/run/"); ok {
			return "/run/" + rest
		}
		return path.Clean(p)
	}
	return clean(a) == clean(b)
}

func nvidiaRuntime(f *NodeFacts, r *findings) {
	if !require(r, f.Runtime) {
		return
	}
	eachReading(f, r, func(one Runtime, reading Reading, to *findings) { judgeNVIDIA(f, one, reading, to) })
}

// judgeNVIDIA judges whether NVIDIA's runtime exists if the device list strategy needs it.
func judgeNVIDIA(f *NodeFacts, one Runtime, reading Reading, to *findings) {
	needed := f.Settings.Envvar || f.Settings.VolumeMounts
	h, isDefault, found := reading.NVIDIA()
	works, without := one.withoutNVIDIA(reading)
	evidence := one.evidence("without NVIDIA's runtime: " + without)
	if found {
		evidence = one.evidence(h.Name+": "+h.Program, "without NVIDIA's runtime: "+without)
	}
	if other, differs := reading.otherCgroups(h); found && differs {
		to.fail("cgroup-drivers-differ",
			fmt.Sprintf("systemd makes the cgroups of the runtime %s and not those of the runtime %s: "+
				"containers of one runtime are outside the cgroups of their pods", other[0], other[1]),
			append(evidence, "SystemdCgroup of "+other[0]+" = true, of "+other[1]+" = false"),
			one.edit("set SystemdCgroup = true in the options of the runtime "+other[1])...)
	}
	switch {
	case h.Absent:
		to.fail("runtime-program-missing",
			fmt.Sprintf("The program of the runtime %s does not exist: pods with this runtime cannot start",
				h.Name), evidence, "ls -l "+h.Program)
	case found && isDefault:
		to.ok("NVIDIA's runtime is the default of "+one.title(), evidence...)
	case found && needed && one.Name == Docker:
		to.fail(codeNoGPUs,
			"NVIDIA's runtime is not the default of Docker, and pods cannot choose another runtime: containers "+
				"get no GPUs", evidence,
			one.makeDefault(true)...)
	case found && needed:
		to.info(codeNeedsClass, "NVIDIA's runtime is a runtime class of "+one.title()+
			" and not the default: pods with GPUs need runtimeClassName",
			evidence, append([]string{"kubectl get runtimeclass " + h.Name, "# or make it the default:"},
				one.makeDefault(true)...)...)
	case found:
		to.ok("NVIDIA's runtime is a runtime class of "+one.title(), evidence...)
	case needed:
		remedy := one.makeDefault(false)
		if works {
			remedy = append(remedy, "# or without NVIDIA's runtime: runtime: none in the chart's values")
		}
		to.fail(codeNoGPUs,
			one.title()+" does not have NVIDIA's runtime, and the device list strategy needs it: containers get no "+
				"GPUs",
			slices.Concat(evidence, []string{"default runtime: " + cmp.Or(reading.Default, "none")}, reading.Ignored),
			remedy...)
	default:
		to.ok("NVIDIA's runtime is not needed: devices are passed by CDI", evidence...)
	}
}

// otherCgroups finds NVIDIA's handler and the plain handler with different cgroup drivers, and
// returns the one that uses systemd first. The kubelet puts the cgroups of all pods in one place,
// so the drivers must match.
func (r Reading) otherCgroups(nvidia RuntimeHandler) (names [2]string, differs bool) {
	i := slices.IndexFunc(r.Handlers, func(h RuntimeHandler) bool { return h.Name == "runc" || h.Name == "crun" })
	if i < 0 || r.Handlers[i].Name == nvidia.Name || r.Handlers[i].Implied {
		return names, false
	}
	plain := r.Handlers[i]
	if nvidia.Systemd {
		return [2]string{nvidia.Name, plain.Name}, !plain.Systemd
	}
	return [2]string{plain.Name, nvidia.Name}, plain.Systemd
}

// withoutNVIDIA says whether pods can get GPUs with the chart's value runtime: none, or why not.
func (r Runtime) withoutNVIDIA(reading Reading) (works bool, says string) {
	switch {
	case r.Name != Containerd:
		return false, "the chart does not know the default handler of " + r.Name +
			"; hostDev: true and deviceListStrategy: cdi-cri work"
	case strings.HasPrefix(reading.Versions, "1."):
		return false, "containerd is older than 2.0, which runtime: none needs"
	case !reading.CDI:
		return false, "CDI is off in containerd, and runtime: none needs it"
	}
	return true, "runtime: none works"
}

func visibleDevices(f *NodeFacts, r *findings) {
	if require(r, f.Runtime) && require(r, f.Toolkit) {
		eachReading(f, r, func(one Runtime, reading Reading, to *findings) { judgeToolkit(f, one, reading, to) })
	}
}

// judgeToolkit judges the configuration of NVIDIA's runtime.
func judgeToolkit(f *NodeFacts, one Runtime, reading Reading, r *findings) {
	_, isDefault, found := reading.NVIDIA()
	t := f.Toolkit.Value
	const envvar = "accept-nvidia-visible-devices-envvar-when-unprivileged"
	const mounts = "accept-nvidia-visible-devices-as-volume-mounts"
	where := cmp.Or(t.File, "no config.toml of NVIDIA's runtime: the defaults apply")
	evidence := []string{where, fmt.Sprintf("%s = %v", envvar, t.EnvvarUnprivileged)}
	switch {
	case !found:
		r.ok("Pods cannot get GPUs by NVIDIA_VISIBLE_DEVICES: " + one.title() + " does not have NVIDIA's runtime")
		return
	case t.Problem != "":
		r.skip("The configuration of NVIDIA's runtime cannot be read: "+t.Problem, "nvidia-ctk config")
		return
	}
	judgeNoCgroups(f, one, r)
	if f.Settings.VolumeMounts && !t.VolumeMounts {
		r.fail(codeNoGPUs, "NVIDIA's runtime ignores devices named by mounts, and the device list strategy is "+
			"volume-mounts: containers get no GPUs", []string{where, mounts + " = false"}, one.toolkit(mounts, true)...)
	}
	switch onlyEnvvar := f.Settings.Envvar && !f.Settings.VolumeMounts && !f.Settings.CDI; {
	case onlyEnvvar && !t.EnvvarUnprivileged:
		r.fail(codeNoGPUs,
			"NVIDIA's runtime ignores NVIDIA_VISIBLE_DEVICES in containers without privileges, and the device "+
				"list strategy is envvar: they get no GPUs", evidence, append(one.toolkit(mounts, true),
				"gpu-device-plugin --device-list-strategy=volume-mounts   # in the DaemonSet")...)
	case !t.EnvvarUnprivileged:
	case onlyEnvvar:
		r.warn("all-gpus-by-variable",
			"Every pod that NVIDIA's runtime starts can get all GPUs with NVIDIA_VISIBLE_DEVICES=all; the "+
				"device list strategy envvar requires this", evidence, append([]string{
				"gpu-device-plugin --device-list-strategy=cdi-cri   # in the DaemonSet; see docs/platforms.md",
			}, one.toolkit(envvar, false)...)...)
	case isDefault:
		r.warn("all-gpus-by-variable",
			"Every pod can get all GPUs with NVIDIA_VISIBLE_DEVICES=all", evidence, one.toolkit(envvar, false)...)
	default:
		r.info("all-gpus-by-variable",
			"Every pod with the runtime class of NVIDIA's runtime can get all GPUs with NVIDIA_VISIBLE_DEVICES=all",
			evidence,
			one.toolkit(envvar, false)...)
	}
	if !r.hasProblem() {
		r.ok("Containers without privileges cannot get GPUs by NVIDIA_VISIBLE_DEVICES", evidence...)
	}
}

// judgeNoCgroups judges whether containers can open the devices that NVIDIA's runtime adds. Devices
// in the container's OCI specification need no rules from NVIDIA's runtime.
func judgeNoCgroups(f *NodeFacts, one Runtime, r *findings) {
	t := f.Toolkit.Value
	if !t.NoCgroups || f.Settings.DeviceNodes || f.Settings.CDI && !f.Settings.Envvar && !f.Settings.VolumeMounts {
		return
	}
	evidence := []string{t.File, "no-cgroups = true", "mode = " + t.Mode}
	remedy := append(one.toolkit("nvidia-container-cli.no-cgroups", false),
		"gpu-device-plugin --pass-device-specs   # in the DaemonSet; or this")
	switch t.Mode {
	case "legacy":
		r.fail("no-cgroups",
			"NVIDIA's runtime does not let containers open their GPUs: no-cgroups = true is only for rootless "+
				"containers",
			evidence,
			remedy...)
	case "auto":
		r.warn("no-cgroups",
			"NVIDIA's runtime before version 1.18 of the toolkit does not let containers open their GPUs: "+
				"no-cgroups = true is only for rootless containers", evidence, remedy...)
	}
}

func daemonReload(f *NodeFacts, r *findings) {
	if require(r, f.Runtime) {
		eachReading(f, r, func(one Runtime, reading Reading, to *findings) {
			i := slices.IndexFunc(reading.Handlers,
				func(h RuntimeHandler) bool { return h.Systemd && (h.Name == reading.Default || h.nvidia()) })
			if i >= 0 {
				judgeReload(f, one.evidence("cgroups of "+reading.Handlers[i].Name+" are made by systemd"), to)
			} else {
				to.ok(one.title()+" makes cgroups without systemd", one.evidence()...)
			}
		})
	}
}

// judgeReload judges a node where systemd creates the cgroups. At a daemon-reload, systemd resets
// the device rules to the devices in the container's OCI specification. Devices that a hook adds
// later are lost.
func judgeReload(f *NodeFacts, evidence []string, r *findings) {
	inSpec := f.Settings.CDI || f.Settings.DeviceNodes
	if mode := f.Toolkit.Value.Mode; mode == "cdi" || mode == "jit-cdi" { // empty if unknown
		inSpec = true
	}
	if !inSpec {
		r.warn("daemon-reload",
			"Containers can lose their GPUs at `systemctl daemon-reload`: systemd makes their cgroups, and a "+
				"hook of NVIDIA's runtime (mode legacy, or auto before version 1.18 of the toolkit) adds the devices "+
				"without the knowledge of systemd", evidence,
			"gpu-device-plugin --device-list-strategy=cdi-cri   # in the DaemonSet; or:",
			"gpu-device-plugin --pass-device-specs   # in the DaemonSet")
		return
	}
	if !require(r, f.Devices) {
		return
	}
	var unlinked []string
	for _, n := range f.Devices.Value.Nodes {
		if n.Character && n.Numbered && !n.Linked {
			unlinked = append(unlinked, fmt.Sprintf("/dev/char/%d:%d", n.Major, n.Minor))
		}
	}
	if len(unlinked) > 0 {
		r.info("dev-char-links",
			"Links to device nodes are missing in /dev/char: with runc 1.1.3 to 1.1.6, or systemd before 240, "+
				"containers lose their GPUs at `systemctl daemon-reload`",
			append(evidence, inventory.Few(unlinked)+" do not exist"),
			"nvidia-ctk system create-dev-char-symlinks --create-all")
		return
	}
	r.ok("Containers keep their GPUs at `systemctl daemon-reload`: systemd knows their devices", evidence...)
}
