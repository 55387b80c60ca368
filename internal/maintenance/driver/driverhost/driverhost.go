// Package driverhost changes the NVIDIA driver of a node from one driver folder to another. It keeps
// the only journal of a change, and answers the calls of package driverapi. It knows nothing of
// Kubernetes. Only gpu-driver links it.
//
// The journal says what may be loaded: before a module is loaded, the journal names its folder. So
// after a kill or a power cut, the next process knows how far the change is by the journal, the boot
// ID and /proc/modules, and goes on or takes the change back.
package driverhost

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfacts"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfetch"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverkernel"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverstore"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/preflight"
)

// Options are the parameters of a Host.
type Options struct {
	Directory string // has the driver folders and the journal, at the same path on the node
	Sources   string // has folders that are driver folders, such as image volumes; they need not exist
	Kernel    *driverkernel.Kernel
	// DownloadFrom are the URLs below which archives of drivers may be downloaded; none if empty. CAFile is
	// a file of the node with certificates beside those of the node; empty for none.
	DownloadFrom []string
	CAFile       string
	// Pause is the time between two checks while the change waits for users of the driver, and between
	// two attempts after an error.
	Pause time.Duration
	// Step is called before and after each change of the disk and of the kernel, with its name. Tests
	// end the process there; nil otherwise.
	Step func(name string)
}

// A Host changes the driver of a node.
type Host struct {
	o      Options
	store  *driverstore.Store
	kernel *driverkernel.Kernel
	boot   string // ID of this boot
	// fetcher downloads archives; nil if none may be downloaded.
	fetcher *driverfetch.Fetcher
	// turn holds a value while an act or a call changes the journal, the disk or the kernel.
	turn chan struct{}
	wake chan struct{} // holds a value if a call has changed the journal

	// The holder of the turn alone uses these.
	counted   bool // the journal has counted the load of this process
	isSettled bool // the driver and its services run
	isWhole   bool // this process has loaded all modules of the driver, or found them
	failures  int  // attempts in a row
	// lateSince is when a CallSwap or CallNextBoot began that ended before the facts were read, if none has
	// had facts since; zero otherwise.
	lateSince time.Time

	readers driverfacts.Readers

	mu sync.Mutex // guards the fields below; who changes the journal has the turn as well
	journal
	percent  int                // progress of the step
	reason   string             // why the step waits
	holders  []preflight.Holder // for which it waits
	placing  map[string]int     // percent, by digest
	problems map[string]string  // why a folder could not be copied or loaded, by digest
	stop     context.CancelFunc // ends the copy of a folder
	judged   judged             // what the node says about folders and owners
	// reading is closed at the end of the present reading of the facts; nil if there is none.
	reading chan struct{}
}

// New opens the directory and the journal. It returns an error that wraps statefile.ErrLocked if
// another process has the directory.
func New(o Options) (*Host, error) {
	if o.Step == nil {
		o.Step = func(string) {}
	}
	boot, err := o.Kernel.BootID()
	if err != nil {
		return nil, fmt.Errorf("find the ID of this boot: %w; --host-root names the node's root file system", err)
	}
	store, err := driverstore.Open(o.Directory, o.Step)
	if err != nil {
		return nil, err
	}
	kernel := *o.Kernel
	kernel.Calls = stepping{kernel.Calls, o.Step}
	h := &Host{o: o, store: store, kernel: &kernel, boot: boot, turn: make(chan struct{}, 1),
		wake: make(chan struct{}, 1), placing: map[string]int{}, problems: map[string]string{}}
	if len(o.DownloadFrom) > 0 {
		h.fetcher, err = driverfetch.New(driverfetch.Options{Directory: o.Directory, From: o.DownloadFrom,
			Root: h.kernel.Root, CAFile: o.CAFile,
			Placed: slices.Concat(slices.Collect(maps.Values(store.Archives()))...), Unpack: h.unpack})
		if err != nil {
			store.Close()
			return nil, err
		}
	}
	if _, err := statefile.ReadState(h.path(), driverapi.MaxJournal, journalVersion, &h.journal); err != nil {
		// A change that was under way is not continued.
		klog.Background().Error(err, "The journal of driver changes cannot be used", "file", h.path())
		h.journal = journal{}
	}
	return h, nil
}

// Close releases the directory.
func (h *Host) Close() { h.store.Close() }

