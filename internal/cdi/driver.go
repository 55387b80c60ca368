package cdi

import (
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// driverFiles are the files of the driver's installation, by their paths below the driver root.
type driverFiles struct {
	libraryFolder string
	libraries     []library // of libraryFolder and its subfolder vdpau
	programs      []string
	others        []string // firmware, and descriptions for graphics
	sockets       []string // by which its daemons are spoken to
	// behind says of files that absolute links lead to where they are.
	behind map[string]string
}

// has reports whether the driver root has a file, and remembers where it is.
func (f *driverFiles) has(root fs.FS, name string) bool {
	at, found := follow(root, name)
	if found && at != name {
		f.behind[name] = at
	}
	return found
}

// at returns where a file is.
func (f *driverFiles) at(name string) string {
	if at, linked := f.behind[name]; linked {
		return at
	}
	return name
}

// having returns those files that the driver root has.
func (f *driverFiles) having(root fs.FS, names []string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return !f.has(root, name) })
}

// A library is a shared library of the driver.
type library struct {
	path string
	// soname is what other programs know it by; empty if the file does not say.
	soname string
}

// libraryFolders are where distributions and installers put the driver's libraries; the first that has libcuda counts.
// They are those in which package nvidia looks for NVML.
var libraryFolders = []string{
	"usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "lib64", "usr/lib/x86_64-linux-gnu/nvidia/current",
	"usr/lib/aarch64-linux-gnu/nvidia/current", "usr/lib", "lib", "usr/local/nvidia/lib64", "lib/x86_64-linux-gnu",
	"lib/aarch64-linux-gnu", "usr/lib64/nvidia", "usr/lib/nvidia", "usr/local/nvidia/lib", "usr/local/lib64",
	"usr/local/lib/x86_64-linux-gnu", "usr/local/lib/aarch64-linux-gnu", "usr/local/lib",
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

// errNoLibraries: the driver root does not have the driver's libraries.
var errNoLibraries = errors.New("no driver libraries")

// findDriver looks for the files of a version of the driver. It fails with errNoLibraries if there is no libcuda.
func findDriver(root fs.FS, version string) (driverFiles, error) {
	files := driverFiles{behind: map[string]string{}}
	files.sockets = files.having(root, daemonSockets)
	files.others = files.having(root, descriptions)
	for _, folder := range firmwareFolders {
		found, err := fs.Glob(root, path.Join(folder, "nvidia", version, "gsp*.bin"))
		if err == nil && len(found) > 0 {
			files.others = append(files.others, files.having(root, found)...)
			break
		}
	}
	for _, name := range programs {
		for _, folder := range programFolders {
			if files.has(root, path.Join(folder, name)) {
				files.programs = append(files.programs, path.Join(folder, name))
				break
			}
		}
	}
	cuda := "libcuda.so." + version
	i := slices.IndexFunc(libraryFolders, func(folder string) bool { return files.has(root, path.Join(folder, cuda)) })
	if version == "" || i < 0 {
		return files, fmt.Errorf("%w: %s is in none of %s", errNoLibraries, cuda, strings.Join(libraryFolders, ", "))
	}
	files.libraryFolder = libraryFolders[i]
	for _, pattern := range []string{"*.so." + version, "libnvidia-nvvm70.so.*", "vdpau/*.so." + version} {
		found, err := fs.Glob(root, path.Join(files.libraryFolder, pattern))
		if err != nil {
			return files, fmt.Errorf("look for driver libraries: %w", err)
		}
		for _, p := range files.having(root, found) {
			files.libraries = append(files.libraries, library{path: p, soname: soname(root, files.at(p))})
		}
	}
	return files, nil
}

func exists(root fs.FS, name string) bool {
	_, err := fs.Stat(root, name)
	return err == nil
}

// maxLinks is how many links lead to a file at most; more lead in a circle.
const maxLinks = 40

// follow returns where a file is whose name absolute links lead on, as Debian's alternatives do. They lead inside root, which
// is the root of the file system neither here nor, where a container brings the driver, on the host. Other names stay.
func follow(root fs.FS, name string) (at string, found bool) {
	rest, absolute := name, false
	for links := 0; rest != ""; {
		var part string
		switch part, rest, _ = strings.Cut(rest, "/"); part {
		case "", ".":
			continue
		case "..":
			if at = path.Dir(at); at == "." {
				at = ""
			}
			continue
		}
		next := path.Join(at, part)
		info, err := fs.Lstat(root, next)
		if err != nil {
			return "", false
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			at = next
			continue
		}
		target, err := fs.ReadLink(root, next)
		if links++; err != nil || links > maxLinks {
			return "", false
		}
		if path.IsAbs(target) {
			at, absolute = "", true
		}
		rest = target + "/" + rest
	}
	if !absolute {
		at = name
	}
	return at, true
}

// soname returns what a shared library says its name is; empty if it does not say.
func soname(root fs.FS, name string) string {
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
	names, err := object.DynString(elf.DT_SONAME)
	if err != nil || len(names) == 0 {
		return ""
	}
	return names[0]
}
