package nodefacts

import (
	"cmp"
	"debug/buildinfo"
	"fmt"
	"io"
	"maps"
	"path"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
)

// A generation is a range of containerd versions that read a configuration in the same way.
// Variable generations has their names and order. test/containerd checks this file against
// containerd's own loader.
type generation int

const (
	from16 generation = iota // CDI does not exist
	from17                   // CDI is off by default; an import replaces whole sections
	from20                   // imports are merged, and then migrated together from the last version
	from23                   // each file is migrated separately
	from24                   // enable_cdi does not exist: CDI is always on
)

// generations lists the first and the last minor version of each generation.
var generations = []struct {
	generation
	name               string
	major, first, last int
}{
	{from16, "1.6", 1, 0, 6},
	{from17, "1.7", 1, 7, 1 << 20},
	{from20, "2.0 to 2.2", 2, 0, 2},
	{from23, "2.3", 2, 3, 3},
	{from24, "2.4 and newer", 2, 4, 1 << 20},
}

// A containerdVersion is a version of containerd; 0 stands for unknown parts.
type containerdVersion struct {
	major, minor int
	minorKnown   bool
}

// The sections of containerd's CRI plugin in version 1 of the configuration, in version 2, and
// since version 3.
const (
	sectionV1 = "cri"
	sectionV2 = "io.containerd.grpc.v1.cri"
	sectionV3 = "io.containerd.cri.v1.runtime"
)

// maxImports limits the files of a configuration.
const maxImports = 64

// A configFile is one of the files of a containerd configuration.
type configFile struct {
	path    string
	content table
}

// containerdFilesOf reads a configuration file of containerd and its imports, in containerd's
// order. It also returns why some of them cannot be read.
func containerdFilesOf(r root, first string) (files []configFile, problems []string) {
	pending := []string{first}
	for seen := (map[string]bool{}); len(pending) > 0 && len(seen) < maxImports; {
		file := pending[0]
		if pending = pending[1:]; seen[file] {
			continue
		}
		seen[file] = true
		content, err := parse(r, file)
		if err != nil {
			problems = append(problems, file+": "+err.Error())
			continue
		}
		files = append(files, configFile{file, content})
		for _, pattern := range content.texts("imports") {
			if !path.IsAbs(pattern) {
				pattern = path.Join(path.Dir(file), pattern)
			}
			pending = append(pending, r.Match(path.Clean(pattern))...)
		}
	}
	return files, problems
}

// readings returns the effective configuration in each possible version of containerd, one reading
// for all versions that agree. Versions that refuse the files are dropped unless all do, because
// containerd is running.
func readings(r root, files []configFile, version containerdVersion) []doctor.Reading {
	var all []doctor.Reading
	for _, g := range generations {
		if version.major != 0 && version.major != g.major || version.minorKnown &&
			(version.minor < g.first || version.minor > g.last) ||
			g.generation == from16 && !version.minorKnown { // no longer maintained
			continue
		}
		reader := g.generation
		if reader == from24 && !version.minorKnown {
			reader = from23 // trust a configuration that switches CDI off
		}
		one := reader.read(files)
		for i, h := range one.Handlers {
			one.Handlers[i].Absent = path.IsAbs(h.Program) && !r.Exists(h.Program)
		}
		if n := len(all); n > 0 {
			last := all[n-1]
			if last.Versions, one.Versions = "", ""; all[n-1].Versions[0] == g.name[0] && reflect.DeepEqual(last, one) {
				from, _, _ := strings.Cut(all[n-1].Versions, " ")
				_, to, _ := strings.Cut(g.name, " ")
				all[n-1].Versions = strings.TrimSpace(from + " " + cmp.Or(to, "to "+g.name))
				continue
			}
		}
		one.Versions = g.name
		all = append(all, one)
	}
	starts := slices.DeleteFunc(slices.Clone(all), func(one doctor.Reading) bool { return one.Refused != "" })
	if len(starts) > 0 {
		return starts
	}
	return all
}

