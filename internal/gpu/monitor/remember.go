package monitor

import (
	"context"
	"os"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/ledger"
)

// A memory is what earlier processes wrote down.
type memory struct {
	noted   ledger.Book
	release *ledger.Release
}

// recall reads what earlier processes wrote down. What cannot be read is nothing to end for.
func recall(ctx context.Context, o Options) (m memory) {
	log, dir := klog.FromContext(ctx), o.StateDir
	var err error
	if m.noted, err = ledger.Read(dir); err != nil {
		log.Info("Beginning without the faults of earlier processes", "dir", dir, "reason", err.Error())
	}
	if m.release, err = ledger.ReadRelease(dir, o.BootID); err != nil {
		log.Info("Cannot read whether the driver was released; it counts as not released", "dir", dir, "reason", err.Error())
	}
	return m
}

// remember begins with what earlier processes wrote down. A disk that hangs is not waited for: the
// loop takes in later what it says.
func (l *loop) remember(ctx context.Context) {
	answered := make(chan memory, 1)
	err := statefile.NewDisk().Do(ctx, savePatience, func() error {
		answered <- l.recall(ctx, l.options)
		return nil
	})
	if err != nil {
		klog.FromContext(ctx).Info("Beginning without the faults of earlier processes", "dir", l.options.StateDir, "reason",
			err.Error())
		l.recalled = answered
		l.writeFaults(ctx, ledger.NewBook())
		return
	}
	m := <-answered
	l.writeFaults(ctx, m.noted)
	m.noted.Expire(l.options.BootID)
	l.state.noted = m.noted
	if m.release == nil {
		return
	}
	klog.FromContext(ctx).Info(
		"The driver was released before this process started: leaving it alone; to end this, run: gpu-device-plugin resume",
		"since", m.release.Since)
	l.closed, l.looked = true, true
	l.state.quiesce(m.release.Allocate, time.Now())
	if l.quiesced = m.release.Since; !l.isQuiesced() { // the file does not say
		l.quiesced = time.Now()
	}
	l.publish(ctx)
	close(l.first)
	l.start(func() error {
		l.followMark(ctx)
		return nil
	})
}

// markEvery is how often a process that found the driver released looks whether it still is.
const markEvery = 5 * time.Second

// followMark has the driver be used again when another process of the node, which has the same
// state directory, was told to resume: that removes the mark. It ends when this process is told
// anything itself, or when ctx ends.
func (m *Monitor) followMark(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(markEvery):
		}
		if m.told.Load() {
			return
		}
		found, err := ledger.ReadRelease(m.options.StateDir, m.options.BootID)
		if err != nil { // the file is set aside, and its absence says nothing any more
			klog.FromContext(ctx).Info("Cannot read whether the driver is still released: leaving it alone until resume",
				"reason", err.Error())
			return
		}
		if _, away := os.Stat(m.options.StateDir); found != nil || away != nil {
			continue
		}
		m.followResume(ctx)
		return
	}
}

// followResume has the driver be used again, unless this process was told anything meanwhile.
func (m *Monitor) followResume(ctx context.Context) {
	select {
	case m.releasing <- struct{}{}:
	case <-ctx.Done():
		return
	}
	defer func() { <-m.releasing }()
	if m.told.Load() {
		return
	}
	_ = m.ask(ctx, wantLook, func(l *loop) error { // it is tried again until that works
		klog.FromContext(ctx).Info("Using the driver again, because another process of this node was told to resume")
		l.quiesced, l.closed = time.Time{}, false
		return nil
	}, make(chan error, 1))
}

// writeFaults has the faults of this process be written whenever it leads. Known is what it has
// read of the ledger.
func (l *loop) writeFaults(ctx context.Context, known ledger.Book) {
	faults := ledger.NewFaultWriter(l.options.StateDir, known)
	l.faults, l.kept = faults, known.Clone()
	l.start(func() error {
		return l.options.While(ctx, func(ctx context.Context) error {
			faults.Run(ctx, ledger.Term{May: l.options.Lead, TakeIn: func(found,
				known ledger.Book) {
				l.follow(ctx, found, known)
			}})
			return nil
		})
	})
}

// follow has the loop take in what the process that led before has noted since this one read the
// ledger, and write what it found itself.
func (m *Monitor) follow(ctx context.Context, found, known ledger.Book) {
	done := make(chan struct{})
	request := func(l *loop) {
		defer close(done)
		l.followed = true
		l.takeIn(found, known)
		l.kept = l.state.book(l.options.BootID)
		l.faults.Offer(l.kept)
	}
	select {
	case m.requests <- request:
		<-done
	case <-ctx.Done():
	}
}

// takeIn takes in the faults of other processes that this one neither knew nor found itself.
func (l *loop) takeIn(found, known ledger.Book) {
	noted := found.Unlike(known, l.state.book(l.options.BootID))
	if noted.Expire(l.options.BootID); !noted.Empty() {
		l.state.noted.Join(noted)
		l.nudge()
	}
}

// takeInLate takes in what earlier processes wrote down when the disk answers at last. The driver
// is released if it was before, and nobody has said otherwise since.
func (l *loop) takeInLate(ctx context.Context, m memory) {
	klog.FromContext(ctx).Info("The disk with the faults of earlier processes answers", "dir", l.options.StateDir)
	if !l.followed { // what was written has these faults already, and some may be cleared since
		l.takeIn(m.noted, ledger.NewBook())
	}
	l.nudge()
	if m.release != nil && !l.told.Load() {
		l.start(func() error {
			_ = l.Quiesce(ctx, m.release.Allocate) // it is tried again until resume
			return nil
		})
	}
}

// setRelease saves that the driver was released, or with nil that it is used again, and has the
// loop go on with that. Requests that come together are written down in the order in which the loop
// gets them. Follow is called with a context that does not end with ctx: what is saved happens.
func (m *Monitor) setRelease(ctx context.Context, r *ledger.Release, follow func(context.Context) error) error {
	select {
	case m.releasing <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-m.releasing }()
	if err := ctx.Err(); err != nil { // who asked has gone meanwhile
		return err
	}
	m.told.Store(true)
	if m.options.StateDir != "" {
		select {
		case <-m.marks: // nobody waits for it any more
		default:
		}
		saved := make(chan error, 1)
		m.marks <- mark{r, saved}
		var err error
		select {
		case err = <-saved:
		case <-time.After(savePatience):
			err = statefile.ErrHangs
		}
		if err != nil {
			klog.FromContext(ctx).Info("Cannot save whether the driver is released; a restart of the daemon may forget it",
				"dir", m.options.StateDir, "reason", err.Error())
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), loopPatience)
	defer cancel()
	return follow(ctx)
}

// loopPatience is how long it is waited for the loop, which takes a request at once unless the
// daemon ends.
const loopPatience = time.Second

// savePatience is how long the start waits for what the disk says, and a request until it is saved
// that the driver is released. What hangs is taken in or saved later.
const savePatience = 2 * time.Second

// A mark says that the driver was released, or with a nil Release that it was not.
type mark struct {
	*ledger.Release
	saved chan<- error
}

// saveMarks writes marks down until ctx ends. Only it waits for the disk.
func (m *Monitor) saveMarks(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case k := <-m.marks:
			k.saved <- m.save(m.options.StateDir, k.Release)
		}
	}
}

// save writes one down.
func save(dir string, r *ledger.Release) error {
	if r == nil {
		return ledger.RemoveRelease(dir)
	}
	return ledger.WriteRelease(dir, *r)
}
