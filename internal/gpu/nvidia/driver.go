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
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Options say where the driver is.
type Options struct {
	// DriverRoot is the folder of this container at which the root of the driver's installation is
	// mounted; empty for "/". The library is looked for below it at every Open: a driver may arrive
	// late.
	DriverRoot string
	// SearchPath are folders below the driver root in which libraries are looked for before others.
	SearchPath []string
	// Library is used in place of the machine's library, for simulated nodes; nil for the machine's.
	Library nvml.Interface
	// Root is the filesystem with the machine's /sys at "sys" and /proc at "proc"; nil for this
	// process's own.
	Root fs.FS
	// Metrics counts each call into the driver; nil counts nothing.
	Metrics Metrics
}

// A Driver opens sessions with the NVIDIA driver, one at a time. Its methods may be called from
// several goroutines.
type Driver struct {
	options Options
	// calls makes all calls but the waits for events. Both outlive a Session: however often sessions
	// are opened, no more than one call about each GPU, one about none and one wait hang.
	calls, events *worker
	// node and waits are the records of calls that are about no GPU, and of waits for events.
	node, waits *callRecord

	// The rest is used by the goroutine that has the turn of calls.

	open    bool
	loaded  *library // what the process is bound to; nil until a library was loaded
	version string   // of the driver, as the last session began
	late    *Session // was opened when nobody waited for it any more; the next Open returns it
}

// New returns the driver. It touches nothing. There can be only one Driver for a library.
func New(o Options) *Driver {
	if o.Root == nil {
		o.Root = os.DirFS("/")
	}
	d := &Driver{options: o, calls: newWorker(), events: newWorker()}
	d.node, d.waits = d.record(inventory.NoGPU), d.record(inventory.NoGPU)
	return d
}

// record returns a new record of calls that are about a GPU, or about none.
func (d *Driver) record(gpu int) *callRecord {
	return &callRecord{gpu: gpu, count: d.options.Metrics}
}

