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

// Files are the files of a driver's installation, by path below the driver root.
type Files struct {
	// Libraries are in the LibraryFolders and in their subfolders vdpau. The first LibraryFolder is
	// the folder of libcuda.
	LibraryFolders []string
	Libraries      []Library
	Modules        []Library // the X server's modules, at the paths of the configuration
	Programs       []string
	Others         []DataFile // firmware, and descriptions for graphics
	Sockets        []string   // of the driver's daemons

	targets    map[string]string // the targets of files behind absolute links
	firstError error             // the first error that leaves open whether a file exists
}

// At returns the path of a file without absolute links on the way. Absolute links lead elsewhere if
// the driver root is not at "/".
func (f *Files) At(name string) string { return cmp.Or(f.targets[name], name) }

// has reports whether the driver root has a file, and records where the file is.
func (f *Files) has(root fs.FS, name string) bool {
	at, absolute, err := Resolve(root, name)
	f.keepError(err)
	if absolute {
		f.targets[name] = at
	}
	return err == nil
}

// keepError keeps an error that leaves open whether a file exists.
func (f *Files) keepError(err error) {
	if unreadable(err) && f.firstError == nil {
		f.firstError = err
	}
}

// existingFiles returns the files that exist in the driver root.
func (f *Files) existingFiles(root fs.FS, names []string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return !f.has(root, name) })
}

// matchingFiles returns the files of a folder whose names match a pattern. A missing folder has none.
func (f *Files) matchingFiles(root fs.FS, folder, pattern string) []string {
	at, _, err := Resolve(root, folder)
	if err != nil {
		f.keepError(err)
		return nil
	}
	entries, err := fs.ReadDir(root, cmp.Or(at, "."))
	f.keepError(err)
	var found []string
	for _, e := range entries {
		if match, err := path.Match(pattern, e.Name()); err == nil && match &&
			f.has(root, path.Join(folder, e.Name())) {
			found = append(found, path.Join(folder, e.Name()))
		}
	}
	return found
}

// A Library is a shared library of the driver.
type Library struct {
	Path string
	// Soname is the name for other programs; empty if the file has none.
	Soname string
	// Links are further names of the library, relative to the folder of the library, such as
	// "libcuda.so".
	Links []string

	machine elf.Machine
}

// A DataFile is a file of the driver and its path inside containers.
type DataFile struct{ Path, Container string }

var (
	programs = []string{
		"nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server",
		"nvidia-imex", "nvidia-imex-ctl", "nvidia-xconfig",
	}
	firmwareFolders = []string{"lib/firmware/updates", "lib/firmware", "usr/lib/firmware/updates", "usr/lib/firmware"}
	// descriptionFolders are the folders in which distributions and installers put descriptions.
	// Programs read some descriptions below /etc, and others below /usr/share.
	descriptionFolders = []string{"etc", "usr/local/share", "usr/share"}
	descriptions       = map[string][]string{
		"etc": {
			"OpenCL/vendors/nvidia.icd", "vulkan/icd.d/nvidia_icd.json", "vulkan/icd.d/nvidia_icd.x86_64.json",
			"vulkan/icd.d/nvidia_icd.aarch64.json", "vulkan/icd.d/nvidia_layers.json",
			"vulkan/implicit_layer.d/nvidia_layers.json",
		},
		"usr/share": {
			"egl/egl_external_platform.d/09_nvidia_wayland2.json", "egl/egl_external_platform.d/10_nvidia_wayland.json",
			"egl/egl_external_platform.d/15_nvidia_gbm.json", "egl/egl_external_platform.d/20_nvidia_xcb.json",
			"egl/egl_external_platform.d/20_nvidia_xlib.json", "glvnd/egl_vendor.d/10_nvidia.json",
			"nvidia/nvoptix.bin", "X11/xorg.conf.d/10-nvidia.conf", "X11/xorg.conf.d/nvidia-drm-outputclass.conf",
		},
	}
	daemonSockets = []string{"run/nvidia-persistenced/socket", "run/nvidia-fabricmanager/socket", "tmp/nvidia-mps"}

	// unversionedLibraries are the libraries whose names do not have the driver's version.
	unversionedLibraries = []string{
		"libnvidia-nvvm70.so.*", "libnvidia-egl-gbm.so.*.*", "libnvidia-egl-wayland.so.*.*",
		"libnvidia-egl-wayland2.so.*.*", "libnvidia-egl-xcb.so.*.*", "libnvidia-egl-xlib.so.*.*",
	}
	// links are the names, by name of the library, that programs load although no library has such a
	// soname.
	links = map[string]string{
		"libcuda": "libcuda.so", "libnvidia-opticalflow": "libnvidia-opticalflow.so",
		"libGLX_nvidia":       "libGLX_indirect.so.0",
		"libnvidia-allocator": "gbm/nvidia-drm_gbm.so", "libnvidia-vulkan-producer": "libnvidia-vulkan-producer.so",
		"libglxserver_nvidia": "libglxserver_nvidia.so",
	}
	// moduleFolders are the folders of the X server's modules, below a library folder and below
	// folders of the X server.
	moduleFolders = []string{"modules/drivers", "modules/extensions", "modules/updates/drivers",
		"modules/updates/extensions"}
)

