package nvidia

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/driverroot"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// Options say where the driver is.
type Options struct {
	// DriverRoot is the folder of this container at which the root of the driver's installation is mounted; empty for
	// "/". The library is looked for below it at every Open: a driver may arrive late.
	DriverRoot string
	// Library is used in place of the machine's library, for simulated nodes; nil for the machine's.
	Library nvml.Interface
	// Root is the filesystem with the machine's /sys at "sys" and /proc at "proc"; nil for this process's own.
	Root fs.FS
	// Metrics counts each call into the driver; nil counts nothing.
	Metrics Metrics
}

// A Driver opens sessions with the NVIDIA driver, one at a time. Its methods may be called from several goroutines.
type Driver struct {
	options Options
	// calls makes all calls but the waits for events. Both outlive a Session: however often sessions are opened, no more than one
	// call about each GPU, one about none and one wait hang.
	calls, events *worker
	// node and waits are the records of calls that are about no GPU, and of waits for events.
	node, waits *callRecord

	// The rest is used by the goroutine that has the turn of calls.

	open   bool
	loaded *library // what the process is bound to; nil until a library was loaded
	late   *Session // was opened when nobody waited for it any more; the next Open returns it
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

// Open starts a session: it initialises NVML, registers for the events of every GPU and looks at it for the first time, so that
// what happens after Open is either seen by Scan or reported by Next. GPUs whose calls hang are left out.
//
// The error wraps inventory.ErrNoDriver when there is no driver yet, inventory.ErrDriverReplaced when only a new
// process can talk to it, and inventory.ErrNoAnswer when a call about no GPU did not return in time: where such a session comes
// late, the next Open returns it. To open a second session while one is open is an error.
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

// Calls returns the calls into the driver that were waited for in vain and have not returned, the oldest first. Each keeps a
// thread.
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
	d.loaded = lib
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

// library returns the library to use now. Once one was loaded it can only be that one: the process is bound to it.
func (d *Driver) library() (*library, error) {
	if d.options.Library != nil {
		return &library{Interface: d.options.Library}, nil
	}
	found, err := findLibrary(d.options.DriverRoot)
	switch {
	case err != nil:
		return nil, err
	case d.loaded == nil:
		return found, nil
	case found.path == "" && d.loaded.path != "":
		return nil, fmt.Errorf("%w: its library %s was removed: install the driver", inventory.ErrNoDriver, d.loaded.path)
	case !found.same(d.loaded):
		return nil, fmt.Errorf("%w: its library was %s and is %s now: start this program again",
			inventory.ErrDriverReplaced, d.loaded, found)
	}
	return d.loaded, nil
}

// replaced returns inventory.ErrDriverReplaced once another library is installed than is loaded: containers get the installed one. While
// the file is missing or not whole, it is being replaced, and the loaded library works.
func (d *Driver) replaced() error {
	if d.loaded.path == "" {
		return nil
	}
	if _, err := d.library(); errors.Is(err, inventory.ErrDriverReplaced) {
		return err
	}
	return nil
}

// unloadable says why a library could not be loaded, and what to do about it.
func (d *Driver) unloadable(lib *library) string {
	if lib.path != "" {
		return fmt.Sprintf("%s cannot be loaded: ldd names what it lacks", lib.path)
	}
	root := cmp.Or(d.options.DriverRoot, "/")
	return fmt.Sprintf("%s is neither below the driver root %s nor where the loader looks: install the driver, or give "+
		"the folder at which its root is mounted as the driver root", driverroot.NVML, root)
}

// initFailure says why NVML cannot be initialised, and what to do about it.
func initFailure(ret nvml.Return) error {
	err := failure("nvmlInit", ret)
	switch ret {
	case nvml.ERROR_DRIVER_NOT_LOADED:
		return fmt.Errorf("%w: the kernel module is not loaded (modprobe nvidia; the kernel log says why not), "+
			"or this container has no /dev/nvidiactl", err)
	case nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return fmt.Errorf("%w: the kernel module is of another version than the library: finish the driver's upgrade "+
			"(unload the old module or restart the node), then start this program again", err)
	case nvml.ERROR_NO_PERMISSION:
		return fmt.Errorf("%w: run this container privileged", err)
	}
	return err
}