// Open starts a session: it initialises NVML, registers for the events of every GPU and looks at it
// for the first time, so that what happens after Open is either seen by Scan or reported by Next.
// GPUs whose calls hang are left out.
//
// The error wraps inventory.ErrNoDriver when there is no driver yet, inventory.ErrDriverReplaced
// when only a new process can talk to it, and inventory.ErrNoAnswer when a call about no GPU did
// not return in time: where such a session comes late, the next Open returns it. To open a second
// session while one is open is an error.
func (d *Driver) Open(ctx context.Context) (_ *Session, err error) {
	defer func() { err = wrap(err, "open an NVML session") }()
	if err := d.calls.take(ctx); err != nil {
		return nil, err
	}
	defer d.calls.release()
	var s *Session
	var failed error // a job that is given up writes it later
	start := func() { s, failed = d.start() }
	adopt := func() {
		if failed == nil {
			d.late = s
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

// pinned reports whether the session cannot be closed now, because a call hangs.
func (d *Driver) pinned() bool { return len(d.calls.hanging()) > 0 }

// Calls returns the calls into the driver that were waited for in vain and have not returned, the
// oldest first. Each keeps a thread.
func (d *Driver) Calls() []inventory.Call {
	calls := slices.Concat(d.calls.hanging(), d.events.hanging())
	slices.SortFunc(calls, func(a, b inventory.Call) int { return a.Since.Compare(b.Since) })
	return calls
}

// start begins a session, in a job.
func (d *Driver) start() (*Session, error) {
	if s := d.late; s != nil {
		d.late = nil
		return s, nil
	}
	if d.open {
		return nil, errors.New("one is open already, and there can only be one at a time")
	}
	lib, err := d.library()
	if err != nil {
		return nil, err
	}
	if err := lib.lookUp(); err != nil {
		return nil, err
	}
	bound := boundGPUs(d.options.Root) // first: a GPU that comes now is rather seen by Scan than by nobody
	d.node.begin("nvmlInit")
	ret := lib.Init()
	d.node.end(ret)
	if ret == nvml.ERROR_LIBRARY_NOT_FOUND {
		return nil, fmt.Errorf("%w: %s", inventory.ErrNoDriver, d.unloadable(lib))
	}
	before := d.loaded
	d.loaded = lib
	if ret == nvml.ERROR_LIB_RM_VERSION_MISMATCH {
		return nil, fmt.Errorf("nvmlInit: %w", d.mismatch(cmp.Or(before, lib)))
	}
	if ret != nvml.SUCCESS {
		return nil, initFailure(ret)
	}
	d.open = true
	s := newSession(d, newAPI(lib, lib.has, d.node))
	if err := s.start(bound); err != nil {
		return nil, errors.Join(err, s.stop())
	}
	return s, nil
}

// installed is what a simulated library says of the files of its driver.
type installed interface {
	// Installed returns the version of the files that a process which starts now loads.
	Installed() string
}

// found returns the library that is installed now, loaded or not.
func (d *Driver) found() (*library, error) {
	if d.options.Library == nil {
		return findLibrary(d.options.DriverRoot, d.options.SearchPath)
	}
	found := &library{Interface: d.options.Library}
	if files, tells := d.options.Library.(installed); tells {
		found.version = files.Installed()
	}
	return found, nil
}

// library returns the library to use now. Once one was loaded it can only be that one: the process
// is bound to it.
func (d *Driver) library() (*library, error) {
	found, err := d.found()
	switch {
	case err != nil:
		return nil, err
	case d.loaded == nil:
		return found, nil
	case found.path == "" && d.loaded.path != "":
		return nil, fmt.Errorf("%w: its library %s was removed: install the driver", inventory.ErrNoDriver, d.loaded.path)
	case !found.same(d.loaded) && !d.loaded.there():
		return nil, d.replaced(found)
	}
	return d.loaded, nil
}

// onDisk returns the version of the driver's files where that is not the version of the open
// session; empty if it is, or is not known. While a file is missing or not whole, it is being
// replaced.
func (d *Driver) onDisk() string {
	found, err := d.found()
	if err != nil || found.version == d.version || found.same(d.loaded) {
		return ""
	}
	return found.version
}

// replaced returns the error of a library in whose place there is another one now: a new process
// can use that, unless the kernel module is still the one of this process.
func (d *Driver) replaced(found *library) error {
	module := d.module()
	if found.version != "" && module != "" && module == d.version && module != found.version {
		return misfit(found.version, module)
	}
	return fmt.Errorf("%w: its library was %s and is %s now: start this program again",
		inventory.ErrDriverReplaced, d.loaded, found)
}

// mismatch returns the error of a library that the kernel module refused because of its version.
func (d *Driver) mismatch(lib *library) error {
	found, err := d.found()
	if err == nil && !found.same(lib) {
		return d.replaced(found)
	}
	return misfit(lib.version, d.module())
}

// misfit says that the driver's files and the kernel module are of different versions, and what to
// do. Versions may be empty.
func misfit(library, module string) error {
	switch driver := (inventory.Driver{Version: module, OnDisk: library}); {
	case library == "" || module == "" || library == module:
		return fmt.Errorf("%w: the kernel module is of another version than the library: restart the node",
			inventory.ErrDriverMismatch)
	case (inventory.Driver{Version: library}).Before(module):
		return fmt.Errorf("%w: driver %s in this container, %s loaded: start the pod again; if that does not help, restart the node",
			inventory.ErrOldLibrary, library, module)
	default:
		return fmt.Errorf("%w: %s", inventory.ErrDriverMismatch, driver.Mismatch())
	}
}

// module returns the version of the kernel module that is loaded; empty if it cannot be read.
func (d *Driver) module() string {
	text, err := fs.ReadFile(d.options.Root, "sys/module/nvidia/version")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// unloadable says why a library could not be loaded, and what to do about it.
func (d *Driver) unloadable(lib *library) string {
	if lib.path != "" {
		return fmt.Sprintf("%s cannot be loaded: ldd names what it lacks", lib.path)
	}
	root := cmp.Or(d.options.DriverRoot, "/")
	said := fmt.Sprintf("%s is neither below the driver root %s nor where the loader looks: ", driverroot.NVML, root)
	if driverroot.IsWSL(d.options.Root) {
		return said + "this is WSL, whose GPU is behind /dev/dxg, and this program does not offer it"
	}
	return said + "install the driver, set --driver-root-ctr-path to the folder at which its root is mounted, or --library-search-path to " +
		"the folder with its libraries"
}

// initFailure says why NVML cannot be initialised, and what to do about it.
func initFailure(ret nvml.Return) error {
	err := failure("nvmlInit", ret)
	switch ret {
	case nvml.ERROR_DRIVER_NOT_LOADED:
		return fmt.Errorf("%w: the kernel module is not loaded (modprobe nvidia; the kernel log says why not), "+
			"or this container has no /dev/nvidiactl", err)
	case nvml.ERROR_NO_PERMISSION:
		return fmt.Errorf("%w: run this container privileged", err)
	}
	return err
}