// read returns the effective configuration in this generation.
func (g generation) read(files []configFile) doctor.Reading {
	reading := doctor.Reading{Default: "runc", CDI: g >= from20, CDIFolders: cdiFolders, CDIExists: g >= from17}
	plugins, disabled, version, refused := g.join(files)
	if reading.Refused = refused; refused != "" {
		return reading
	}
	section := sectionV3
	switch {
	case g < from20 && version < 2:
		section = sectionV1
	case g < from20:
		section = sectionV2
	}
	reading.Disabled = slices.Contains(disabled, section) || slices.Contains(disabled, sectionV2)
	cri := plugins.table(section)
	if on, isSet := cri["enable_cdi"].(bool); isSet && g != from16 && g != from24 {
		reading.CDI, reading.CDISetting = on, &on
	}
	if folders := cri.texts("cdi_spec_dirs"); folders != nil {
		reading.CDIFolders = folders
	}
	containers := cri.table("containerd")
	if name, isSet := containers["default_runtime_name"].(string); isSet {
		reading.Default = name
	}
	reading.Handlers = handlersOf(containers.table("runtimes"))
	named := func(name string) bool {
		return slices.ContainsFunc(reading.Handlers, func(h doctor.RuntimeHandler) bool { return h.Name == name })
	}
	if !named("runc") && (g >= from20 || len(reading.Handlers) == 0) {
		reading.Handlers = append(reading.Handlers, doctor.RuntimeHandler{Name: "runc", Implied: true})
	}
	order.Sort(reading.Handlers, func(a, b doctor.RuntimeHandler) int { return cmp.Compare(a.Name, b.Name) })
	if !named(reading.Default) && !reading.Disabled {
		reading.Refused = fmt.Sprintf("default_runtime_name = %q, but no runtime has this name", reading.Default)
	}
	reading.Ignored = ignored(files, reading.Handlers, section)
	return reading
}

// join merges the plugins' sections of all files. It also returns the disabled plugins and the
// version of the last file, or why containerd does not start with the files.
func (g generation) join(files []configFile) (plugins table, disabled []string, version int64, refused string) {
	newest := map[generation]int64{from16: 2, from17: 2, from20: 3, from23: 4, from24: 4}[g]
	plugins = table{}
	if g >= from20 {
		version = newest
	}
	for _, file := range files {
		own, _ := file.content["version"].(int64)
		sections, off := copyOf(file.content.table("plugins")), file.content.texts("disabled_plugins")
		if own < 2 && g >= from20 {
			renameSections(sections)
			for i, name := range off {
				off[i] = newName(name)
			}
			own = version
		}
		if was, _ := file.content["version"].(int64); g >= from23 && was < version {
			migrate(sections, g)
			own = version
		}
		if version = cmp.Or(own, version); g < from20 {
			maps.Copy(plugins, sections)
		} else {
			overlay(plugins, sections)
		}
		disabled = append(disabled, off...)
	}
	if version > newest {
		return nil, nil, 0, fmt.Sprintf("the file has version %d, but this containerd reads versions up to %d",
			version, newest)
	}
	if wrong := wrongName(g, plugins, disabled); version >= 2 && wrong != "" {
		return nil, nil, 0, fmt.Sprintf("%q is not the name of a plugin in version %d", wrong, version)
	}
	if g == from20 && version < newest {
		migrate(plugins, g)
	}
	return plugins, disabled, version, ""
}

// wrongName returns a name that is invalid for a plugin since version 2; empty if there is none.
// Only containerd 1 validates sections.
func wrongName(g generation, plugins table, disabled []string) string {
	named := slices.Clone(disabled)
	if g < from20 {
		named = append(named, slices.Sorted(maps.Keys(plugins))...)
	}
	for _, name := range named {
		if g < from20 && !strings.HasPrefix(name, "io.containerd.") || !strings.Contains(name, ".") {
			return name
		}
	}
	return ""
}

// newName returns the name since version 2 of a plugin of version 1.
func newName(name string) string {
	if name == sectionV1 {
		return sectionV2
	}
	if !strings.Contains(name, ".") {
		return "io.containerd.grpc.v1." + name
	}
	return name
}

func renameSections(sections table) {
	if cri, has := sections[sectionV1]; has {
		delete(sections, sectionV1)
		sections[sectionV2] = cri
	}
}

// migrate moves settings from the section of version 2 to the section of version 3, without
// overwriting.
func migrate(sections table, g generation) {
	from := sections.table(sectionV2)
	if from == nil {
		return
	}
	to := sections.table(sectionV3)
	if to == nil {
		to = table{}
	}
	for key, value := range from {
		if _, has := to[key]; !has && key != "containerd" && (key != "enable_cdi" || g < from24) {
			to[key] = value
		}
	}
	if containers := from.table("containerd"); containers != nil {
		into := to.table("containerd")
		if into == nil {
			into = table{}
		}
		for key, value := range containers {
			if _, has := into[key]; !has {
				into[key] = value
			}
		}
		to["containerd"] = into
	}
	sections[sectionV3] = to
}

