package driverroot

import (
	"cmp"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// Files are the files of a driver's installation, by their paths below the driver root.
type Files struct {
	// Libraries are in the LibraryFolders, of which that of libcuda is the first, and in their
	// subfolders vdpau.
	LibraryFolders []string
	Libraries      []Library
	Modules        []Library // of the X server, which are where its configuration says
	Programs       []string
	Others         []DataFile // firmware, and descriptions for graphics
	Sockets        []string   // of the driver's daemons

	resolved map[string]string // of files that absolute links lead to: where they are
	failed   error             // the first look that failed without saying whether a file is there
}

// At returns the path of a file without the absolute links on the way, which lead elsewhere where
// the driver root is not at "/".
func (f *Files) At(name string) string { return cmp.Or(f.resolved[name], name) }

// has reports whether the driver root has a file, and notes where it is.
func (f *Files) has(root fs.FS, name string) bool {
	at, absolute, err := Resolve(root, name)
	f.note(err)
	if absolute {
		f.resolved[name] = at
	}
	return err == nil
}

// note keeps an error that does not say whether a file is there.
func (f *Files) note(err error) {
	if unreadable(err) && f.failed == nil {
		f.failed = err
	}
}

// having returns those files that the driver root has.
func (f *Files) having(root fs.FS, names []string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return !f.has(root, name) })
}

// matching returns the files of a folder whose names match a pattern. A folder that is not there
// has none.
func (f *Files) matching(root fs.FS, folder, pattern string) []string {
	at, _, err := Resolve(root, folder)
	if err != nil {
		f.note(err)
		return nil
	}
	entries, err := fs.ReadDir(root, cmp.Or(at, "."))
	f.note(err)
	var found []string
	for _, e := range entries {
		if match, err := path.Match(pattern, e.Name()); err == nil && match && f.has(root, path.Join(folder, e.Name())) {
			found = append(found, path.Join(folder, e.Name()))
		}
	}
	return found
}

// A Library is a shared library of the driver.
type Library struct {
	Path string
	// Soname is what other programs know it by; empty if the file does not say.
	Soname string
	// Links are more names by which programs look for it, relative to its folder, such as
	// "libcuda.so".
	Links []string

	machine elf.Machine
}

// A DataFile is a file of the driver and the path at which programs in a container look for it.
type DataFile struct{ Path, Container string }

var (
	programs = []string{
		"nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server",
		"nvidia-imex", "nvidia-imex-ctl", "nvidia-xconfig",
	}
	firmwareFolders = []string{"lib/firmware/updates", "lib/firmware", "usr/lib/firmware/updates", "usr/lib/firmware"}
	// descriptionFolders are where distributions and installers put descriptions. Programs look for
	// some of these below /etc, and for the others below /usr/share.
	descriptionFolders = []string{"etc", "usr/local/share", "usr/share"}
	descriptions       = map[string][]string{
		"etc": {
			"OpenCL/vendors/nvidia.icd", "vulkan/icd.d/nvidia_icd.json", "vulkan/icd.d/nvidia_icd.x86_64.json",
			"vulkan/icd.d/nvidia_icd.aarch64.json", "vulkan/icd.d/nvidia_layers.json", "vulkan/implicit_layer.d/nvidia_layers.json",
		},
		"usr/share": {
			"egl/egl_external_platform.d/09_nvidia_wayland2.json", "egl/egl_external_platform.d/10_nvidia_wayland.json",
			"egl/egl_external_platform.d/15_nvidia_gbm.json", "egl/egl_external_platform.d/20_nvidia_xcb.json",
			"egl/egl_external_platform.d/20_nvidia_xlib.json", "glvnd/egl_vendor.d/10_nvidia.json", "nvidia/nvoptix.bin",
			"X11/xorg.conf.d/10-nvidia.conf", "X11/xorg.conf.d/nvidia-drm-outputclass.conf",
		},
	}
	daemonSockets = []string{"run/nvidia-persistenced/socket", "run/nvidia-fabricmanager/socket", "tmp/nvidia-mps"}

	// unversioned are the libraries whose names do not have the driver's version.
	unversioned = []string{
		"libnvidia-nvvm70.so.*", "libnvidia-egl-gbm.so.*.*", "libnvidia-egl-wayland.so.*.*", "libnvidia-egl-wayland2.so.*.*",
		"libnvidia-egl-xcb.so.*.*", "libnvidia-egl-xlib.so.*.*",
	}
	// links are names that programs look for although no library says that it is called so, by the
	// library's name.
	links = map[string]string{
		"libcuda": "libcuda.so", "libnvidia-opticalflow": "libnvidia-opticalflow.so", "libGLX_nvidia": "libGLX_indirect.so.0",
		"libnvidia-allocator": "gbm/nvidia-drm_gbm.so", "libnvidia-vulkan-producer": "libnvidia-vulkan-producer.so",
		"libglxserver_nvidia": "libglxserver_nvidia.so",
	}
	// moduleFolders are where the X server looks, below a library folder and below folders of its own.
	moduleFolders = []string{"modules/drivers", "modules/extensions", "modules/updates/drivers",
		"modules/updates/extensions"}
)

// ErrNoLibraries says that the driver root does not have the driver's libraries.
var ErrNoLibraries = errors.New("no driver libraries")

