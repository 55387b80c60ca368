// Package driverroot knows the layout of an NVIDIA driver below the driver root, the mount point of
// the root of the driver's installation: folders, links, and the names of libraries and programs.
// The functions take file systems whose "/" is the driver root.
package driverroot

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
	"syscall"
)

// NVML is the soname of the driver's management library.
const NVML = "libnvidia-ml.so.1"

// LibraryFolders returns the folders to search for the driver's libraries: first the folders of the
// operator, then the folders used by distributions and installers, the likeliest first. The folders
// of WSL are missing, because the libraries of WSL need another device node in containers.
func LibraryFolders(searchPath ...string) []string {
	return append(slices.Clone(searchPath),
		"usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "lib64",
		"usr/lib/x86_64-linux-gnu/nvidia/current",
		"usr/lib/aarch64-linux-gnu/nvidia/current", "usr/lib", "lib", "usr/local/nvidia/lib64", "lib/x86_64-linux-gnu",
		"lib/aarch64-linux-gnu", "usr/lib64/nvidia", "usr/lib/nvidia", "usr/local/nvidia/lib", "usr/local/lib64",
		"usr/local/lib/x86_64-linux-gnu", "usr/local/lib/aarch64-linux-gnu", "usr/local/lib",
		"usr/local/glibc/usr/lib",            // Talos, which has another C library itself
		"run/opengl-driver/lib",              // NixOS
		"home/kubernetes/bin/nvidia/lib64",   // GKE's installer on Container-Optimized OS
		"usr/lib/nvidia/tesla",               // Bottlerocket
		"opt/nvidia/current/lib64",           // Flatcar
		"opt/nvidia/current/usr/lib64",       // Amazon Linux with several drivers
		"opt/nvidia/lib64", "opt/nvidia/lib", // installers with a prefix
	)
}

// ProgramFolders returns the folders to search for the driver's programs, the likeliest first.
func ProgramFolders() []string {
	return []string{
		"usr/bin", "bin", "usr/local/nvidia/bin", "usr/sbin", "sbin", "usr/lib/nvidia/current", "opt/bin",
		"usr/local/bin", "run/current-system/sw/bin", "home/kubernetes/bin/nvidia/bin", "usr/libexec/nvidia/tesla/bin",
		"opt/nvidia/current/bin",
		"opt/nvidia/current/usr/bin",
	}
}

// IsWSL reports whether a node is Windows' subsystem for Linux, given the root folder of the node:
// the GPU is a device of Windows behind /dev/dxg.
func IsWSL(node fs.FS) bool {
	if _, err := fs.Lstat(node, "dev/dxg"); err == nil {
		return true
	}
	const name = "proc/sys/kernel/osrelease"
	if info, err := fs.Stat(node, name); err != nil || !info.Mode().IsRegular() { // opening a pipe may block forever
		return false
	}
	file, err := node.Open(name)
	if err != nil {
		return false
	}
	defer file.Close()
	text, _ := io.ReadAll(io.LimitReader(file, 256)) // the bytes read so far are enough
	return bytes.Contains(text, []byte("WSL")) || bytes.Contains(text, []byte("microsoft-standard"))
}

// maxLinks is how many symbolic links a path may lead through, as in the kernel.
const maxLinks = 40

// Resolve follows a path below root as a process with the root directory root would: absolute links
// lead inside root, and no link leads out of root. It returns the path without symbolic links.
// absolute is true if a link on the way was absolute, such as the links of Debian's alternatives:
// outside the driver's own root, such a path leads elsewhere.
func Resolve(root fs.FS, name string) (resolved string, absolute bool, err error) {
	links := 0
	for rest := name; rest != ""; {
		var part string
		switch part, rest, _ = strings.Cut(rest, "/"); part {
		case "", ".":
			continue
		case "..":
			if resolved = path.Dir(resolved); resolved == "." {
				resolved = ""
			}
			continue
		}
		next := path.Join(resolved, part)
		info, err := fs.Lstat(root, next)
		if err != nil {
			return "", false, err
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			resolved = next
			continue
		}
		if links++; links > maxLinks {
			return "", false, syscall.ELOOP
		}
		target, err := fs.ReadLink(root, next)
		if err != nil {
			return "", false, err
		}
		if path.IsAbs(target) {
			resolved, absolute = "", true
		}
		rest = target + "/" + rest
	}
	return resolved, absolute, nil
}

// unreadable reports whether an error means that a file could not be read, rather than that the
// file does not exist.
func unreadable(err error) bool {
	return slices.ContainsFunc([]error{syscall.EIO, syscall.ENOTCONN, syscall.ESTALE, syscall.ETIMEDOUT, syscall.EMFILE,
		syscall.ENFILE},
		func(e error) bool { return errors.Is(err, e) })
}