// overlay merges from into into, table by table. Values of from win.
func overlay(into, from table) {
	for name, value := range from {
		if more, has := from.table(name), into.table(name); more != nil && has != nil {
			overlay(has, more)
			continue
		}
		into[name] = value
	}
}

// copyOf returns a deep copy of a table.
func copyOf(t table) table {
	all := table{}
	for name, value := range t {
		if inner := t.table(name); inner != nil {
			value = copyOf(inner)
		}
		all[name] = value
	}
	return all
}

// handlersOf returns the handlers in a table of runtimes.
func handlersOf(runtimes table) []doctor.RuntimeHandler {
	var all []doctor.RuntimeHandler
	for _, name := range slices.Sorted(maps.Keys(runtimes)) {
		options := runtimes.table(name).table("options")
		h := doctor.RuntimeHandler{Name: name}
		h.Program, _ = options["BinaryName"].(string)
		h.Systemd, _ = options["SystemdCgroup"].(bool)
		all = append(all, h)
	}
	return all
}

// ignored returns the handlers in sections of the CRI plugin that containerd does not read.
func ignored(files []configFile, used []doctor.RuntimeHandler, section string) []string {
	var all []string
	for _, file := range files {
		version, _ := file.content["version"].(int64)
		for _, name := range []string{sectionV1, sectionV2, sectionV3} {
			for _, h := range handlersOf(
				file.content.table("plugins").table(name).table("containerd").table("runtimes")) {
				is := func(one doctor.RuntimeHandler) bool { return one.Name == h.Name && one.Program == h.Program }
				if !slices.ContainsFunc(used, is) && h.Program != "" {
					all = append(all, fmt.Sprintf("%s: runtime %s in section %s of a version %d file; this "+
						"containerd reads %s", file.path, h.Name, name, max(version, 1), section))
				}
			}
		}
	}
	return all
}

// containerdVersionAt returns the containerd version in a program file.
func containerdVersionAt(r root, file string) (v containerdVersion) {
	f, err := r.OpenFile(file)
	if err != nil {
		return v
	}
	defer f.Close()
	if program, ok := f.(io.ReaderAt); ok {
		v = versionOf(program)
	}
	return v
}

// versionOf returns the containerd version in a program.
func versionOf(program io.ReaderAt) (v containerdVersion) {
	info, err := buildinfo.Read(program)
	if err != nil {
		return v
	}
	const module = "github.com/containerd/containerd"
	accept := func(text string) {
		// Distributions write "1.7.27-0ubuntu1", and programs without a version "(devel)".
		parts := strings.SplitN(strings.TrimPrefix(text, "v"), ".", 3)
		if len(parts) < 2 || v.minorKnown {
			return
		}
		major, err := strconv.Atoi(parts[0])
		minor, err2 := strconv.Atoi(parts[1])
		if err == nil && err2 == nil && major > 0 {
			v = containerdVersion{major, minor, true}
		}
	}
	if strings.HasPrefix(info.Path, module+"/") { // containerd itself
		for _, s := range info.Settings {
			if _, version, has := strings.Cut(s.Value, "/version.Version="); has && s.Key == "-ldflags" {
				version, _, _ = strings.Cut(version, " ")
				accept(strings.Trim(version, `'"`))
			}
		}
		if strings.HasPrefix(info.Main.Path, module) {
			accept(info.Main.Version)
		}
	}
	for _, dep := range info.Deps { // a program that includes containerd, such as K3s
		if dep.Path == module || dep.Path == module+"/v2" {
			if dep.Replace != nil {
				accept(dep.Replace.Version)
			}
			accept(dep.Version)
			if v.major == 0 {
				v.major = majorOf(dep.Path)
			}
		}
	}
	if v.major == 0 && strings.HasPrefix(info.Path, module+"/") {
		v.major = majorOf(info.Path)
	}
	return v
}

// majorOf returns the major version in the path of a containerd package.
func majorOf(name string) int {
	if strings.Contains(name, "/containerd/v2") {
		return 2
	}
	return 1
}
