package doctor

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Runtime is the container runtime that the kubelet uses.
type Runtime struct {
	Name string // Containerd, CRIO or Docker
	// Distribution is what set the runtime up; Packages if that is nothing special.
	Distribution Distribution
	// Service is what is restarted when the configuration has changed: a unit of systemd, or a snap.
	Service string
	// Found says how the runtime was found.
	Found string
	// Config is the main configuration file, also where there is none yet. Files are those that
	// were read, in their order; none means the defaults.
	Config string
	Files  []string
	// Problems are files that could not be read, with the reason.
	Problems []string
	// Readings are what the runtime makes of its files. There are several where its version is not
	// known and matters.
	Readings []Reading
}

// The names of container runtimes.
const (
	Containerd = "containerd"
	CRIO       = "CRI-O"
	Docker     = "Docker"
)

// A Reading is what some versions of a container runtime make of its configuration files.
type Reading struct {
	Versions string // such as "2.0 to 2.2"; empty where they do not matter
	// Refused says why the runtime does not start with the files.
	Refused string
	// Disabled says that the part of containerd that the kubelet talks to is switched off.
	Disabled bool
	// CDI says that CDI is on, and CDIExists that the runtime can have it. CDISaid is what the
	// files say of it; nil if nothing.
	CDI, CDIExists bool
	CDISaid        *bool
	// CDIFolders are the folders of CDI specs.
	CDIFolders []string
	// Default is the name of the handler of pods without a runtime class.
	Default  string
	Handlers []RuntimeHandler
	// Ignored are handlers of the files that the runtime does not take, with the reason.
	Ignored []string
}

// A RuntimeHandler is a low-level runtime that a container runtime starts containers with.
type RuntimeHandler struct {
	Name    string
	Program string // its path; empty for the default
	Absent  bool   // the program is not there
	Systemd bool   // cgroups are made by systemd
	Implied bool   // no file has it; it is there by default
}

// nvidia reports whether the handler is NVIDIA's runtime.
func (h RuntimeHandler) nvidia() bool {
	return strings.HasPrefix(path.Base(h.Program), "nvidia-container-runtime")
}

// NVIDIA returns NVIDIA's handler, the default one if that is NVIDIA's.
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

// title returns the name of the runtime with that of its distribution.
func (r Runtime) title() string {
	if r.Distribution == Packages {
		return r.Name
	}
	return r.Name + " of " + string(r.Distribution)
}

// evidence returns where the configuration was read, and how the runtime was found.
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

// eachReading judges what the runtime makes of its files. Where the readings differ in their
// findings, the version decides, and that is not known: then no more is said than what holds for
// all of them.
func eachReading(f *NodeFacts, r *findings, judge func(Runtime, Reading, *findings)) {
	one := f.Runtime.Value
	var first []Finding
	var each []string
	differ, least := false, Error
	for i, reading := range one.Readings {
		to := findings{check: r.check}
		judge(one, reading, &to)
		if i == 0 {
			first = to.list
		}
		differ = differ || !slices.EqualFunc(first, to.list, func(a, b Finding) bool {
			return a.Severity == b.Severity && a.Message == b.Message
		})
		worst := Finding{Message: "nothing is wrong"}
		for _, finding := range to.list {
			if finding.Severity > worst.Severity {
				worst = finding
			}
		}
		least = min(least, worst.Severity)
		each = append(each, reading.Versions+": "+worst.Message)
	}
	switch message := "It depends on the version of " + one.title() + ", which is not known. " + strings.Join(each,
		". "); {
	case !differ:
		r.list = append(r.list, first...)
	case least > NotChecked:
		r.add(least, message, one.evidence(), []string{one.versionCommand(), one.checkCommand()})
	default:
		r.skip(message, one.versionCommand())
	}
}

// Toolkit is the configuration of NVIDIA's container runtime.
type Toolkit struct {
	File string // empty if there is none, and the defaults apply
	// Problem says why the file could not be read.
	Problem string
	// EnvvarUnprivileged says that NVIDIA_VISIBLE_DEVICES counts in containers without privileges;
	// VolumeMounts, that mounts name devices.
	EnvvarUnprivileged, VolumeMounts bool
	Mode                             string // auto, legacy, cdi, jit-cdi or csv
	// NoCgroups says that containers get no rules for the devices that NVIDIA's runtime gives them.
	NoCgroups bool
}

func containerRuntime(f *NodeFacts, r *findings) {
	if !known(r, f.Runtime) {
		return
	}
	one := f.Runtime.Value
	for _, p := range one.Problems {
		r.warn("A configuration file of "+one.title()+" cannot be read", []string{p}, one.checkCommand())
	}
	judgeIgnored(one, r)
	eachReading(f, r, func(one Runtime, reading Reading, to *findings) {
		switch {
		case reading.Refused != "":
			to.fail(one.title()+" does not start with its configuration: "+reading.Refused, one.evidence(), one.checkCommand())
			return
		case reading.Disabled:
			to.fail("The CRI plugin of "+one.title()+" is disabled, and the kubelet cannot use it",
				one.evidence("disabled_plugins has cri"),
				"# in "+one.Config+": remove cri from disabled_plugins", one.restart())
			return
		}
		judgeCDI(f, one, reading, to)
	})
	if !r.found() {
		r.ok(one.title()+" is set up for the device list strategy", one.evidence()...)
	}
}

