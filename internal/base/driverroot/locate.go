package driverroot

import (
	"cmp"
	"debug/elf"
	"os"
	"path/filepath"
	"runtime"
)

// Locate returns the path of a library of the driver, by soname. driverRoot is the folder of this
// container with the mounted root of the driver's installation; empty for "/". All symbolic links
// are resolved inside driverRoot. The folders of searchPath come first. The path is empty without a
// library for this machine: the loader may still find a library.
func Locate(driverRoot, library string, searchPath ...string) string {
	for _, folder := range LibraryFolders(searchPath...) {
		path, err := ResolveIn(driverRoot, filepath.Join(folder, library))
		if err == nil && loadable(path) {
			return path
		}
	}
	return ""
}

// ResolveIn returns the path for this process to a file below a driver root; an empty root is "/".
func ResolveIn(root, name string) (string, error) {
	root = cmp.Or(root, "/")
	resolved, _, err := Resolve(os.DirFS(root), name)
	return filepath.Join(root, resolved), err
}

// loadable reports whether the file is a library for the architecture of this program. Images
// committed from a running GPU container have empty files in place of the driver's libraries.
func loadable(path string) bool {
	if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() { // opening a pipe may block forever
		return false
	}
	f, err := elf.Open(path)
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }() // only read
	machine := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[runtime.GOARCH]
	return f.Type == elf.ET_DYN && f.Machine == machine
}
