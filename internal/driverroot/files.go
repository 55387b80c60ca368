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
	LibraryFolder string
	Libraries     []Library // of LibraryFolder and its subfolder vdpau
	Programs      []string
	Others        []string // firmware, and descriptions for graphics
	Sockets       []string // of the driver's daemons

	resolved map[string]string // of files that absolute links lead to: where they are
	failed   error             // the first look that failed without saying whether a file is there
}

// At returns the path of a file without the absolute links on the way, which lead elsewhere where the driver root is not at "/".
func (f *Files) At(name string) string { return cmp.Or(f.resolved[name], name) }

// has reports whether the driver root has a file, and notes where it is.
func (f *Files) has(root fs.FS, name string) bool {
	at, absolute, err := Resolve(root, name)
	if unreadable(err) && f.failed == nil {
		f.failed = err
	}
	if absolute {
		f.resolved[name] = at
	}
	return err == nil
}

// having returns those files that the driver root has.
func (f *Files) having(root fs.FS, names []string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return !f.has(root, name) })
}

// A Library is a shared library of the driver.
type Library struct {
	Path string
	// Soname is what other programs know it by; empty if the file does not say.
	Soname string
}

var (
	programFolders = []string{"usr/bin", "bin", "usr/local/nvidia/bin", "usr/sbin", "sbin"}
	programs       = []string{
		"nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server",
		"nvidia-imex", "nvidia-imex-ctl",
	}
	firmwareFolders = []string{"lib/firmware", "usr/lib/firmware"}
	descriptions    = []string{
		"etc/OpenCL/vendors/nvidia.icd", "etc/vulkan/icd.d/nvidia_icd.json", "etc/vulkan/implicit_layer.d/nvidia_layers.json",
		"usr/share/egl/egl_external_platform.d/10_nvidia_wayland.json",
		"usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json", "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
		"usr/share/nvidia/nvoptix.bin", "usr/share/vulkan/icd.d/nvidia_icd.json",
		"usr/share/vulkan/implicit_layer.d/nvidia_layers.json",
	}
	daemonSockets = []string{"run/nvidia-persistenced/socket", "run/nvidia-fabricmanager/socket", "tmp/nvidia-mps"}
)

// ErrNoLibraries says that the driver root does not have the driver's libraries.
var ErrNoLibraries = errors.New("no driver libraries")

// Find looks for the files of a version of the driver. The error wraps ErrNoLibraries if there is no libcuda; with another error
// nothing can be said, and the files are not all there are.
func Find(root fs.FS, version string) (Files, error) {
	files := Files{resolved: map[string]string{}}
	files.Sockets = files.having(root, daemonSockets)
	files.Others = files.having(root, descriptions)
	for _, folder := range firmwareFolders {
		found, err := fs.Glob(root, path.Join(folder, "nvidia", version, "gsp*.bin"))
		if err == nil && len(found) > 0 {
			files.Others = append(files.Others, files.having(root, found)...)
			break
		}
	}
	for _, name := range programs {
		for _, folder := range programFolders {
			if files.has(root, path.Join(folder, name)) {
				files.Programs = append(files.Programs, path.Join(folder, name))
				break
			}
		}
	}
	folders, cuda := LibraryFolders(), "libcuda.so."+version
	i := slices.IndexFunc(folders, func(folder string) bool { return files.has(root, path.Join(folder, cuda)) })
	if files.failed != nil {
		return files, fmt.Errorf("look at the driver's files: %w", files.failed)
	}
	if version == "" || i < 0 {
		return files, fmt.Errorf("%w: %s is in none of %s", ErrNoLibraries, cuda, strings.Join(folders, ", "))
	}
	files.LibraryFolder = folders[i]
	if _, err := fs.ReadDir(root, files.LibraryFolder); err != nil { // which Glob does not say
		return files, fmt.Errorf("look at the driver's libraries: %w", err)
	}
	for _, pattern := range []string{"*.so." + version, "libnvidia-nvvm70.so.*", "vdpau/*.so." + version} {
		found, err := fs.Glob(root, path.Join(files.LibraryFolder, pattern))
		if err != nil {
			return files, fmt.Errorf("look for driver libraries: %w", err)
		}
		for _, p := range files.having(root, found) {
			files.Libraries = append(files.Libraries, Library{Path: p, Soname: soname(root, files.At(p))})
		}
	}
	return files, files.failed
}

// soname returns what a shared library says its name is; empty if it does not say.
func soname(root fs.FS, name string) string {
	if info, err := fs.Stat(root, name); err != nil || !info.Mode().IsRegular() { // to open a pipe may take for ever
		return ""
	}
	file, err := root.Open(name)
	if err != nil {
		return ""
	}
	defer file.Close()
	reader, ok := file.(io.ReaderAt)
	if !ok {
		return ""
	}
	object, err := elf.NewFile(reader)
	if err != nil {
		return ""
	}
	names, _ := object.DynString(elf.DT_SONAME) // none after an error
	if len(names) == 0 {
		return ""
	}
	return names[0]
}