// Run acts until ctx ends, and answers calls at the socket. It returns the error of the socket.
func (h *Host) Run(ctx context.Context, socket string) error {
	server := control.NewServer(socket, h.handlers(), nil)
	work, end := context.WithCancel(ctx)
	var works sync.WaitGroup
	works.Go(func() { h.work(work) })
	if h.fetcher != nil {
		works.Go(func() { h.fetcher.Run(work) })
	}
	err := supervise.Run(ctx, supervise.Backoff{First: time.Second, Most: time.Minute}, server.Run)
	end()
	works.Wait()
	return err
}

// work acts until ctx ends.
func (h *Host) work(ctx context.Context) {
	for {
		select {
		case h.turn <- struct{}{}:
		case <-ctx.Done():
			return
		}
		pause := h.Act(ctx)
		<-h.turn
		if pause == 0 {
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-h.wake:
		case <-time.After(pause):
		}
	}
}

// idle is the pause while no act is due: a call ends it.
const idle = time.Hour

// Act does what is to be done next, and returns the pause before the next act, which is 0 if another
// act is due at once. It is for Run, and for tests without Run.
func (h *Host) Act(ctx context.Context) (pause time.Duration) {
	if ctx.Err() != nil {
		return idle
	}
	var err error
	switch step := h.step(); step {
	case driverapi.StepPlacing, "", driverapi.StepUnproven, driverapi.StepNextBoot, driverapi.StepFailed:
		pause, err = h.maintain(ctx, step)
	case driverapi.StepUnloading:
		pause, err = h.unload(ctx)
	case driverapi.StepLoading:
		err = h.load(ctx)
	case driverapi.StepReverting:
		pause, err = h.revert(ctx)
	default:
		err = fmt.Errorf("the journal has the unknown step %q", step)
	}
	if err == nil || ctx.Err() != nil {
		h.failures = 0
		return pause
	}
	if h.reason != err.Error() {
		klog.FromContext(ctx).Error(err, "A step of the driver's change failed; it is tried again", "step", h.step())
	}
	h.setWaiting(err.Error(), nil)
	h.failures++
	return h.o.Pause << min(h.failures-1, maxBackoff)
}

// maxBackoff limits the pause after errors, in doublings.
const maxBackoff = 5

// step returns the step of the change; empty for none.
func (h *Host) step() driverapi.Step {
	if h.Change == nil {
		return ""
	}
	return h.Change.Step
}

// setWaiting records why the step waits, and for which users of the driver.
func (h *Host) setWaiting(reason string, holders []preflight.Holder) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.reason, h.holders = reason, holders
}

// progress records how much of the step is done.
func (h *Host) progress(done, all int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.percent = 100 * done / max(all, 1)
}

// maintain loads the driver after a boot, starts the services that were stopped, and copies folders,
// while no change replaces modules.
func (h *Host) maintain(ctx context.Context, step driverapi.Step) (time.Duration, error) {
	if step != "" && h.Change.BootID != h.boot {
		switch step {
		case driverapi.StepUnproven, driverapi.StepNextBoot:
			return 0, h.enter(driverapi.StepLoading, nil)
		default:
		}
	}
	var problem error
	if !h.isSettled {
		problem = h.settle(ctx)
		h.isSettled = problem == nil
	}
	if step == driverapi.StepPlacing { // also if the present driver cannot be loaded
		return h.place(ctx)
	}
	h.mu.Lock()
	placing := slices.Collect(maps.Keys(h.placing))
	h.mu.Unlock()
	for _, digest := range placing {
		if err := h.copy(ctx, digest); err != nil {
			klog.FromContext(ctx).Error(err, "A driver folder was not placed", "digest", digest)
		}
	}
	if problem == nil {
		h.setWaiting("", nil)
	}
	return idle, problem
}

// settle loads the missing modules of the current driver and starts the stopped services, after a boot
// and after a change that stopped in the middle.
func (h *Host) settle(ctx context.Context) error {
	state, err := h.kernel.State()
	if err != nil {
		return err
	}
	digest := h.loaded()
	if digest == "" && (len(state.Own) > 0 || state.Nouveau) {
		return nil // the driver of another program
	}
	if digest == "" {
		if digest, err = h.store.Current(); err != nil {
			return err
		}
	}
	if digest != "" {
		err := h.loadFolder(ctx, digest)
		h.setProblem(digest, err)
		if err != nil {
			return fmt.Errorf("load driver %.12s: %w", digest, err)
		}
	}
	return h.startServices(ctx)
}

// loadFolder loads a folder. Before it, the journal names the folder.
func (h *Host) loadFolder(ctx context.Context, digest string) error {
	if h.loaded() != digest {
		err := h.write(func(j *journal) { j.Loaded = loaded{digest, h.boot} })
		if err != nil {
			return err
		}
	}
	return h.loadModules(ctx, digest)
}

