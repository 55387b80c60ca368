// Package driverkernel loads the NVIDIA driver of a driver folder into the kernel of a node, and
// unloads it. Only gpu-driver links the package.
package driverkernel

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfacts"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/preflight"
)

// Calls are the calls that change the node. Tests replace them.
type Calls interface {
	// Load loads a module from an open file (finit_module(2)). The error is that of the kernel.
	Load(module *os.File, parameters string) error
	// Unload unloads a module that nobody uses (delete_module(2)). The error is that of the kernel.
	Unload(name string) error
	// MakeNode creates a character device, whatever the umask.
	MakeNode(path string, mode uint32, device uint64) error
	// Run runs a program of the node, such as systemctl, in the node's root.
	Run(ctx context.Context, program string, arguments ...string) error
}

// A Kernel is the kernel of a node.
type Kernel struct {
	// Root is where the node's root file system is, with /proc, /sys and /dev.
	Root string
	// RootFS is the file system of Files; nil for that of Root.
	RootFS fs.FS
	Calls  Calls
	// Parameters are the parameters of modules, by the name of the module, as modprobe takes them.
	Parameters map[string]string
}

// Release returns the release of the running kernel.
func (k *Kernel) Release() (string, error) { return k.line("proc/sys/kernel/osrelease") }

// BootID returns the ID of this boot of the kernel.
func (k *Kernel) BootID() (string, error) { return k.line("proc/sys/kernel/random/boot_id") }

func (k *Kernel) line(name string) (string, error) {
	text, err := os.ReadFile(filepath.Join(k.Root, name))
	if err == nil && strings.TrimSpace(string(text)) == "" {
		err = errors.New("/" + name + " is empty")
	}
	return strings.TrimSpace(string(text)), err
}

// Files returns the node's root file system.
func (k *Kernel) Files() fs.FS {
	if k.RootFS != nil {
		return k.RootFS
	}
	return os.DirFS(k.Root)
}

// State is what the kernel has loaded.
type State struct {
	Version string // of the driver; empty if none is loaded
	// Own are the modules of the driver, in the order in which they can be unloaded.
	Own []preflight.LoadedModule
	// Nouveau is true if the module nouveau is loaded.
	Nouveau bool
}

// IsUsed reports whether something uses the driver: a process, a screen, or a module that does not
// belong to the driver.
func (s State) IsUsed() bool {
	return slices.ContainsFunc(s.Own, func(m preflight.LoadedModule) bool {
		return m.References > len(m.Users) ||
			slices.ContainsFunc(m.Users, func(user string) bool { return !preflight.IsOwnModule(user) })
	})
}

// State returns what is loaded.
func (k *Kernel) State() (State, error) {
	modules, version, err := driverfacts.Loaded(k.Files())
	if err != nil {
		return State{}, err
	}
	s := State{Version: version}
	var own []preflight.LoadedModule
	for _, m := range modules {
		s.Nouveau = s.Nouveau || m.Name == "nouveau"
		if preflight.IsOwnModule(m.Name) {
			own = append(own, m)
		}
	}
	if len(own) == 0 {
		s.Version = "" // the files of the last driver may remain for a moment
	}
	for len(own) > 0 { // a module goes before those that it uses
		i := slices.IndexFunc(own, func(m preflight.LoadedModule) bool {
			return !slices.ContainsFunc(m.Users, func(user string) bool {
				return slices.ContainsFunc(own, func(o preflight.LoadedModule) bool { return o.Name == user })
			})
		})
		i = max(i, 0) // in a circle, which the kernel does not build, any
		s.Own = append(s.Own, own[i])
		own = slices.Delete(own, i, i+1)
	}
	return s, nil
}

// ErrInUse is returned by Unload if something uses a module.
var ErrInUse = errors.New("the driver is in use")

// Unload unloads the modules of the driver. After ErrInUse, some of them may be unloaded. progress is
// called before each module, with the number of modules before it.
func (k *Kernel) Unload(progress func(done, all int)) error {
	s, err := k.State()
	if err != nil {
		return err
	}
	for i, m := range s.Own {
		progress(i, len(s.Own))
		switch err := k.Calls.Unload(m.Name); {
		case err == nil, errors.Is(err, unix.ENOENT):
		case errors.Is(err, unix.EWOULDBLOCK), errors.Is(err, unix.EBUSY):
			return ErrInUse
		default:
			return explainUnload(m.Name, err)
		}
	}
	return nil
}

// explainUnload returns the sentence for a refusal of the kernel to unload a module.
func explainUnload(name string, err error) error {
	switch {
	case errors.Is(err, unix.EPERM):
		return &refusal{"the kernel does not let this program unload " + name + ": run gpu-driver as root, in a " +
			"privileged container with hostPID", err}
	case errors.Is(err, unix.ENOSYS):
		return &refusal{"the kernel cannot unload modules: it was built without CONFIG_MODULE_UNLOAD, so only a " +
			"restart of the node changes the driver", err}
	}
	return &refusal{"the kernel does not unload " + name, err}
}

// A refusal is an error of the kernel with a sentence.
type refusal struct {
	sentence string
	err      error
}

func (r *refusal) Error() string { return r.sentence + " (" + r.err.Error() + ")" }
func (r *refusal) Unwrap() error { return r.err }
