package nvidia

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

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
}

// A Driver opens sessions with the NVIDIA driver, one at a time. Its methods may be called from several goroutines.
type Driver struct {
	options Options
	// calls makes all calls but those of events. Both outlive a Session: however often sessions are opened, no more than
	// one call of each kind hangs.
	calls, events *worker

	// The rest belongs to calls.

	open   bool
	loaded *library // what the process is bound to; nil until a library was loaded
}

// New returns the driver. It touches nothing. There can be only one Driver for a library.
func New(o Options) *Driver {
	if o.Root == nil {
		o.Root = os.DirFS("/")
	}
	return &Driver{options: o, calls: newWorker(), events: newWorker()}
}

// Open starts a session: it initialises NVML and registers for the events of every GPU, so that what happens after Open
// is either seen by Scan or reported by Next.
//
// The error wraps inventory.ErrNoDriver when there is no driver yet, inventory.ErrDriverReplaced when only a new
// process can talk to it, and inventory.ErrNoAnswer when it did not answer by the deadline of ctx. To open a second
// session while one is open is an error.
func (d *Driver) Open(ctx context.Context) (*Session, error) {
	var s *Session
	var err error
	start := func() { s, err = d.start() }
	undo := func() {
		if err == nil {
			_ = s.stop() // nobody is there to hear of it
		}
	}
	if noAnswer := d.calls.do(ctx, start, undo); noAnswer != nil {
		return nil, fmt.Errorf("open an NVML session: %w", noAnswer)
	}
	if err != nil {
		return nil, fmt.Errorf("open an NVML session: %w", err)
	}
	return s, nil
}

// Hanging returns how many calls into the driver were waited for in vain and have not returned: each keeps a thread, and there
// are two at most.
func (d *Driver) Hanging() int {
	hanging := 0
	for _, w := range []*worker{d.calls, d.events} {
		if w.hangs() {
			hanging++
		}
	}
	return hanging
}

// start begins a session, on the worker.
func (d *Driver) start() (*Session, error) {
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
	ret := lib.Init()
	if ret == nvml.ERROR_LIBRARY_NOT_FOUND {
		return nil, fmt.Errorf("%w: %s", inventory.ErrNoDriver, d.unloadable(lib))
	}
	d.loaded = lib
	if ret != nvml.SUCCESS {
		return nil, initFailure(ret)
	}
	d.open = true
	s := newSession(d, newAPI(lib, lib.has))
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

// replaced returns inventory.ErrDriverReplaced once there is another library than the one that is loaded: containers get the
// new one. While there is none, or none that is whole, it is being replaced, and the one that is loaded works.
func (d *Driver) replaced() error {
	if d.loaded.path == "" || d.loaded.inPlace(d.options.DriverRoot) {
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
	root := d.options.DriverRoot
	if root == "" {
		root = "/"
	}
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