// judgeIgnored judges whether the runtime takes all handlers of its files.
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
	r.warn(one.title()+" ("+strings.Join(versions, ", ")+") ignores runtimes in its configuration: "+
		"they are in a section that it does not read",
		one.evidence(slices.Compact(lines)...), one.edit("move the runtimes to the section that is read")...)
}

// judgeCDI judges whether a runtime knows devices by their CDI names.
func judgeCDI(f *NodeFacts, one Runtime, reading Reading, to *findings) {
	said := "enable_cdi is not set"
	if reading.CDISaid != nil {
		said = fmt.Sprintf("enable_cdi = %v", *reading.CDISaid)
	}
	used := "the device list strategy uses it"
	if !f.Settings.CDI {
		used = "claims of Dynamic Resource Allocation use it"
	}
	finds := func(folder string) bool { return sameFolder(folder, f.Settings.CDIFolder) }
	switch uses := f.Settings.CDI || f.Settings.Claims; {
	case !uses && !reading.CDI && reading.CDISaid != nil:
		to.info("CDI is off in "+one.title()+"; the device list strategy does not use it", one.evidence(said))
	case !uses:
	case !reading.CDIExists:
		to.fail(one.title()+" is too old for CDI, and "+used+": containers get no GPUs", one.evidence(), one.upgrade())
	case !reading.CDI:
		to.fail("CDI is off in "+one.title()+", and "+used+": containers get no GPUs", one.evidence(said), one.enableCDI()...)
	case !slices.ContainsFunc(reading.CDIFolders, finds):
		to.fail(one.title()+" does not look for CDI specs in "+f.Settings.CDIFolder+": containers get no GPUs",
			one.evidence("cdi_spec_dirs = "+strings.Join(reading.CDIFolders, ", ")),
			"gpu-device-plugin --cdi-dir "+append(reading.CDIFolders,
				"/var/run/cdi")[0]+"   # or add the folder to cdi_spec_dirs")
	}
}

// sameFolder compares the paths of folders; /var/run is a link to /run.
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
	if !known(r, f.Runtime) {
		return
	}
	eachReading(f, r, func(one Runtime, reading Reading, to *findings) { judgeNVIDIA(f, one, reading, to) })
}

// judgeNVIDIA judges whether NVIDIA's runtime is there where the device list strategy needs it.
func judgeNVIDIA(f *NodeFacts, one Runtime, reading Reading, to *findings) {
	needed := f.Settings.Envvar || f.Settings.VolumeMounts
	h, isDefault, found := reading.NVIDIA()
	works, without := one.withoutNVIDIA(reading)
	evidence := one.evidence("without NVIDIA's runtime: " + without)
	if found {
		evidence = one.evidence(h.Name+": "+h.Program, "without NVIDIA's runtime: "+without)
	}
	if other, differs := reading.otherCgroups(h); found && differs {
		to.fail(fmt.Sprintf("systemd makes the cgroups of the runtime %s and not those of the runtime %s: "+
			"containers of one of them are outside of the cgroups of their pods", other[0], other[1]),
			append(evidence, "SystemdCgroup of "+other[0]+" = true, of "+other[1]+" = false"),
			one.edit("set SystemdCgroup = true in the options of the runtime "+other[1])...)
	}
	switch {
	case h.Absent:
		to.fail(fmt.Sprintf("The program of the runtime %s is not there: pods with it cannot start",
			h.Name), evidence, "ls -l "+h.Program)
	case found && isDefault:
		to.ok("NVIDIA's runtime is the default of "+one.title(), evidence...)
	case found && needed && one.Name == Docker:
		to.fail("NVIDIA's runtime is not the default of Docker, and pods cannot choose another runtime: containers get no GPUs", evidence,
			one.makeDefault(true)...)
	case found && needed:
		to.info("NVIDIA's runtime is a runtime class of "+one.title()+
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
		to.fail(one.title()+" does not have NVIDIA's runtime, and the device list strategy needs it: containers get no GPUs",
			slices.Concat(evidence, []string{"default runtime: " + cmp.Or(reading.Default, "none")}, reading.Ignored), remedy...)
	default:
		to.ok("NVIDIA's runtime is not needed: devices are passed by CDI", evidence...)
	}
}

// otherCgroups returns the names of two handlers of which systemd makes the cgroups of the first
// alone: NVIDIA's and the plain one. The kubelet puts the cgroups of all pods in one place.
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

// withoutNVIDIA says whether pods can get GPUs by the chart's value runtime: none, or why not.
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
	if known(r, f.Runtime) && known(r, f.Toolkit) {
		eachReading(f, r, func(one Runtime, reading Reading, to *findings) { judgeToolkit(f, one, reading, to) })
	}
}