// ErrNoLibraries means that the driver root does not have the driver's libraries.
var ErrNoLibraries = errors.New("no driver libraries")

// Find returns the files of a version of the driver. It searches the folders searchPath first. The
// error wraps ErrNoLibraries if libcuda is missing; after any other error, files may be missing
// from the result.
func Find(root fs.FS, version string, searchPath ...string) (Files, error) {
	files := Files{targets: map[string]string{}}
	files.Sockets = files.existingFiles(root, daemonSockets)
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
	if files.firstError != nil {
		return files, fmt.Errorf("look at the driver's files: %w", files.firstError)
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
	return files, files.firstError
}

// describe looks for the descriptions.
func (f *Files) describe(root fs.FS) {
	for _, in := range []string{"etc", "usr/share"} {
		for _, name := range descriptions[in] {
			// GKE has the descriptions of Vulkan in the root itself.
			for _, folder := range append(slices.Clone(descriptionFolders), ".") {
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
		found := append(f.matchingFiles(root, folder, "gsp*.bin"), f.matchingFiles(root, folder, "ucodes*.bin")...)
		for _, p := range found {
			f.Others = append(f.Others, DataFile{p, "/" + p})
		}
		if len(found) > 0 {
			break
		}
	}
}

// findLibraries searches folders for the libraries; the first folder has libcuda. It skips
// libraries of another architecture, and names already found in an earlier folder.
func (f *Files) findLibraries(root fs.FS, folders []string, version string) {
	names, resolved := map[string]bool{}, map[string]bool{}
	var machine elf.Machine
	for _, folder := range folders {
		at, _, err := Resolve(root, folder)
		if err != nil || resolved[at] {
			f.keepError(err)
			continue
		}
		resolved[at] = true
		before := len(f.Libraries)
		found := f.matchingFiles(root, folder, "*.so."+version)
		if len(found) > 0 {
			found = append(found, f.matchingFiles(root, path.Join(folder, "vdpau"), "*.so."+version)...)
		}
		for _, pattern := range unversionedLibraries {
			found = append(found, f.matchingFiles(root, folder, pattern)...)
		}
		for _, p := range found {
			l := f.library(root, p)
			machine = cmp.Or(machine, l.machine)
			if name := path.Base(p); !names[name] && (l.machine == 0 || l.machine == machine) {
				names[name] = true
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

// library reads the soname and architecture of a shared library, and finds further names of the
// library.
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

// identify returns the soname and the architecture of a shared library; empty and 0 if not
// recorded.
func identify(root fs.FS, name string) (string, elf.Machine) {
	if info, err := fs.Stat(root, name); err != nil || !info.Mode().IsRegular() { // opening a pipe may block forever
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
