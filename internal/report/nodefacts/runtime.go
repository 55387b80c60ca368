package nodefacts

import (
	"cmp"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
)

// A process is a process of the node.
type process struct {
	pid  string
	name string   // the kernel cuts it to 15 bytes
	args []string // empty if unreadable
}

// withArguments are the names of processes with relevant arguments: container runtimes, kubelets,
// and programs that include a kubelet.
var withArguments = []string{
	"containerd", "crio", "dockerd", "cri-dockerd", "kubelet", "kubelite", "k3s", "k3s-server", "k3s-agent", "rke2",
	"k0s",
}

// processes returns the node's processes.
func processes(r root) ([]process, error) {
	names, err := r.List("proc")
	if err != nil {
		return nil, err
	}
	var all []process
	for _, pid := range names {
		if strings.Trim(pid, "0123456789") != "" {
			continue
		}
		if name := r.Line("proc/" + pid + "/comm"); name != "" {
			p := process{name: name, pid: pid}
			if slices.Contains(withArguments, name) {
				p.args = strings.Split(strings.Trim(r.Line("proc/"+pid+"/cmdline"), "\x00 "), "\x00")
			}
			all = append(all, p)
		}
	}
	if len(all) == 0 {
		return nil, errors.New("/proc has no processes: it is not the node's")
	}
	return all, nil
}

func names(all []process) []string {
	distinct := map[string]bool{}
	for _, p := range all {
		distinct[p.name] = true
	}
	return slices.Sorted(maps.Keys(distinct))
}

// flag returns the value of one of the flags of a process; empty if unset.
func (p process) flag(flags ...string) string {
	for i, arg := range p.args {
		name, value, has := strings.Cut(arg, "=")
		switch {
		case !slices.Contains(flags, name):
		case has:
			return value
		case i+1 < len(p.args):
			return p.args[i+1]
		}
	}
	return ""
}

// crioFiles reads the configuration of CRI-O: its file, and then the files of a folder. Later files
// win. A runtime in a later file replaces the whole runtime of an earlier file.
func crioFiles(r root, p process) (section table, first string, files, problems []string) {
	first = cmp.Or(p.flag("--config", "-c"), "/etc/crio/crio.conf")
	folder := cmp.Or(p.flag("--config-dir", "-d"), "/etc/crio/crio.conf.d")
	all, runtimes := table{}, table{}
	for _, file := range append([]string{first}, r.Match(folder+"/*")...) {
		content, err := parse(r, file)
		switch {
		case err == nil:
			files = append(files, file)
			maps.Copy(runtimes, content.table("crio").table("runtime").table("runtimes"))
			overlay(all, content)
		case file != first || !errors.Is(err, fs.ErrNotExist):
			problems = append(problems, file+": "+err.Error())
		}
	}
	section = all.table("crio")
	if section.table("runtime") != nil {
		section.table("runtime")["runtimes"] = runtimes
	}
	return section, first, files, problems
}

// crio returns CRI-O with its configuration.
func crio(r root, p process) doctor.Runtime {
	section, first, files, problems := crioFiles(r, p)
	reading := doctor.Reading{Default: "crun", CDI: true, CDIExists: true, CDIFolders: cdiFolders}
	section = section.table("runtime")
	if name, _ := section["default_runtime"].(string); name != "" {
		reading.Default = name
	}
	if folders := section.texts("cdi_spec_dirs"); folders != nil {
		reading.CDIFolders = folders
	}
	manager, isSet := section["cgroup_manager"].(string)
	systemd := manager == "systemd" || !isSet
	runtimes := section.table("runtimes")
	for _, name := range slices.Sorted(maps.Keys(runtimes)) {
		h := doctor.RuntimeHandler{Name: name, Systemd: systemd}
		h.Program, _ = runtimes.table(name)["runtime_path"].(string)
		h.Absent = path.IsAbs(h.Program) && !r.Exists(h.Program)
		reading.Handlers = append(reading.Handlers, h)
	}
	if len(reading.Handlers) == 0 {
		reading.Handlers = []doctor.RuntimeHandler{{Name: reading.Default, Systemd: systemd, Implied: true}}
	}
	return doctor.Runtime{
		Name: doctor.CRIO, Service: "crio", Config: first, Files: files, Problems: problems,
		Readings: []doctor.Reading{reading},
	}
}