// judgeToolkit judges the configuration of NVIDIA's runtime.
func judgeToolkit(f *NodeFacts, one Runtime, reading Reading, r *findings) {
	_, isDefault, found := reading.NVIDIA()
	t := f.Toolkit.Value
	const envvar, mounts = "accept-nvidia-visible-devices-envvar-when-unprivileged", "accept-nvidia-visible-devices-as-volume-mounts"
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
		r.fail("NVIDIA's runtime ignores devices that are named by mounts, and the device list strategy is "+
			"volume-mounts: containers get no GPUs", []string{where, mounts + " = false"}, one.toolkit(mounts, true)...)
	}
	switch onlyEnvvar := f.Settings.Envvar && !f.Settings.VolumeMounts && !f.Settings.CDI; {
	case onlyEnvvar && !t.EnvvarUnprivileged:
		r.fail("NVIDIA's runtime ignores NVIDIA_VISIBLE_DEVICES in containers without privileges, and the device "+
			"list strategy is envvar: they get no GPUs", evidence, append(one.toolkit(mounts, true),
			"gpu-device-plugin --device-list-strategy=volume-mounts   # in the DaemonSet")...)
	case !t.EnvvarUnprivileged:
	case onlyEnvvar:
		r.warn("Every pod that NVIDIA's runtime starts can get all GPUs with NVIDIA_VISIBLE_DEVICES=all; the "+
			"device list strategy envvar needs it to be so", evidence, append([]string{
			"gpu-device-plugin --device-list-strategy=cdi-cri   # in the DaemonSet; see docs/platforms.md",
		}, one.toolkit(envvar, false)...)...)
	case isDefault:
		r.warn("Every pod can get all GPUs with NVIDIA_VISIBLE_DEVICES=all", evidence, one.toolkit(envvar, false)...)
	default:
		r.info("Every pod with the runtime class of NVIDIA's runtime can get all GPUs with NVIDIA_VISIBLE_DEVICES=all",
			evidence,
			one.toolkit(envvar, false)...)
	}
	if !r.found() {
		r.ok("Containers without privileges cannot get GPUs by NVIDIA_VISIBLE_DEVICES", evidence...)
	}
}

// judgeNoCgroups judges whether containers may open the devices that NVIDIA's runtime gives them.
// Devices that are in the container's OCI specification need no rules from the runtime.
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
		r.fail("NVIDIA's runtime does not let containers open their GPUs: no-cgroups = true is for rootless containers alone",
			evidence,
			remedy...)
	case "auto":
		r.warn("NVIDIA's runtime before version 1.18 of the toolkit does not let containers open their GPUs: "+
			"no-cgroups = true is for rootless containers alone", evidence, remedy...)
	}
}

func daemonReload(f *NodeFacts, r *findings) {
	if known(r, f.Runtime) {
		eachReading(f, r, func(one Runtime, reading Reading, to *findings) {
			i := slices.IndexFunc(reading.Handlers, func(h RuntimeHandler) bool { return h.Systemd && (h.Name == reading.Default || h.nvidia()) })
			if i >= 0 {
				judgeReload(f, one.evidence("cgroups of "+reading.Handlers[i].Name+" are made by systemd"), to)
			} else {
				to.ok(one.title()+" makes cgroups without systemd", one.evidence()...)
			}
		})
	}
}

// judgeReload judges a node where systemd makes the cgroups. At a daemon-reload it sets the rules
// for devices to those that it knows: to those of the container's OCI specification. A hook that
// adds devices later is not in them.
func judgeReload(f *NodeFacts, evidence []string, r *findings) {
	inSpec := f.Settings.CDI || f.Settings.DeviceNodes
	if mode := f.Toolkit.Value.Mode; mode == "cdi" || mode == "jit-cdi" { // empty where nobody knows it
		inSpec = true
	}
	if !inSpec {
		r.warn("Containers can lose their GPUs at `systemctl daemon-reload`: systemd makes their cgroups, and a "+
			"hook of NVIDIA's runtime (mode legacy, or auto before version 1.18 of the toolkit) adds the devices "+
			"without its knowledge", evidence,
			"gpu-device-plugin --device-list-strategy=cdi-cri   # in the DaemonSet; or:",
			"gpu-device-plugin --pass-device-specs   # in the DaemonSet")
		return
	}
	if !known(r, f.Devices) {
		return
	}
	var unlinked []string
	for _, n := range f.Devices.Value.Nodes {
		if n.Character && n.Numbered && !n.Linked {
			unlinked = append(unlinked, fmt.Sprintf("/dev/char/%d:%d", n.Major, n.Minor))
		}
	}
	if len(unlinked) > 0 {
		r.info("Links to device nodes are missing in /dev/char: with runc 1.1.3 to 1.1.6, or systemd before 240, "+
			"containers lose their GPUs at `systemctl daemon-reload`", append(evidence, inventory.Few(unlinked)+" do not exist"),
			"nvidia-ctk system create-dev-char-symlinks --create-all")
		return
	}
	r.ok("Containers keep their GPUs at `systemctl daemon-reload`: their devices are known to systemd", evidence...)
}
