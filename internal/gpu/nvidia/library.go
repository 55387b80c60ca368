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

// locate returns the path of NVML's library below a driver root; empty if there is none for this
// machine: the loader may still find one.
func locate(driverRoot string, searchPath []string) string {
	return driverroot.Locate(driverRoot, driverroot.NVML, searchPath...)
}

// A library is a library of the driver that was or can be loaded.
type library struct {
	nvml.Interface
	path    string          // "" for the loader's choice
	file    os.FileInfo     // of path
	machine bool            // and not simulated
	version string          // of the driver that it belongs to, as its name says; empty if it does not
	has     map[string]bool // the functions that it has; nil until they were looked up
}

// lookUp finds out, once, which functions the library has. A library that cannot be loaded is not
// an error here: Init reports it. The error wraps inventory.ErrNoDriver.
func (l *library) lookUp() (err error) {
	if l.has != nil {
		return nil
	}
	symbol := l.Extensions().LookupSymbol // of a simulated library: go-nvml's works only after Init
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

// irregular returns a path at which the loader may find something that has the library's name and
// is no regular file; "" if there is none. To open a pipe takes for ever, and the loader keeps a
// lock meanwhile without which the process gets no thread and does not end.
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

// findLibrary returns the library that is installed now. It does not load it. The error wraps
// inventory.ErrNoDriver where it must not be loaded.
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

// versionForm is that of a driver's version. The name of a library may end with a number that is
// none.
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

// there reports whether the library can still be loaded from its file.
func (l *library) there() bool {
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
