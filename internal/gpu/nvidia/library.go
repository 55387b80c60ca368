package nvidia

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/driverroot"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// locate returns the path of NVML's library below a driver root; empty without a library for this
// machine: the loader may still find a library.
func locate(driverRoot string, searchPath []string) string {
	return driverroot.Locate(driverRoot, driverroot.NVML, searchPath...)
}

// A library is a library of the driver, loaded or not.
type library struct {
	nvml.Interface
	path    string          // "" for the loader's choice
	file    os.FileInfo     // the file at path
	machine bool            // not simulated
	version string          // driver version from the file name; empty if the name has none
	has     map[string]bool // available functions; nil before lookUp
}

// lookUp looks up the functions of the library, once. A library that cannot be loaded is no error
// here, because Init reports it. The error wraps inventory.ErrNoDriver.
func (l *library) lookUp() (err error) {
	if l.has != nil {
		return nil
	}
	symbol := l.Extensions().LookupSymbol // a simulated library works before Init, go-nvml's only after it
	if l.machine {
		lib := dl.New(cmp.Or(l.path, driverroot.NVML), dl.RTLD_LAZY|dl.RTLD_GLOBAL)
		if lib.Open() != nil {
			return nil
		}
		defer func() { err = errors.Join(err, lib.Close()) }()
		symbol = lib.Lookup
	}
	l.has, err = lookUp(symbol)
	return err
}

// irregular returns a path where the loader may find a non-regular file with the library's name, or
// "". Opening a pipe blocks forever, and the loader holds a lock meanwhile: the process could
// neither start a thread nor end.
func irregular() string {
	folders := strings.Split(os.Getenv("LD_LIBRARY_PATH"), ":")
	for _, folder := range driverroot.LibraryFolders() {
		folders = append(folders, "/"+folder)
	}
	for _, folder := range folders {
		path := filepath.Join(folder, driverroot.NVML)
		if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() && !info.IsDir() {
			return path
		}
	}
	return ""
}

// findLibrary returns the installed library without loading it. The error wraps
// inventory.ErrNoDriver if the library must not be loaded.
func findLibrary(driverRoot string, searchPath []string) (*library, error) {
	path := locate(driverRoot, searchPath)
	if path == "" {
		if wrong := irregular(); wrong != "" {
			return nil, fmt.Errorf("%w: %s is not a regular file", inventory.ErrNoDriver, wrong)
		}
		return &library{Interface: nvml.New(), machine: true}, nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("look at the driver's library: %w", err)
	}
	version, _ := strings.CutPrefix(filepath.Base(path), strings.TrimSuffix(driverroot.NVML, "1"))
	if !versionForm().MatchString(version) {
		version = ""
	}
	return &library{Interface: nvml.New(nvml.WithLibraryPath(path)), path: path, file: info, machine: true,
		version: version}, nil
}

// versionForm matches a driver version. The name of a library may end with another number.
var versionForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^\d+(\.\d+)+$`) })

// same reports whether two libraries are the same file with the same content.
func (l *library) same(other *library) bool {
	if !l.machine {
		return l.version == other.version
	}
	if other.path == "" {
		return l.path == ""
	}
	return os.SameFile(l.file, other.file) && l.file.ModTime().Equal(other.file.ModTime())
}

// isLoadable reports whether the library's file is still loadable.
func (l *library) isLoadable() bool {
	if !l.machine {
		return true
	}
	info, err := os.Stat(l.path)
	return err == nil && l.same(&library{path: l.path, file: info, machine: true})
}

func (l *library) String() string {
	if !l.machine {
		return "that of driver " + l.version
	}
	if l.path == "" {
		return "the loader's " + driverroot.NVML
	}
	return fmt.Sprintf("%s of %s", l.path, l.file.ModTime().UTC().Format("2006-01-02 15:04:05"))
}
