package driverpack

import (
	"bufio"
	"bytes"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"
)

// An entry is a file of the driver, and its place in a driver folder.
type entry struct {
	from string // path in the archive; empty for a link
	to   string // path in the driver folder
	mode fs.FileMode
	link string // relative target of a link
	// isCompat32 is true for a file for 32-bit programs, which has no path in the driver folder.
	isCompat32 bool
}

// A rule says how NVIDIA's installer treats a type of file. The fields of a line of .manifest follow
// from the rule: FILE MODE TYPE [ARCHITECTURE] [PATH or DEPTH] [TARGET] MODULE:NAME.
type rule struct {
	// to is the folder for files of the type, below the driver folder; lib stands for the folder of
	// the libraries. Files of a type without a folder are left out.
	to string
	// These fields say how a line goes on: arch with NATIVE or COMPAT32, path with a path below to,
	// depth with the number of folders to remove from the path in the archive, link with a target.
	arch, path, depth, link bool
}

// Places of files. lib is replaced by the folder of the architecture.
const (
	lib     = "LIB"
	leave   = ""  // not a part of a driver folder
	atPath  = "/" // at the path of the line
	xorg    = "usr/lib/xorg/modules"
	private = "usr/lib/nvidia"
)

// rules has the types of nvidia-installer 590.48.01, and older ones back to 440.
var rules = map[string]rule{
	"OPENGL_LIB": {to: lib, arch: true}, "OPENGL_SYMLINK": {to: lib, arch: true, link: true},
	"GLVND_LIB": {to: lib, arch: true}, "GLVND_SYMLINK": {to: lib, arch: true, link: true},
	"GLX_CLIENT_LIB": {to: lib, arch: true}, "GLX_CLIENT_SYMLINK": {to: lib, arch: true, link: true},
	"EGL_CLIENT_LIB": {to: lib, arch: true}, "EGL_CLIENT_SYMLINK": {to: lib, arch: true, link: true},
	"TLS_LIB":  {to: lib, arch: true, path: true},
	"CUDA_LIB": {to: lib, arch: true, path: true}, "CUDA_SYMLINK": {to: lib, arch: true, path: true, link: true},
	"OPENCL_LIB":         {to: lib, arch: true, path: true},
	"OPENCL_LIB_SYMLINK": {to: lib, arch: true, path: true, link: true},
	"OPENCL_WRAPPER_LIB": {to: lib, arch: true, path: true},
	"OPENCL_WRAPPER_SYMLINK": {
		to: lib, arch: true, path: true, link: true},
	"UTILITY_LIB": {to: lib, arch: true}, "UTILITY_LIB_SYMLINK": {to: lib, arch: true, link: true},
	"VDPAU_LIB": {to: lib, arch: true, path: true}, "VDPAU_SYMLINK": {to: lib, arch: true, path: true, link: true},
	"NVCUVID_LIB": {to: lib, arch: true}, "NVCUVID_LIB_SYMLINK": {to: lib, arch: true, link: true},
	"ENCODEAPI_LIB": {to: lib, arch: true}, "ENCODEAPI_LIB_SYMLINK": {to: lib, arch: true, link: true},
	"NVIFR_LIB": {to: lib, arch: true}, "NVIFR_LIB_SYMLINK": {to: lib, arch: true, link: true},
	"GBM_BACKEND_LIB":         {to: lib + "/gbm", arch: true},
	"GBM_BACKEND_LIB_SYMLINK": {to: lib + "/gbm", arch: true, link: true},
	"WINE_LIB":                {to: lib + "/nvidia/wine", arch: true},
	"VGX_LIB":                 {to: lib}, "VGX_LIB_SYMLINK": {to: lib, link: true},
	"GRID_LIB": {to: lib, path: true}, "GRID_LIB_SYMLINK": {to: lib, path: true, link: true},
	"FLEXERA_LIB": {to: lib, path: true}, "FLEXERA_LIB_SYMLINK": {to: lib, path: true, link: true},

	"UTILITY_BINARY": {to: "usr/bin"}, "UTILITY_BIN_SYMLINK": {to: "usr/bin", link: true},
	"NVIDIA_MODPROBE": {to: atPath, path: true}, "EXPLICIT_PATH": {to: atPath, path: true},
	"OPENGL_DATA":             {to: atPath, path: true},
	"INTERNAL_UTILITY_BINARY": {to: private, arch: true}, "INTERNAL_UTILITY_LIB": {to: private, arch: true},
	"INTERNAL_UTILITY_DATA": {to: private},
	"FIRMWARE":              {to: "lib/firmware/nvidia", depth: true},

	"CUDA_ICD":                   {to: "etc/OpenCL/vendors"},
	"VULKAN_ICD_JSON":            {to: "etc/vulkan", path: true},
	"VULKANSC_ICD_JSON":          {to: "etc/vulkansc", path: true},
	"GLVND_EGL_ICD_JSON":         {to: "usr/share/glvnd/egl_vendor.d"},
	"EGL_EXTERNAL_PLATFORM_JSON": {to: "usr/share/egl/egl_external_platform.d"},
	"SANDBOXUTILS_FILELIST_JSON": {to: "usr/share/nvidia/files.d", path: true},
	"APPLICATION_PROFILE":        {to: "usr/share/nvidia", path: true},
	"XMODULE_SHARED_LIB":         {to: xorg, path: true},
	"GLX_MODULE_SHARED_LIB":      {to: xorg, path: true}, "GLX_MODULE_SYMLINK": {to: xorg, path: true, link: true},
	"XORG_OUTPUTCLASS_CONFIG": {to: "usr/share/X11/xorg.conf.d"},

	// Only the licence of the documentation is in the folder: see layOut.
	"DOCUMENTATION": {to: "usr/share/doc", path: true},

	// Sources of modules, the installer itself, files for a desktop or systemd, and files for building
	// programs.
	"KERNEL_MODULE_SRC": {depth: true}, "KERNEL_MODULE": {}, "DKMS_CONF": {depth: true}, "MODULE_SIGNING_KEY": {},
	"INSTALLER_BINARY": {}, "MANPAGE": {path: true}, "NVIDIA_MODPROBE_MANPAGE": {path: true},
	"DOT_DESKTOP": {path: true}, "ICON": {path: true},
	"SYSTEMD_UNIT": {}, "SYSTEMD_UNIT_SYMLINK": {path: true}, "SYSTEMD_SLEEP_SCRIPT": {},
	"LIBGL_LA": {arch: true}, "OPENGL_HEADER": {path: true}, "XMODULE_SYMLINK": {path: true},
	"XMODULE_NEWSYM": {path: true},
}

