package nvidia

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/driverroot"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Options say where the driver is installed.
type Options struct {
	// DriverRoot is the directory of this container with the mounted root of the driver's
	// installation; empty for "/". Every Open searches it for the library, because a driver may be
	// installed late.
	DriverRoot string
	// SearchPath are directories below the driver root to search first for libraries.
	SearchPath []string
	// Library replaces the machine's library on simulated nodes; nil for the machine's library.
	Library nvml.Interface
	// Root is the file system with the machine's /sys at "sys" and /proc at "proc"; nil for the
	// file system of this process.
	Root fs.FS
	// Metrics counts each call into the driver; nil counts nothing.
	Metrics Metrics
}

// A Driver opens sessions with the NVIDIA driver, one at a time. It is safe for concurrent use.
type Driver struct {
	options Options
	// calls makes all calls except waits for events. Both workers outlive a Session: however many
	// sessions are opened, at most one call about each GPU, one about no GPU and one wait hang.
	calls, events *worker
	// node records calls about no GPU, and waits records waits for events.
	node, waits *callRecord

	// The fields below belong to the goroutine with the worker calls.

	open         bool
	boundLibrary *library // the library of the process; nil until one was loaded
	version      string   // driver version at the start of the last session
	lateSession  *Session // a session that opened too late for the caller; the next Open returns it
}

// New returns the driver. It does no I/O. There can be only one Driver for a library.
func New(o Options) *Driver {
	if o.Root == nil {
		o.Root = os.DirFS("/")
	}
	d := &Driver{options: o, calls: newWorker(), events: newWorker()}
	d.node, d.waits = d.record(inventory.NoGPU), d.record(inventory.NoGPU)
	return d
}

// record returns a new record of calls about a GPU, or about none.
func (d *Driver) record(gpu int) *callRecord {
	return &callRecord{gpu: gpu, count: d.options.Metrics}
}

// Open starts a session. It initialises NVML, registers for the events of every GPU, and visits
// every GPU once: Scan shows, or Next reports, any later change. GPUs with hanging calls are left
// out.
//
// The error wraps inventory.ErrNoDriver if there is no driver yet, inventory.ErrDriverReplaced if
// only a new process can talk to the driver, and inventory.ErrNoAnswer if a call about no GPU did
// not return in time. The next Open returns a session that opens after such an error. Open fails
// while another session is open.
func (d *Driver) Open(ctx context.Context) (_ *Session, err error) {
	defer func() { err = wrap(err, "open an NVML session") }()
	if err := d.calls.take(ctx); err != nil {
		return nil, err
	}
	defer d.calls.release()
	var s *Session
	var failed error // local: an abandoned job may write it later
	start := func() { s, failed = d.start() }
	adopt := func() {
		if failed == nil {
			d.lateSession = s
		}
	}
	if err := d.calls.job(ctx, d.node, openPatience, start, adopt); err != nil {
		return nil, err
	}
	if failed != nil {
		return nil, failed
	}
	s.firstVisits(ctx)
	return s, nil
}

// isPinned reports whether a hanging call keeps the session from being closed.
func (d *Driver) isPinned() bool { return len(d.calls.hangingCalls()) > 0 }

// Calls returns the abandoned calls into the driver that have not returned, oldest first. Each of
// them occupies a thread.
func (d *Driver) Calls() []inventory.Call {
	calls := slices.Concat(d.calls.hangingCalls(), d.events.hangingCalls())
	order.Sort(calls, func(a, b inventory.Call) int { return a.Since.Compare(b.Since) })
	return calls
}

// start opens a session, in a job.
func (d *Driver) start() (*Session, error) {
	if s := d.lateSession; s != nil {
		d.lateSession = nil
		return s, nil
	}
	if d.open {
		return nil, errors.New("a session is already open, and there can be only one")
	}
	lib, err := d.library()
	if err != nil {
		return nil, err
	}
	if err := lib.lookUp(); err != nil {
		return nil, err
	}
	bound := boundGPUs(d.options.Root) // before the library: Scan then sees a GPU that appears meanwhile
	d.node.begin("nvmlInit")
	ret := lib.Init()
	d.node.end(ret)
	if ret == nvml.ERROR_LIBRARY_NOT_FOUND {
		return nil, fmt.Errorf("%w: %s", inventory.ErrNoDriver, d.unloadable(lib))
	}
	before := d.boundLibrary
	d.boundLibrary = lib
	if ret == nvml.ERROR_LIB_RM_VERSION_MISMATCH {
		return nil, fmt.Errorf("nvmlInit: %w", d.mismatchError(cmp.Or(before, lib)))
	}
	if ret != nvml.SUCCESS {
		return nil, initFailure(ret)
	}
	d.open = true
	s := newSession(d, newAPI(lib, lib.has, d.node))
	if err := s.readFacts(bound); err != nil {
		return nil, errors.Join(err, s.stop())
	}
	return s, nil
}