// docker returns Docker with its configuration. A kubelet uses Docker through cri-dockerd.
func docker(r root, p process) doctor.Runtime {
	one := doctor.Runtime{Name: doctor.Docker, Service: "docker",
		Config: cmp.Or(p.flag("--config-file"), "/etc/docker/daemon.json")}
	var config struct {
		Default  string   `json:"default-runtime"`
		Options  []string `json:"exec-opts"`
		Folders  []string `json:"cdi-spec-dirs"`
		Features struct {
			CDI *bool `json:"cdi"`
		} `json:"features"`
		Runtimes map[string]struct {
			Path string `json:"path"`
		} `json:"runtimes"`
	}
	text, err := r.Read(one.Config)
	if err == nil {
		err = json.Unmarshal(text, &config)
	}
	switch {
	case err == nil:
		one.Files = []string{one.Config}
	case !errors.Is(err, fs.ErrNotExist):
		one.Problems = []string{one.Config + ": " + err.Error()}
	}
	systemd := slices.Contains(config.Options, "native.cgroupdriver=systemd")
	reading := doctor.Reading{
		Default: cmp.Or(p.flag("--default-runtime"), config.Default,
			"runc"), CDISetting: config.Features.CDI, CDIFolders: cdiFolders,
		Handlers: []doctor.RuntimeHandler{{Name: "runc", Systemd: systemd, Implied: true}},
	}
	if config.Folders != nil {
		reading.CDIFolders = config.Folders
	}
	for _, name := range slices.Sorted(maps.Keys(config.Runtimes)) {
		h := doctor.RuntimeHandler{Name: name, Program: config.Runtimes[name].Path, Systemd: systemd}
		h.Absent = path.IsAbs(h.Program) && !r.Exists(h.Program)
		reading.Handlers = append(reading.Handlers, h)
	}
	// cri-dockerd passes CDI devices since Mirantis/cri-dockerd#522 of November 2025, but no file
	// has its version.
	newer := reading
	reading.Versions = "with cri-dockerd before CDI"
	newer.Versions, newer.CDIExists = "with a newer cri-dockerd", true
	newer.CDI = config.Features.CDI == nil || *config.Features.CDI
	one.Readings = []doctor.Reading{reading, newer}
	return one
}

// toolkit reads the configuration of NVIDIA's container runtime: the file beside its program if
// NVIDIA's operator installed it, or else the node's file.
func toolkit(r root) doctor.Toolkit {
	t := doctor.Toolkit{EnvvarUnprivileged: true, Mode: "auto"}
	const below = "nvidia-container-runtime/config.toml"
	folders := []string{"/etc", "/usr/local/nvidia/toolkit/.config"}
	if one, err := kubeletRuntime(r); err == nil {
		for _, reading := range one.Readings {
			if h, _, found := reading.NVIDIA(); found && path.IsAbs(h.Program) {
				folders = append([]string{path.Join(path.Dir(h.Program), ".config")}, folders...)
			}
		}
	}
	i := slices.IndexFunc(folders, func(folder string) bool { return r.Exists(path.Join(folder, below)) })
	if i < 0 {
		return t
	}
	t.File = path.Join(folders[i], below)
	content, err := parse(r, t.File)
	if err != nil {
		t.Problem = t.File + ": " + err.Error()
		return t
	}
	if accept, isSet := content["accept-nvidia-visible-devices-envvar-when-unprivileged"].(bool); isSet {
		t.EnvvarUnprivileged = accept
	}
	t.VolumeMounts, _ = content["accept-nvidia-visible-devices-as-volume-mounts"].(bool)
	t.NoCgroups, _ = content.table("nvidia-container-cli")["no-cgroups"].(bool)
	if mode, _ := content.table("nvidia-container-runtime")["mode"].(string); mode != "" {
		t.Mode = mode
	}
	return t
}

// A table is a table of a TOML file.
type table map[string]any

// parse reads a TOML file.
func parse(r root, file string) (table, error) {
	text, err := r.Read(file)
	if err != nil {
		return nil, err
	}
	var content table
	err = toml.Unmarshal(text, &content)
	return content, err
}

// table returns an inner table; nil if the name is unknown.
func (t table) table(name string) table {
	switch value := t[name].(type) {
	case map[string]any:
		return value
	case table:
		return value
	}
	return nil
}

// texts returns a list of strings; nil if the name is unknown.
func (t table) texts(name string) []string {
	list, ok := t[name].([]any)
	if !ok {
		return nil
	}
	texts := []string{}
	for _, item := range list {
		if text, ok := item.(string); ok {
			texts = append(texts, text)
		}
	}
	return texts
}
