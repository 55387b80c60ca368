package preflight

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
)

// A Holder is a pod, process, service, module or screen that uses the driver and prevents its unload.
type Holder struct {
	// Kind is pod, claim, service, process, module, console or screen.
	Kind string `json:"kind"`
	// Name is NAMESPACE/NAME of a pod or claim, the unit of a service, the name and PID of a
	// process, or the name of a module.
	Name string `json:"name"`
	// Containers are the names of the pod's containers, and Resources the names of their resources
	// and claims.
	Containers []string `json:"containers,omitempty"`
	Resources  []string `json:"resources,omitempty"`
	PIDs       []int    `json:"pids,omitempty"`
	// Uses are device nodes, libraries and references.
	Uses []string `json:"uses,omitempty"`
	// Release is a sentence with what makes the holder let go.
	Release string `json:"release"`
}

// The kinds of holders.
const (
	KindPod     = "pod"
	KindClaim   = "claim"
	KindService = "service"
	KindProcess = "process"
	KindModule  = "module"
	KindConsole = "console"
	KindScreen  = "screen"
)

// kinds are the kinds of holders in the order of the report.
var kinds = []string{KindPod, KindClaim, KindService, KindProcess, KindModule, KindConsole, KindScreen}

// OwnModules are the modules of the driver itself, which are unloaded with it, in the order of loading.
var OwnModules = []string{"nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm", "nvidia_peermem"}

// IsOwnModule reports whether a loaded module belongs to the driver.
func IsOwnModule(name string) bool { return slices.Contains(OwnModules, name) }

// ownPrograms are the names of this project's programs, as the kernel cuts them.
var ownPrograms = []string{"gpu-device-plug", "gpu-node-agent"}

const drain = "delete the pod, or drain the node; a pod of a DaemonSet comes back until the DaemonSet no longer " +
	"selects the node"

// releases are the ways to make holders let go, by kind.
var releases = map[string]string{
	KindPod:     drain,
	KindConsole: "unbind the console: echo 0 > /sys/class/vtconsole/%s/bind",
	KindScreen:  "stop the display manager: systemctl isolate multi-user.target",
}

// uses names all holders, and judges whether they explain the references of the driver's modules.
func uses(f *Facts, r *judgment) {
	byName := map[string]*Holder{}
	add := func(kind, name, release string) *Holder {
		key := kind + " " + name
		if byName[key] == nil {
			byName[key] = &Holder{Kind: kind, Name: name, Release: release}
		}
		return byName[key]
	}
	r.require(f.Devices.Missing)
	claimed := map[string]bool{}
	for _, d := range f.Devices.Value {
		h := add(KindPod, d.Namespace+"/"+d.Pod, drain)
		h.Containers = append(h.Containers, d.Container)
		if d.Claim != "" {
			claimed[d.Claim] = true
			h.Resources = append(h.Resources, "claim "+d.Claim)
		} else {
			h.Resources = append(h.Resources, d.Resource)
		}
	}
	for _, c := range f.Claims.Value {
		if name := c.Namespace + "/" + c.Name; !claimed[name] {
			add(KindClaim, name, "delete the ResourceClaim, or wait until the kubelet unprepares it: no pod on "+
				"the node uses it")
		}
	}
	if r.require(f.Processes.Missing) {
		for _, p := range f.Processes.Value.Users {
			h := add(p.holder())
			h.PIDs = append(h.PIDs, p.PID)
			h.Uses = append(h.Uses, p.Devices...)
			if p.Library {
				h.Uses = append(h.Uses, "libcuda")
			}
			if p.ContainerName != "" {
				h.Containers = append(h.Containers, p.ContainerName)
			}
		}
		unreadProcesses(f.Processes.Value, r)
	}
	if r.require(f.Displays.Missing) {
		for _, d := range f.Displays.Value {
			kind, release := KindScreen, releases[KindScreen]
			if d.Console {
				kind, release = KindConsole, fmt.Sprintf(releases[KindConsole], d.Name)
			}
			h := add(kind, d.Name, release)
			h.Uses = append(h.Uses, d.Evidence)
		}
	}
	if r.require(f.Loaded.Missing) {
		foreignModules(f, add)
	}
	for _, kind := range kinds {
		for _, key := range slices.Sorted(maps.Keys(byName)) {
			h := byName[key]
			if h.Kind != kind {
				continue
			}
			for _, list := range []*[]string{&h.Containers, &h.Resources, &h.Uses} {
				slices.Sort(*list)
				*list = slices.Compact(*list)
			}
			slices.Sort(h.PIDs)
			r.holders = append(r.holders, *h)
		}
	}
	references(f, r)
	switch {
	case len(r.holders) > 0:
		r.add(diagnosis.Warning, "in-use", "The driver is in use by "+users(r.holders), nil)
	case !r.hasProblem():
		r.ok("Nothing uses the driver")
	}
}