// installedVersion is implemented by a simulated library with driver files.
type installedVersion interface {
	// Installed returns the version of the files for a new process.
	Installed() string
}

// installedLibrary returns the installed library, loaded or not.
func (d *Driver) installedLibrary() (*library, error) {
	if d.options.Library == nil {
		return findLibrary(d.options.DriverRoot, d.options.SearchPath)
	}
	found := &library{Interface: d.options.Library}
	if files, tells := d.options.Library.(installedVersion); tells {
		found.version = files.Installed()
	}
	return found, nil
}

// library returns the library to use: once loaded, always the same.
func (d *Driver) library() (*library, error) {
	found, err := d.installedLibrary()
	switch {
	case err != nil:
		return nil, err
	case d.boundLibrary == nil:
		return found, nil
	case found.path == "" && d.boundLibrary.path != "":
		return nil, fmt.Errorf("%w: the library %s was removed: install the driver", inventory.ErrNoDriver,
			d.boundLibrary.path)
	case !found.same(d.boundLibrary) && !d.boundLibrary.isLoadable():
		return nil, d.replacedError(found)
	}
	return d.boundLibrary, nil
}

// onDisk returns the version of the driver's files if it differs from the version of the open
// session; empty if the version is equal or unknown. A missing or incomplete file is being
// replaced.
func (d *Driver) onDisk() string {
	found, err := d.installedLibrary()
	if err != nil || found.version == d.version || found.same(d.boundLibrary) {
		return ""
	}
	return found.version
}

// replacedError returns the error for a library replaced by found. A new process can use found,
// unless the kernel module is still that of this process.
func (d *Driver) replacedError(found *library) error {
	module := d.module()
	if found.version != "" && module != "" && module == d.version && module != found.version {
		return versionMismatch(found.version, module)
	}
	return fmt.Errorf("%w: the library was %s and is now %s: restart this program",
		inventory.ErrDriverReplaced, d.boundLibrary, found)
}

// mismatchError returns the error for a library refused by the kernel module because of its
// version.
func (d *Driver) mismatchError(lib *library) error {
	found, err := d.installedLibrary()
	if err == nil && !found.same(lib) {
		return d.replacedError(found)
	}
	return versionMismatch(lib.version, d.module())
}

// versionMismatch reports different versions of the driver's files and the kernel module, with the
// remedy. Versions may be empty.
func versionMismatch(library, module string) error {
	switch driver := (inventory.Driver{Version: module, OnDisk: library}); {
	case library == "" || module == "" || library == module:
		return fmt.Errorf("%w: the versions of the kernel module and the library differ: restart the node",
			inventory.ErrDriverMismatch)
	case (inventory.Driver{Version: library}).Before(module):
		return fmt.Errorf("%w: driver %s in this container, %s loaded: restart the pod; if this does not help, "+
			"restart the node", inventory.ErrOldLibrary, library, module)
	default:
		return fmt.Errorf("%w: %s", inventory.ErrDriverMismatch, driver.Mismatch())
	}
}

// module returns the version of the loaded kernel module; empty if it cannot be read.
func (d *Driver) module() string {
	text, err := fs.ReadFile(d.options.Root, "sys/module/nvidia/version")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// unloadable says why a library could not be loaded, with the remedy.
func (d *Driver) unloadable(lib *library) string {
	if lib.path != "" {
		return fmt.Sprintf("%s cannot be loaded: run ldd to find missing libraries", lib.path)
	}
	root := cmp.Or(d.options.DriverRoot, "/")
	said := fmt.Sprintf("%s is neither below the driver root %s nor where the loader looks: ", driverroot.NVML, root)
	if driverroot.IsWSL(d.options.Root) {
		return said + "this is WSL, whose GPU is behind /dev/dxg, and this program does not offer it"
	}
	return said + "install the driver, set --driver-root-ctr-path to the directory where its root is mounted, or " +
		"--library-search-path to " +
		"the directory with its libraries"
}

// initFailure says why NVML cannot be initialised, with the remedy.
func initFailure(ret nvml.Return) error {
	err := failure("nvmlInit", ret)
	switch ret {
	case nvml.ERROR_DRIVER_NOT_LOADED:
		return fmt.Errorf("%w: the kernel module is not loaded (run modprobe nvidia, and see the kernel log), "+
			"or this container has no /dev/nvidiactl", err)
	case nvml.ERROR_NO_PERMISSION:
		return fmt.Errorf("%w: run this container privileged", err)
	}
	return err
}
