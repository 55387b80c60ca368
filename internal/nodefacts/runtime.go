package nodefacts

import (
	"bytes"
	"cmp"
	"debug/elf"
	"errors"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/doctor"
)

// A process of the node.
type process struct {
	name string   // cut to 15 bytes by the kernel
	args []string // empty if they cannot be read
}

// processes returns the node's processes.
func processes(r root) ([]process, error) {
	names, err := r.list("proc")
	if err != nil {
		return nil, err
	}
	var all []process
	for _, pid := range names {
		if strings.Trim(pid, "0123456789") != "" {
			continue
		}
		if name := r.line("proc/" + pid + "/comm"); name != "" {
			p := process{name: name}
			if slices.Contains([]string{"containerd", "crio"}, name) {
				p.args = strings.Split(strings.TrimRight(r.line("proc/"+pid+"/cmdline"), "\x00"), "\x00")
			}
			all = append(all, p)
		}
	}
	if len(all) == 0 {
		return nil, errors.New("/proc has no processes: this is not the node's")
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

// flag returns the value of one of the flags of a process; empty if it is not given.
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

// containerdFiles are where the configuration of containerd is, by distribution of Kubernetes; the first that is there counts.
var containerdFiles = []string{
	"/etc/containerd/config.toml", "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
	"/var/lib/rancher/rke2/agent/etc/containerd/config.toml", "/run/k0s/containerd-cri.toml", "/etc/k0s/containerd.toml",
	"/var/snap/microk8s/current/args/containerd.toml",
}

var containerdSockets = []string{
	"/run/containerd/containerd.sock", "/run/k3s/containerd/containerd.sock", "/run/k0s/containerd.sock",
}

// runtimes returns the container runtimes that run. Where that cannot be told, it returns those that are set up.
func runtimes(r root) ([]doctor.Runtime, error) {
	running, err := processes(r)
	find := func(name string) (process, bool) {
		i := slices.IndexFunc(running, func(p process) bool {
			return p.name == name && !strings.Contains(p.flag("--config", "-c"), "/docker/") // which kubelet does not use
		})
		if i < 0 {
			return process{}, false
		}
		return running[i], true
	}
	there := func(files ...string) bool { return slices.ContainsFunc(files, r.exists) }
	var found []doctor.Runtime
	if p, runs := find("containerd"); runs || err != nil && there(slices.Concat(containerdFiles, containerdSockets)...) {
		found = append(found, containerd(r, p))
	}
	if p, runs := find("crio"); runs || err != nil && there("/etc/crio/crio.conf", "/etc/crio/crio.conf.d", "/run/crio/crio.sock") {
		found = append(found, crio(r, p))
	}
	if len(found) == 0 && err != nil {
		return nil, err
	}
	return found, nil
}

// maxImports is how many files a configuration may consist of.
const maxImports = 64

// containerd reads the configuration of containerd.
func containerd(r root, p process) doctor.Runtime {
	c := doctor.Runtime{Name: doctor.Containerd, Major: containerdMajor(r, p), Default: "runc", CDIFolders: cdiFolders}
	first := p.flag("--config", "-c")
	if first == "" {
		i := slices.IndexFunc(containerdFiles, r.exists)
		if i < 0 {
			return c
		}
		first = containerdFiles[i]
	}
	plugins := table{}
	pending := []string{first}
	for seen := (map[string]bool{}); len(pending) > 0 && len(seen) < maxImports; {
		file := pending[0]
		if pending = pending[1:]; seen[file] {
			continue
		}
		seen[file] = true
		content, err := parse(r, file)
		if err != nil {
			c.Problems = append(c.Problems, file+": "+err.Error())
			continue
		}
		c.Files = append(c.Files, file)
		if version, _ := content["version"].(int64); version >= 3 {
			c.Major = 2
		}
		for _, disabled := range content.texts("disabled_plugins") {
			c.Disabled = c.Disabled || disabled == "cri" || strings.HasPrefix(disabled, "io.containerd.grpc.v1.cri") ||
				disabled == "io.containerd.cri.v1.runtime"
		}
		for name, section := range content.table("plugins") {
			if more, ok := section.(map[string]any); ok && c.Major != 1 { // containerd 1 replaces whole sections
				merge(plugins, table{name: more})
			} else {
				plugins[name] = section
			}
		}
		for _, pattern := range content.texts("imports") {
			if !path.IsAbs(pattern) {
				pattern = path.Join(path.Dir(file), pattern)
			}
			pending = append(pending, r.match(path.Clean(pattern))...)
		}
	}
	// Version 2 of the configuration has one section, version 3 and newer have several. Containerd 2 reads both.
	for _, section := range []string{"cri", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"} {
		if cri := plugins.table(section); len(cri) > 0 {
			criSection(r, &c, cri)
		}
	}
	return c
}

// criSection reads the configuration of containerd's CRI plugin.
func criSection(r root, c *doctor.Runtime, cri table) {
	if on, given := cri["enable_cdi"].(bool); given {
		c.CDI = &on
	}
	if folders := cri.texts("cdi_spec_dirs"); folders != nil {
		c.CDIFolders = folders
	}
	section := cri.table("containerd")
	if name, _ := section["default_runtime_name"].(string); name != "" {
		c.Default = name
	}
	all := section.table("runtimes")
	for _, name := range slices.Sorted(maps.Keys(all)) {
		options := all.table(name).table("options")
		h := doctor.RuntimeHandler{Name: name}
		h.Program, _ = options["BinaryName"].(string)
		h.Systemd, _ = options["SystemdCgroup"].(bool)
		h.Absent = h.Program != "" && path.IsAbs(h.Program) && !r.exists(h.Program)
		c.Handlers = append(c.Handlers, h)
	}
}

// containerdMajor returns the major version of containerd, which its program says; 0 if it cannot be told.
func containerdMajor(r root, p process) int {
	files := []string{"/usr/bin/containerd", "/usr/local/bin/containerd", "/bin/containerd", "/usr/local/bin/k3s", "/opt/bin/containerd"}
	if len(p.args) > 0 && path.IsAbs(p.args[0]) {
		files = append([]string{p.args[0]}, files...)
	}
	for _, file := range files {
		f, err := r.open(file)
		if err != nil {
			continue
		}
		major := 0
		if program, ok := f.(io.ReaderAt); ok {
			major = majorOf(program)
		}
		_ = f.Close() // it was only read
		if major > 0 {
			return major
		}
	}
	return 0
}

// majorOf returns the major version that the packages of a Go program tell, which its section for that has as text.
func majorOf(program io.ReaderAt) int {
	const module = "github.com/containerd/containerd"
	file, err := elf.NewFile(program)
	if err != nil {
		return 0
	}
	section := file.Section(".go.buildinfo")
	if section == nil || section.Size > maxFile {
		return 0
	}
	text, err := section.Data()
	switch {
	case err != nil:
		return 0
	case bytes.Contains(text, []byte(module+"/v2")):
		return 2
	case bytes.Contains(text, []byte(module+"/")), bytes.Contains(text, []byte(module+"\t")):
		return 1
	}
	return 0
}

// crio reads the configuration of CRI-O: its file, and then the files of a folder, of which a later one wins.
func crio(r root, p process) doctor.Runtime {
	c := doctor.Runtime{Name: doctor.CRIO, Default: "crun", CDIFolders: cdiFolders}
	first := cmp.Or(p.flag("--config", "-c"), "/etc/crio/crio.conf")
	folder := cmp.Or(p.flag("--config-dir", "-d"), "/etc/crio/crio.conf.d")
	all := table{}
	for _, file := range append([]string{first}, r.match(folder+"/*")...) {
		content, err := parse(r, file)
		switch {
		case err == nil:
			c.Files = append(c.Files, file)
			merge(all, content)
		case file != first || !errors.Is(err, fs.ErrNotExist):
			c.Problems = append(c.Problems, file+": "+err.Error())
		}
	}
	section := all.table("crio").table("runtime")
	if name, _ := section["default_runtime"].(string); name != "" {
		c.Default = name
	}
	if folders := section.texts("cdi_spec_dirs"); folders != nil {
		c.CDIFolders = folders
	}
	manager, given := section["cgroup_manager"].(string)
	systemd := manager == "systemd" || !given
	runtimes := section.table("runtimes")
	for _, name := range slices.Sorted(maps.Keys(runtimes)) {
		h := doctor.RuntimeHandler{Name: name, Systemd: systemd}
		h.Program, _ = runtimes.table(name)["runtime_path"].(string)
		h.Absent = path.IsAbs(h.Program) && !r.exists(h.Program)
		c.Handlers = append(c.Handlers, h)
	}
	if len(c.Handlers) == 0 {
		c.Handlers = []doctor.RuntimeHandler{{Name: c.Default, Systemd: systemd}}
	}
	return c
}

// toolkit reads the configuration of NVIDIA's container runtime.
func toolkit(r root) doctor.Toolkit {
	t := doctor.Toolkit{EnvvarUnprivileged: true, Mode: "auto"}
	files := []string{
		"/etc/nvidia-container-runtime/config.toml", "/usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml",
	}
	i := slices.IndexFunc(files, r.exists)
	if i < 0 {
		return t
	}
	t.File = files[i]
	content, err := parse(r, t.File)
	if err != nil {
		t.Problem = t.File + ": " + err.Error()
		return t
	}
	if accept, given := content["accept-nvidia-visible-devices-envvar-when-unprivileged"].(bool); given {
		t.EnvvarUnprivileged = accept
	}
	t.VolumeMounts, _ = content["accept-nvidia-visible-devices-as-volume-mounts"].(bool)
	if mode, _ := content.table("nvidia-container-runtime")["mode"].(string); mode != "" {
		t.Mode = mode
	}
	return t
}

// A table is a table of a TOML file.
type table map[string]any

// parse reads a TOML file.
func parse(r root, file string) (table, error) {
	text, err := r.read(file)
	if err != nil {
		return nil, err
	}
	var content table
	err = toml.Unmarshal(text, &content)
	return content, err
}

// table returns a table of the table; nil if there is none of that name.
func (t table) table(name string) table {
	switch value := t[name].(type) {
	case map[string]any:
		return value
	case table:
		return value
	}
	return nil
}

// texts returns a list of texts; nil if there is none of that name.
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

// merge puts what from has into into, table by table.
func merge(into, from table) {
	for name := range from {
		if more, has := from.table(name), into.table(name); more != nil && has != nil {
			merge(has, more)
			continue
		}
		into[name] = from[name]
	}
}
