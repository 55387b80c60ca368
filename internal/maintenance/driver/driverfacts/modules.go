package driverfacts

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"runtime"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/preflight"
)

// Limits for the search for modules.
const (
	maxFolders = 2000 // folders of one search
	maxDepth   = 8
	maxFiles   = 64      // module files of one set
	maxIndex   = 8 << 20 // bytes of modules.dep
)

// CurrentModules is the folder with the modules that gpu-driver loads at each boot.
const CurrentModules = driverapi.DefaultDirectory + "/" + driverapi.Current + "/lib/modules/"

// moduleSet returns the driver's modules of a kernel release: those that modules.dep lists, and
// those in the folders where installers put them.
func moduleSet(host root, release string) preflight.ModuleSet {
	set := preflight.ModuleSet{Release: release}
	folder := "lib/modules/" + release
	if !host.Exists(folder) {
		folder = "usr/lib/modules/" + release // a system without the link /lib
	}
	set.Exists = host.Exists(folder)
	set.Headers = host.Exists(folder + "/build/Makefile")
	found := map[string]bool{} // path below the root → modules.dep lists it
	for _, file := range indexed(host, folder) {
		found[file] = true
	}
	s := search{root: host, found: found, folders: maxFolders}
	for _, name := range []string{"updates", "extra", "weak-updates", "misc", "video", "extras"} {
		s.in(path.Join(folder, name), 0)
	}
	kernel, _ := host.List(folder + "/kernel")
	for _, name := range kernel {
		if strings.HasPrefix(name, "nvidia") {
			s.in(path.Join(folder, "kernel", name), 0)
		}
	}
	for _, name := range []string{"drivers/video", "drivers/extra", "drivers/char", "drivers/gpu/nvidia"} {
		s.in(path.Join(folder, "kernel", name), 0)
	}
	outside := search{root: host, found: map[string]bool{}, folders: maxFolders}
	for _, place := range []string{
		"home/kubernetes/bin/nvidia/drivers",       // of GKE's installer
		"run/nvidia/driver/lib/modules/" + release, // of the operator's driver container
		CurrentModules[1:] + release,
	} {
		outside.in(place, 0)
	}
	for _, file := range slices.Sorted(maps.Keys(outside.found)) {
		m := readModule(host, file)
		if m.Vermagic == "" || strings.HasPrefix(m.Vermagic, release+" ") {
			m.Listed = true // loaded by its path
			set.Files = append(set.Files, m)
		}
	}
	for _, file := range slices.Sorted(maps.Keys(found)) {
		if host.Exists(file) {
			m := readModule(host, file)
			m.Listed = found[file]
			if m.Unread != "" {
				m.Version = dkmsVersion(host, release, path.Base(file))
			}
			set.Files = append(set.Files, m)
		}
	}
	set.Partial = s.folders <= 0 || len(found) >= maxFiles
	set.Sources = dkmsSources(host)
	return set
}

// indexed returns the driver's modules that modules.dep lists, as paths below the root.
func indexed(host root, folder string) (files []string) {
	f, err := host.OpenFile(folder + "/modules.dep")
	if err != nil {
		return nil
	}
	defer f.Close()
	lines := bufio.NewScanner(io.LimitReader(f, maxIndex))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() && len(files) < maxFiles {
		file, _, ok := strings.Cut(lines.Text(), ":")
		if !ok || !moduleName.MatchString(path.Base(file)) {
			continue
		}
		if !path.IsAbs(file) {
			file = path.Join(folder, file)
		}
		if file = strings.TrimPrefix(path.Clean(file), "/"); fs.ValidPath(file) {
			files = append(files, file)
		}
	}
	return files
}

// A search collects the module files below folders.
type search struct {
	root    root
	found   map[string]bool
	folders int // that may still be read
}

func (s *search) in(folder string, depth int) {
	if s.folders--; s.folders < 0 || depth > maxDepth {
		return
	}
	names, err := s.root.List(folder)
	if err != nil {
		return
	}
	for _, name := range names {
		file := path.Join(folder, name)
		if moduleName.MatchString(name) {
			if _, known := s.found[file]; !known && len(s.found) < maxFiles {
				s.found[file] = false
			}
			continue
		}
		// Links to folders are not followed: they may lead in a circle.
		if info, err := fs.Lstat(s.root.FS, file); err == nil && info.IsDir() {
			s.in(file, depth+1)
		}
	}
}

// dkmsSources returns the driver versions whose sources DKMS has, in order.
func dkmsSources(host root) (versions []string) {
	names, _ := host.List("usr/src")
	for _, name := range names {
		if at := strings.LastIndex(name, "-"); strings.HasPrefix(name, "nvidia") && at > 0 && isVersion(name[at+1:]) &&
			host.Exists("usr/src/"+name+"/dkms.conf") {
			versions = append(versions, name[at+1:])
		}
	}
	slices.Sort(versions)
	return slices.Compact(versions)
}