// libraryFolders are the folders of the libraries, by the architecture.
var libraryFolders = map[string]string{"amd64": "usr/lib/x86_64-linux-gnu", "arm64": "usr/lib/aarch64-linux-gnu"}

// headLines is the number of lines of .manifest before the first file.
const headLines = 8

// layOut returns the files of a driver and their places, by the .manifest of NVIDIA's installer, and the
// number of its 32-bit files, which have no place. An unknown type of file and a manifest of another
// version are errors.
func layOut(manifest []byte, version, architecture string) (all []entry, compat32 int, err error) {
	lines := bufio.NewScanner(bytes.NewReader(manifest))
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		switch {
		case n == 2 && line != version:
			return nil, 0, fmt.Errorf(".manifest is of the driver %.40q, and the .run file of %s", line, version)
		case n <= headLines:
			continue
		case line == "":
			return all, compat32, nil
		}
		e, err := place(strings.Fields(line), version, architecture)
		if err != nil {
			return nil, 0, fmt.Errorf(".manifest, line %d: %w", n, err)
		}
		if e.isCompat32 {
			compat32++
		}
		if e.to != "" {
			all = append(all, e)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, 0, fmt.Errorf(".manifest: %w", err)
	}
	return all, compat32, nil
}

// place returns the entry of a line. The entry has an empty to if the file is left out.
func place(fields []string, version, architecture string) (entry, error) {
	next := func() string {
		if len(fields) == 0 {
			return ""
		}
		field := fields[0]
		fields = fields[1:]
		return field
	}
	file, mode, kind := next(), next(), next()
	permissions, err := strconv.ParseUint(mode, 8, 12)
	if err != nil {
		return entry{}, fmt.Errorf("the mode of %.200q is not an octal number: %.20q", file, mode)
	}
	r, known := rules[kind]
	if !known {
		return entry{}, fmt.Errorf("%.200q has the type %.60q, and the place of this type is unknown: "+
			"a newer version of this program may know it", file, kind)
	}
	file, err = inside(file)
	if err != nil {
		return entry{}, err
	}
	if r.arch {
		switch arch := next(); arch {
		case "NATIVE":
		case "COMPAT32":
			return entry{isCompat32: !r.link}, nil
		default:
			return entry{}, fmt.Errorf("%s is neither NATIVE nor COMPAT32, but %.40q", file, arch)
		}
	}
	name := path.Base(file)
	if r.to == leave || kind == "DOCUMENTATION" && name != "LICENSE" {
		return entry{}, nil
	}
	below := ""
	switch {
	case r.path:
		below = next()
	case r.depth:
		below, err = withoutFolders(path.Dir(file), next())
		if err != nil {
			return entry{}, fmt.Errorf("%s: %w", file, err)
		}
	}
	to := strings.Replace(r.to, lib, libraryFolders[architecture], 1)
	if kind == "FIRMWARE" {
		to = path.Join(to, version)
	}
	e := entry{
		from: file, to: strings.TrimPrefix(path.Join(to, below, name), "/"), mode: fs.FileMode(permissions) & 0o755,
	}
	if strings.Contains("/"+below+"/", "/../") || !isPlace(e.to) {
		return entry{}, fmt.Errorf("%s should be placed at %.200q, where no file of a driver belongs", file, e.to)
	}
	if r.link {
		e.from, e.mode, e.link = "", 0, next()
		if kind == "GBM_BACKEND_LIB_SYMLINK" {
			e.link = "../" + e.link // the line has the name of a library
		}
		if kind == "UTILITY_BIN_SYMLINK" && e.link == "nvidia-installer" {
			return entry{}, nil
		}
		if e.link == "" || path.IsAbs(e.link) || strings.HasPrefix(e.link, "MODULE:") {
			return entry{}, fmt.Errorf("the link %s has no target in the folder", file)
		}
	}
	return e, nil
}

// withoutFolders returns a path without as many folders as a field such as INHERIT_PATH_DEPTH:1 says.
func withoutFolders(folder, field string) (string, error) {
	depth, err := strconv.Atoi(strings.TrimPrefix(field, "INHERIT_PATH_DEPTH:"))
	parts := strings.Split(folder, "/")
	if err != nil || depth < 0 || depth > len(parts) {
		return "", fmt.Errorf("%.60q does not tell how many folders of the path to leave out", field)
	}
	return path.Join(parts[depth:]...), nil
}

// isPlace reports whether a driver has files at a path below its folder.
func isPlace(to string) bool {
	top, _, below := strings.Cut(to, "/")
	return fs.ValidPath(to) && below && (top == "usr" || top == "etc" || strings.HasPrefix(to, "lib/firmware/nvidia/"))
}
