package doctor

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// Runtime is a container runtime of the node.
type Runtime struct {
	Name string // Containerd or CRIO
	// Major is the major version of containerd; 0 if it is not known.
	Major int
	// Files are the configuration files that were read, in their order; none means the defaults.
	Files []string
	// Problems are files that could not be read, with the reason.
	Problems []string
	// Disabled says that the part of containerd that kubelet talks to is switched off.
	Disabled bool
	// CDI is whether the configuration has CDI on; nil if it does not say.
	CDI *bool
	// CDIFolders are the folders of CDI specs.
	CDIFolders []string
	// Default is the name of the handler of pods without a runtime class.
	Default  string
	Handlers []RuntimeHandler
}

// The names of container runtimes.
const (
	Containerd = "containerd"
	CRIO       = "CRI-O"
)

// A RuntimeHandler is a low-level runtime that a container runtime starts containers with.
type RuntimeHandler struct {
	Name    string
	Program string // its path; empty for the default
	Absent  bool   // the program is not there
	Systemd bool   // cgroups are made by systemd
}

// nvidia reports whether the handler is NVIDIA's runtime.
func (h RuntimeHandler) nvidia() bool {
	return strings.HasPrefix(path.Base(h.Program), "nvidia-container-runtime")
}

// nvidia returns NVIDIA's handler, the default one if that is NVIDIA's.
func (r Runtime) nvidia() (h RuntimeHandler, isDefault, found bool) {
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

// evidence returns where the configuration was read.
func (r Runtime) evidence(says ...string) []string {
	if len(r.Files) == 0 {
		return append([]string{r.Name + " has no configuration file"}, says...)
	}
	return append([]string{strings.Join(r.Files, ", ")}, says...)
}

// configure is the command of NVIDIA's toolkit that changes the configuration.
func (r Runtime) configure(options string) []string {
	name := map[string]string{Containerd: "containerd", CRIO: "crio"}[r.Name]
	return []string{"nvidia-ctk runtime configure --runtime=" + name + " " + options, "systemctl restart " + name}
}

// Toolkit is the configuration of NVIDIA's container runtime.
type Toolkit struct {
	File string // empty if there is none, and the defaults apply
	// Problem says why the file could not be read.
	Problem string
	// EnvvarUnprivileged says that NVIDIA_VISIBLE_DEVICES counts in containers without privileges; VolumeMounts, that mounts name
	// devices.
	EnvvarUnprivileged, VolumeMounts bool
	Mode                             string // auto, legacy, cdi, jit-cdi or csv
}

func containerRuntime(f *NodeFacts, r *findings) {
	if !known(r, f.Runtimes) {
		return
	}
	if len(f.Runtimes.Value) == 0 {
		r.skip("Neither containerd nor CRI-O was found: no process, no configuration file, no socket")
	}
	for _, one := range f.Runtimes.Value {
		for _, p := range one.Problems {
			r.warn("A configuration file of "+one.Name+" cannot be read", []string{p}, restartOf(one))
		}
		if one.Disabled {
			r.fail("The CRI plugin of containerd is disabled: kubelet cannot use it", one.evidence("disabled_plugins has cri"),
				"containerd config default > /etc/containerd/config.toml", "systemctl restart containerd")
		}
		judgeCDI(f, one, r)
	}
	if !r.found() {
		for _, one := range f.Runtimes.Value {
			r.ok(one.Name+" is set up for the device list strategy", one.evidence()...)
		}
	}
}

func restartOf(r Runtime) string {
	if r.Name == CRIO {
		return "crio config > /dev/null   # prints the error"
	}
	return "containerd config dump > /dev/null   # prints the error"
}

// cdi reports whether CDI is on in a runtime, and whether that is known. CRI-O always has it on.
func (r Runtime) cdi() (on, isKnown bool) {
	switch {
	case r.Name == CRIO:
		return true, true
	case r.CDI != nil:
		return *r.CDI, true
	}
	return r.Major >= 2, r.Major != 0
}

// judgeCDI judges whether a runtime knows devices by their CDI names.
func judgeCDI(f *NodeFacts, r Runtime, to *findings) {
	on, isKnown := r.cdi()
	said := "enable_cdi is not set"
	if r.CDI != nil {
		said = fmt.Sprintf("enable_cdi = %v", *r.CDI)
	}
	enable := r.configure("--cdi.enabled")
	used := "the device list strategy uses it"
	if !f.Settings.CDI {
		used = "claims of Dynamic Resource Allocation use it"
	}
	switch uses := f.Settings.CDI || f.Settings.Claims; {
	case !uses && !on && isKnown:
		to.info("CDI is off in containerd; the device list strategy does not use it", r.evidence(said))
	case !uses:
	case !isKnown:
		to.skip("The version of containerd is not known, and its configuration does not say whether CDI is on: it is off by default "+
			"in 1.7 and on in 2", "containerd --version")
	case !on:
		to.fail("CDI is off in containerd, and "+used+": containers get no GPUs",
			r.evidence(said), enable...)
	case !slices.ContainsFunc(r.CDIFolders, func(folder string) bool { return sameFolder(folder, f.Settings.CDIFolder) }):
		to.fail(r.Name+" does not look for CDI specs in "+f.Settings.CDIFolder+": containers get no GPUs",
			r.evidence("cdi_spec_dirs = "+strings.Join(r.CDIFolders, ", ")),
			"gpu-device-plugin --cdi-dir "+append(r.CDIFolders, "/var/run/cdi")[0]+"   # or add the folder to cdi_spec_dirs")
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
	needed := f.Settings.Envvar || f.Settings.VolumeMounts
	if !known(r, f.Runtimes) {
		return
	}
	if len(f.Runtimes.Value) == 0 {
		r.skip("No container runtime was found")
	}
	for _, one := range f.Runtimes.Value {
		h, isDefault, found := one.nvidia()
		works, without := one.withoutNVIDIA()
		evidence := one.evidence("without NVIDIA's runtime: " + without)
		if found {
			evidence = one.evidence(h.Name+": "+h.Program, "without NVIDIA's runtime: "+without)
		}
		switch {
		case h.Absent:
			r.fail(fmt.Sprintf("The program of the runtime %s is not there: pods with it cannot start", h.Name), evidence, "ls -l "+h.Program)
		case found && isDefault:
			r.ok("NVIDIA's runtime is the default of "+one.Name, evidence...)
		case found && needed:
			r.info("NVIDIA's runtime is a runtime class of "+one.Name+" and not the default: pods with GPUs need runtimeClassName",
				evidence, "kubectl get runtimeclass "+h.Name)
		case found:
			r.ok("NVIDIA's runtime is a runtime class of "+one.Name, evidence...)
		case needed:
			remedy := one.configure("--set-as-default")
			if works {
				remedy = append(remedy, "# or without NVIDIA's runtime: runtime: none in the chart's values")
			}
			r.fail(one.Name+" does not have NVIDIA's runtime, and the device list strategy needs it: containers get no GPUs",
				append(evidence, "default runtime: "+cmp.Or(one.Default, "none")), remedy...)
		default:
			r.ok("NVIDIA's runtime is not needed: devices are passed by CDI", evidence...)
		}
	}
}

// withoutNVIDIA says whether pods can get GPUs by the chart's value runtime: none, or why not.
func (r Runtime) withoutNVIDIA() (works bool, says string) {
	on, isKnown := r.cdi()
	switch {
	case r.Name != Containerd:
		return false, "the chart does not know the default handler of " + r.Name + "; hostDev: true and deviceListStrategy: cdi-cri work"
	case r.Major == 0:
		return false, "the version of containerd is not known; 2.0 and newer have what runtime: none needs"
	case r.Major < 2:
		return false, "containerd is older than 2.0, which runtime: none needs"
	case isKnown && !on:
		return false, "CDI is off in containerd, and runtime: none needs it"
	}
	return true, "runtime: none works"
}

func visibleDevices(f *NodeFacts, r *findings) {
	if !known(r, f.Runtimes) || !known(r, f.Toolkit) {
		return
	}
	isDefault, found := false, false
	for _, one := range f.Runtimes.Value {
		_, d, has := one.nvidia()
		isDefault, found = isDefault || d, found || has
	}
	t := f.Toolkit.Value
	const command = "nvidia-ctk config --in-place --set "
	const envvar, mounts = "accept-nvidia-visible-devices-envvar-when-unprivileged", "accept-nvidia-visible-devices-as-volume-mounts"
	where := cmp.Or(t.File, "no config.toml of NVIDIA's runtime: the defaults apply")
	evidence := []string{where, fmt.Sprintf("%s = %v", envvar, t.EnvvarUnprivileged)}
	switch {
	case len(f.Runtimes.Value) == 0:
		r.skip("No container runtime was found")
		return
	case !found:
		r.ok("Pods cannot get GPUs by NVIDIA_VISIBLE_DEVICES: no container runtime has NVIDIA's runtime")
		return
	case t.Problem != "":
		r.skip("The configuration of NVIDIA's runtime cannot be read: "+t.Problem, "nvidia-ctk config")
		return
	}
	if f.Settings.VolumeMounts && !t.VolumeMounts {
		r.fail("NVIDIA's runtime ignores devices that are named by mounts, and the device list strategy is volume-mounts: containers "+
			"get no GPUs", []string{where, mounts + " = false"}, command+mounts+"=true")
	}
	switch onlyEnvvar := f.Settings.Envvar && !f.Settings.VolumeMounts && !f.Settings.CDI; {
	case onlyEnvvar && !t.EnvvarUnprivileged:
		r.fail("NVIDIA's runtime ignores NVIDIA_VISIBLE_DEVICES in containers without privileges, and the device list strategy is envvar: "+
			"they get no GPUs", evidence, command+mounts+"=true",
			"gpu-device-plugin --device-list-strategy=volume-mounts   # in the DaemonSet")
	case !t.EnvvarUnprivileged:
	case onlyEnvvar:
		r.warn("Every pod that NVIDIA's runtime starts can get all GPUs with NVIDIA_VISIBLE_DEVICES=all; the device list strategy envvar "+
			"needs it to be so", evidence, "gpu-device-plugin --device-list-strategy=cdi-cri   # in the DaemonSet; see docs/doctor.md",
			command+envvar+"=false")
	case isDefault:
		r.warn("Every pod can get all GPUs with NVIDIA_VISIBLE_DEVICES=all", evidence, command+envvar+"=false")
	default:
		r.info("Every pod with the runtime class of NVIDIA's runtime can get all GPUs with NVIDIA_VISIBLE_DEVICES=all", evidence,
			command+envvar+"=false")
	}
	if !r.found() {
		r.ok("Containers without privileges cannot get GPUs by NVIDIA_VISIBLE_DEVICES", evidence...)
	}
}

func daemonReload(f *NodeFacts, r *findings) {
	if !known(r, f.Runtimes) {
		return
	}
	if len(f.Runtimes.Value) == 0 {
		r.skip("No container runtime was found")
		return
	}
	for _, one := range f.Runtimes.Value {
		i := slices.IndexFunc(one.Handlers, func(h RuntimeHandler) bool { return h.Systemd && (h.Name == one.Default || h.nvidia()) })
		if i >= 0 {
			judgeReload(f, one.evidence("cgroups of "+one.Handlers[i].Name+" are made by systemd"), r)
		} else {
			r.ok(one.Name+" makes cgroups without systemd", one.evidence()...)
		}
	}
}

// judgeReload judges a node where systemd makes the cgroups. At a daemon-reload it sets the rules for devices to those that it knows:
// to those of the container's OCI specification. A hook that adds devices later is not in them.
func judgeReload(f *NodeFacts, evidence []string, r *findings) {
	inSpec := f.Settings.CDI || f.Settings.DeviceNodes
	if mode := f.Toolkit.Value.Mode; mode == "cdi" || mode == "jit-cdi" { // empty where nobody knows it
		inSpec = true
	}
	if !inSpec {
		r.warn("Containers can lose their GPUs at `systemctl daemon-reload`: systemd makes their cgroups, and a hook of NVIDIA's runtime "+
			"(mode legacy, or auto before version 1.18 of the toolkit) adds the devices without its knowledge", evidence,
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
		r.info("Links to device nodes are missing in /dev/char: with runc 1.1.3 to 1.1.6, or systemd before 240, containers lose their GPUs "+
			"at `systemctl daemon-reload`", append(evidence, inventory.Few(unlinked)+" do not exist"),
			"nvidia-ctk system create-dev-char-symlinks --create-all")
		return
	}
	r.ok("Containers keep their GPUs at `systemctl daemon-reload`: their devices are known to systemd", evidence...)
}