// holder returns the kind and the name of a process as a holder, and what makes it let go.
func (p Process) holder() (kind, name, release string) {
	own := slices.Contains(ownPrograms, p.Name)
	switch {
	case p.Pod != "":
		kind, name, release = KindPod, p.Namespace+"/"+p.Pod, drain
	case p.PodUID != "":
		kind, name, release = KindPod, "UID "+p.PodUID, drain
	case strings.HasSuffix(p.Service, ".service"):
		kind, name, release = KindService, p.Service, "stop the service: systemctl stop "+shellWord(p.Service)
	case p.Known:
		kind, name, release = KindService, p.Name, "stop the service of the process "+p.Name
	default:
		kind, name, release = KindProcess, fmt.Sprintf("%s (%d)", cmp.Or(p.Name, "unnamed"), p.PID),
			fmt.Sprintf("end the process: kill %d", p.PID)
		if p.Container != "" {
			release = "stop the container " + p.Container[:min(12, len(p.Container))] + ", which belongs to no pod"
		}
	}
	if own {
		release = "release the driver: gpu-device-plugin quiesce"
	}
	return kind, name, release
}

// unreadProcesses reports processes whose files were not read.
func unreadProcesses(p Processes, r *judgment) {
	if p.Closed > 0 {
		r.skip(fmt.Sprintf("The open files of %d of %s could not be read",
			p.Closed, wording.Count(p.Number, "process")),
			"# run gpu-device-plugin driver preflight as root on the node, with all capabilities")
	}
	if len(p.Unread) > 0 {
		r.skip(fmt.Sprintf("Not all of %s answered in time", wording.Count(p.Number, "process")),
			"ps -eo pid,stat,comm | awk '$2 ~ /^D/'   # processes that hang in the kernel")
	}
}

// foreignModules adds the modules that use the driver and do not belong to it.
func foreignModules(f *Facts, add func(kind, name, release string) *Holder) {
	references := map[string]int{}
	for _, m := range f.Loaded.Value {
		references[m.Name] = m.References
	}
	for _, m := range f.Loaded.Value {
		if !slices.Contains(OwnModules, m.Name) {
			continue
		}
		for _, user := range m.Users {
			if slices.Contains(OwnModules, user) {
				continue
			}
			h := add(KindModule, user, "unload the module: modprobe -r "+shellWord(user))
			h.Uses = append(h.Uses, "module "+m.Name)
			if n := references[user]; n > 0 {
				h.Uses = append(h.Uses, wording.Count(n, "reference"))
				h.Release = "stop what uses the module, then unload it: modprobe -r " + shellWord(user)
			}
		}
	}
}

// references compares the references of the driver's modules with the holders that were found. A
// reference is an open device node, a screen, or a module.
func references(f *Facts, r *judgment) {
	direct := map[string]int{} // references by others than modules
	for _, m := range f.Loaded.Value {
		if n := m.References - len(m.Users); slices.Contains(OwnModules, m.Name) && n > 0 {
			direct[m.Name] = n
		}
	}
	explained := func(module string) bool {
		return slices.ContainsFunc(r.holders, func(h Holder) bool {
			switch {
			case h.Kind == KindScreen, h.Kind == KindConsole:
				return module != "nvidia_uvm"
			case module == "nvidia_drm":
				return slices.Contains(h.Uses, "/dev/nvidia-modeset")
			}
			return slices.ContainsFunc(h.Uses, func(use string) bool { return strings.HasPrefix(use, "/dev/nvidia") })
		})
	}
	for _, name := range slices.Sorted(maps.Keys(direct)) {
		if !explained(name) {
			r.add(diagnosis.Warning, "unknown-holder",
				fmt.Sprintf("The module %s has %s of something that was not found", name,
					wording.Count(direct[name], "reference")), []string{"/proc/modules: " + name},
				"fuser -v /dev/nvidia* /dev/dri/*   # as root on the node")
		}
	}
}