// loadModules loads a folder that the journal names.
func (h *Host) loadModules(ctx context.Context, digest string) error {
	f, err := h.store.Folder(digest)
	if err != nil {
		return err
	}
	if err := h.kernel.Load(ctx, f.Path, f.Manifest, h.progress); err != nil {
		return err
	}
	h.isWhole = true
	klog.FromContext(ctx).Info("The driver is loaded", "version", f.Manifest.Version, "digest", digest)
	return nil
}

// loaded returns the digest of the folder whose modules may be loaded; empty for none.
func (h *Host) loaded() string {
	if h.Loaded.BootID != h.boot {
		return ""
	}
	return h.Loaded.Digest
}

// place copies the folder of the change.
func (h *Host) place(ctx context.Context) (time.Duration, error) {
	change := *h.Change
	err := h.copy(ctx, change.To)
	switch {
	case errors.Is(err, context.Canceled):
		return h.o.Pause, nil // CallCancel waits for its turn
	case err != nil:
		return 0, h.fail(fmt.Sprintf("the folder was not placed: %v", err))
	case change.AtNextBoot:
		return 0, h.enter(driverapi.StepNextBoot, nil)
	}
	return 0, h.enter(driverapi.StepUnloading, nil)
}

// copy copies a folder of the sources into the directory, unless it is there.
func (h *Host) copy(ctx context.Context, digest string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	h.mu.Lock()
	h.stop = cancel
	h.mu.Unlock()
	err := h.copyFrom(ctx, digest)
	h.mu.Lock()
	h.stop = nil
	delete(h.placing, digest)
	h.mu.Unlock()
	h.setProblem(digest, err)
	return err
}

func (h *Host) copyFrom(ctx context.Context, digest string) error {
	if _, err := h.store.Folder(digest); err == nil {
		return nil
	}
	sources, problem := driverstore.Find(h.o.Sources)
	for _, f := range sources {
		if f.Digest != digest {
			continue
		}
		_, err := h.store.Place(ctx, f.Path, func(percent int) {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.placing[digest], h.percent = percent, percent
		})
		if err != nil {
			return err
		}
		h.clean(ctx, digest)
		return nil
	}
	return errors.Join(fmt.Errorf("no folder in %s has the digest %s", h.o.Sources, digest), problem)
}

// unpack places the folder of a downloaded archive, while no module is being exchanged.
func (h *Host) unpack(ctx context.Context, archive *os.File, sha256 string, progress func(percent int)) error {
	for {
		select {
		case h.turn <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
		switch h.step() {
		case "", driverapi.StepPlacing, driverapi.StepUnproven, driverapi.StepNextBoot, driverapi.StepFailed:
			f, err := h.store.Unpack(ctx, archive, sha256, progress)
			if err == nil {
				h.clean(ctx, f.Digest)
			}
			<-h.turn
			return err
		default:
		}
		<-h.turn
		select {
		case <-time.After(h.o.Pause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// clean removes folders that nothing needs. A folder that cannot be removed stays for the next time.
func (h *Host) clean(ctx context.Context, placed string) {
	current, err := h.store.Current()
	if err == nil {
		keep := []string{placed, current, h.loaded()}
		if h.Change != nil {
			keep = append(keep, h.Change.From, h.Change.To)
		}
		err = h.store.Prune(h.kernel.Files(), keep...)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Old driver folders were not removed")
	}
}

// setProblem remembers why a folder cannot be used; nil for no reason.
func (h *Host) setProblem(digest string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.problems, digest)
	if err != nil && !errors.Is(err, context.Canceled) {
		h.problems[digest] = err.Error()
	}
}

// stepping calls step around each change of the kernel.
type stepping struct {
	driverkernel.Calls
	step func(name string)
}

func (s stepping) Load(module *os.File, parameters string) error {
	defer s.around("load " + module.Name())()
	return s.Calls.Load(module, parameters)
}

func (s stepping) Unload(name string) error {
	defer s.around("unload " + name)()
	return s.Calls.Unload(name)
}

func (s stepping) MakeNode(path string, mode uint32, device uint64) error {
	defer s.around("device node " + path)()
	return s.Calls.MakeNode(path, mode, device)
}

func (s stepping) Run(ctx context.Context, program string, arguments ...string) error {
	defer s.around("program " + program)()
	return s.Calls.Run(ctx, program, arguments...)
}

func (s stepping) around(what string) func() {
	s.step("before " + what)
	return func() { s.step("after " + what) }
}