// dkmsVersion returns the driver version of a module that DKMS built for a release, by the folder in
// which DKMS keeps it; empty if DKMS has none, or has it in several versions.
func dkmsVersion(host root, release, name string) (version string) {
	for _, driver := range []string{"nvidia", "nvidia-open", "nvidia-current", "nvidia-current-open"} {
		versions, _ := host.List("var/lib/dkms/" + driver)
		for _, one := range versions {
			folder := "var/lib/dkms/" + driver + "/" + one + "/" + release
			architectures, _ := host.List(folder)
			if !isVersion(one) || !slices.ContainsFunc(architectures, func(architecture string) bool {
				return host.Exists(folder + "/" + architecture + "/module/" + name)
			}) {
				continue
			}
			if version != "" && version != one {
				return ""
			}
			version = one
		}
	}
	return version
}

// Target returns a folder as a target: its kernel modules, and its version. The version of a driver
// folder is in its manifest, that of other folders in the modules or in the name of libcuda or NVML.
func Target(name string, folder fs.FS) *preflight.Target {
	t := &preflight.Target{Name: name, Folder: true}
	r := root{FS: folder}
	if _, err := r.List("."); err != nil {
		t.Problem = reason(err)
		return t
	}
	t.Files = ModulesIn(folder)
	for _, m := range t.Files {
		m.Path = path.Join(name, m.Path)
	}
	manifest, _, err := driverfolder.Read(folder)
	switch {
	case err == nil:
		t.Version = manifest.Version
		t.Problem = driverFolderProblem(folder, manifest, t.Files)
		return t
	case !errors.Is(err, fs.ErrNotExist):
		t.Problem = "it is no driver folder: " + err.Error()
		return t
	}
	versions := map[string]bool{}
	for _, m := range t.Files {
		if m.Version != "" {
			versions[m.Version] = true
		}
	}
	for _, library := range []string{".", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64",
		"usr/lib", "lib64", "lib"} {
		for _, stem := range []string{"libcuda.so.", "libnvidia-ml.so."} {
			for _, file := range r.Match(path.Join(library, stem+"*")) {
				if version := strings.TrimPrefix(path.Base(file), stem); isVersion(version) {
					versions[version] = true
				}
			}
		}
	}
	if len(versions) == 0 {
		t.Problem = "it has no kernel modules and no libraries of the driver"
	}
	for version := range versions {
		if t.Version != "" && t.Version != version {
			t.Problem = fmt.Sprintf("its files have different versions: %s and %s", min(t.Version, version),
				max(t.Version, version))
		}
		t.Version = version
	}
	return t
}

// driverFolderProblem returns why a driver folder cannot be used on this node; empty if it can. The
// digests are not compared: that takes seconds, and is what `gpu-driver verify` is for.
func driverFolderProblem(folder fs.FS, manifest driverfolder.Manifest, modules []*preflight.ModuleFile) string {
	if manifest.Architecture != runtime.GOARCH {
		return "it is for " + manifest.Architecture + ", and this node is " + runtime.GOARCH
	}
	for _, f := range manifest.Files {
		info, err := fs.Lstat(folder, f.Path)
		switch {
		case err != nil:
			return "its file " + f.Path + " cannot be read: " + reason(err)
		case f.Link == "" && (!info.Mode().IsRegular() || info.Size() != f.Size):
			return "its file " + f.Path + " is not the one that was packed"
		}
	}
	for _, m := range modules {
		if m.Version != "" && m.Version != manifest.Version {
			return fmt.Sprintf("its files have different versions: %s and %s", m.Version, manifest.Version)
		}
	}
	return ""
}

// ModulesIn returns the driver's kernel modules in a folder and in the folders below, in the order of
// their paths, which begin with a slash at the folder.
func ModulesIn(folder fs.FS) (modules []*preflight.ModuleFile) {
	r := root{FS: folder}
	s := search{root: r, found: map[string]bool{}, folders: maxFolders}
	s.in(".", 0)
	for _, file := range slices.Sorted(maps.Keys(s.found)) {
		modules = append(modules, readModule(r, file))
	}
	return modules
}

// VersionTarget returns a version, such as 580.95.05, or a branch, such as 580, as a target.
func VersionTarget(text string) (*preflight.Target, error) {
	digits := func(r rune) bool { return r < '0' || r > '9' }
	if !isVersion(text) && (len(text) != 3 || strings.ContainsFunc(text, digits)) {
		return nil, errors.New("it is no version such as 580.95.05, no branch such as 580, and no folder")
	}
	return &preflight.Target{Name: text, Version: text}, nil
}