// Find looks for the files of a version of the driver, and for libraries in the folders searchPath
// before others. The error wraps ErrNoLibraries if there is no libcuda; with another error nothing
// can be said, and the files are not all there are.
func Find(root fs.FS, version string, searchPath ...string) (Files, error) {
	files := Files{resolved: map[string]string{}}
	files.Sockets = files.having(root, daemonSockets)
	files.describe(root)
	files.findFirmware(root, version)
	for _, name := range programs {
		for _, folder := range ProgramFolders() {
			if files.has(root, path.Join(folder, name)) {
				files.Programs = append(files.Programs, path.Join(folder, name))
				break
			}
		}
	}
	folders, cuda := LibraryFolders(searchPath...), "libcuda.so."+version
	i := slices.IndexFunc(folders, func(folder string) bool { return files.has(root, path.Join(folder, cuda)) })
	if files.failed != nil {
		return files, fmt.Errorf("look at the driver's files: %w", files.failed)
	}
	if version == "" || i < 0 {
		return files, fmt.Errorf("%w: %s is in none of %s", ErrNoLibraries, cuda, strings.Join(folders, ", "))
	}
	at, _, err := Resolve(root, folders[i])
	if err == nil {
		_, err = fs.ReadDir(root, at)
	}
	if err != nil {
		return files, fmt.Errorf("look at the driver's libraries: %w", err)
	}
	files.findLibraries(root, append([]string{folders[i]}, folders...), version)
	files.findModules(root, version)
	return files, files.failed
}

// describe looks for the descriptions.
func (f *Files) describe(root fs.FS) {
	for _, in := range []string{"etc", "usr/share"} {
		for _, name := range descriptions[in] {
			for _, folder := range append(slices.Clone(descriptionFolders), ".") { // GKE has those of Vulkan in the root itself
				if (folder != "." || strings.HasPrefix(name, "vulkan/")) && f.has(root, path.Join(folder, name)) {
					f.Others = append(f.Others, DataFile{path.Join(folder, name), path.Join("/", in, name)})
					break
				}
			}
		}
	}
}

// findFirmware looks for the firmware of GPUs.
func (f *Files) findFirmware(root fs.FS, version string) {
	for _, folder := range firmwareFolders {
		folder = path.Join(folder, "nvidia", version)
		found := append(f.matching(root, folder, "gsp*.bin"), f.matching(root, folder, "ucodes*.bin")...)
		for _, p := range found {
			f.Others = append(f.Others, DataFile{p, "/" + p})
		}
		if len(found) > 0 {
			break
		}
	}
}

// findLibraries looks for the libraries in folders, of which the first has libcuda. A library of
// another architecture is left out, and so is one whose name an earlier folder has.
func (f *Files) findLibraries(root fs.FS, folders []string, version string) {
	seen, looked := map[string]bool{}, map[string]bool{}
	var machine elf.Machine
	for _, folder := range folders {
		at, _, err := Resolve(root, folder)
		if err != nil || looked[at] {
			f.note(err)
			continue
		}
		looked[at] = true
		before := len(f.Libraries)
		found := f.matching(root, folder, "*.so."+version)
		if len(found) > 0 {
			found = append(found, f.matching(root, path.Join(folder, "vdpau"), "*.so."+version)...)
		}
		for _, pattern := range unversioned {
			found = append(found, f.matching(root, folder, pattern)...)
		}
		for _, p := range found {
			l := f.library(root, p)
			machine = cmp.Or(machine, l.machine)
			if name := path.Base(p); !seen[name] && (l.machine == 0 || l.machine == machine) {
				seen[name] = true
				f.Libraries = append(f.Libraries, l)
			}
		}
		if len(f.Libraries) > before {
			f.LibraryFolders = append(f.LibraryFolders, folder)
		}
	}
}

// findModules looks for the modules of the X server.
func (f *Files) findModules(root fs.FS, version string) {
	var folders []string
	for _, folder := range f.LibraryFolders {
		folders = append(folders, path.Join(folder, "nvidia/xorg"))
	}
	for _, folder := range append(slices.Clone(f.LibraryFolders), "usr/lib", "usr/lib64") {
		for _, m := range moduleFolders {
			folders = append(folders, path.Join(folder, "xorg", m))
		}
	}
	for _, name := range []string{"nvidia_drv.so", "libglxserver_nvidia.so." + version} {
		for _, folder := range folders {
			if p := path.Join(folder, name); f.has(root, p) {
				f.Modules = append(f.Modules, f.library(root, p))
				break
			}
		}
	}
}

// library reads what a shared library says of itself, and looks for its names.
func (f *Files) library(root fs.FS, name string) Library {
	l := Library{Path: name}
	l.Soname, l.machine = identify(root, f.At(name))
	base, _, _ := strings.Cut(path.Base(name), ".so.")
	link := links[base]
	if link != "" && link != l.Soname {
		l.Links = append(l.Links, link)
	}
	stem, _, versioned := strings.Cut(l.Soname, ".so.")
	plain := stem + ".so"
	if !versioned || link == plain {
		return l
	}
	// A file with the plain name may be something else, such as a script of the linker.
	to, _, err := Resolve(root, path.Join(path.Dir(name), plain))
	if self, _, _ := Resolve(root, name); err == nil && to == self {
		l.Links = append(l.Links, plain)
	}
	return l
}

// identify returns what a shared library says its name is, and for which architecture it is; empty
// and 0 if it does not say.
func identify(root fs.FS, name string) (string, elf.Machine) {
	if info, err := fs.Stat(root, name); err != nil || !info.Mode().IsRegular() { // to open a pipe may take for ever
		return "", 0
	}
	file, err := root.Open(name)
	if err != nil {
		return "", 0
	}
	defer file.Close()
	reader, ok := file.(io.ReaderAt)
	if !ok {
		return "", 0
	}
	object, err := elf.NewFile(reader)
	if err != nil {
		return "", 0
	}
	names, _ := object.DynString(elf.DT_SONAME) // none after an error
	return strings.Join(names[:min(len(names), 1)], ""), object.Machine
}
