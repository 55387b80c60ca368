package monitor

import (
	"context"
	"errors"
	"os"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/ledger"
)

// A savedState is the state saved by earlier processes.
type savedState struct {
	entries ledger.Book
	release *ledger.Release
}

// readSavedState reads the state saved by earlier processes. An unreadable file is logged and
// ignored.
func readSavedState(ctx context.Context, o Options) (m savedState) {
	log, dir := klog.FromContext(ctx), o.StateDir
	var err error
	if m.entries, err = ledger.Read(dir); err != nil {
		log.Info("Cannot read the fault ledger: starting without earlier faults", "dir", dir, "reason", err.Error())
	}
	if m.release, err = ledger.ReadRelease(dir, o.BootID); err != nil {
		log.Info("Cannot read whether the driver was released; assuming that it was not", "dir", dir,
			"reason", err.Error())
	}
	return m
}

// restoreState restores the state saved by earlier processes. If the disk hangs, the loop restores
// the state later.
func (l *loop) restoreState(ctx context.Context) {
	answered := make(chan savedState, 1)
	err := statefile.NewDisk().Do(ctx, savePatience, func() error {
		answered <- l.readState(ctx, l.options)
		return nil
	})
	if err != nil {
		klog.FromContext(ctx).Info("Cannot read the fault ledger: starting without earlier faults",
			"dir", l.options.StateDir, "reason",
			err.Error())
		l.lateSavedState = answered
		l.writeFaults(ctx, ledger.NewBook())
		return
	}
	m := <-answered
	l.writeFaults(ctx, m.entries)
	m.entries.Expire(l.options.BootID)
	l.state.restoredEntries = m.entries
	if m.release == nil {
		return
	}
	if m.release.ForChange {
		klog.FromContext(ctx).Info("The driver is still released for a change of the driver", "since", m.release.Since)
	} else {
		klog.FromContext(ctx).Info("The driver is still released; to use it again, run: gpu-device-plugin resume",
			"since", m.release.Since)
	}
	l.sessionReleased, l.hasLooked = true, true
	l.isForChange = m.release.ForChange
	l.state.quiesce(m.release.Allocate, time.Now())
	if l.quiescedSince = m.release.Since; !l.isQuiesced() { // the file has no time
		l.quiescedSince = time.Now()
	}
	l.publish(ctx)
	close(l.first)
	l.start(func() error {
		l.watchRelease(ctx)
		return nil
	})
}

// releasePoll is the interval of checks whether the driver is still released.
const releasePoll = 5 * time.Second

// watchRelease resumes after another process of the node has resumed and removed the mark from the
// shared state directory. It ends with ctx, or with the first Quiesce or Resume of this process.
func (m *Monitor) watchRelease(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(releasePoll):
		}
		if m.releaseRequested.Load() {
			return
		}
		found, err := ledger.ReadRelease(m.options.StateDir, m.options.BootID)
		if err != nil { // the file is set aside, and a missing file says nothing
			klog.FromContext(ctx).Info(
				"Cannot read whether the driver is still released; it stays released until resume",
				"reason", err.Error())
			return
		}
		if _, away := os.Stat(m.options.StateDir); found != nil || away != nil {
			continue
		}
		m.resumeLikeOther(ctx)
		return
	}
}

// resumeLikeOther resumes, unless this process had a Quiesce or Resume meanwhile.
func (m *Monitor) resumeLikeOther(ctx context.Context) {
	select {
	case m.releaseLock <- struct{}{}:
	case <-ctx.Done():
		return
	}
	defer func() { <-m.releaseLock }()
	if m.releaseRequested.Load() {
		return
	}
	_ = m.requestOutcome(ctx, wantLook, func(l *loop) error { // the monitor retries
		klog.FromContext(ctx).Info("Using the driver again: another process on this node ran resume")
		l.quiescedSince, l.sessionReleased = time.Time{}, false
		return nil
	}, make(chan error, 1))
}

// writeFaults writes the faults of this process whenever it leads. known are the entries already
// read from the ledger.
func (l *loop) writeFaults(ctx context.Context, known ledger.Book) {
	faults := ledger.NewFaultWriter(l.options.StateDir, known)
	l.faults, l.lastEntries = faults, known.Clone()
	l.start(func() error {
		return l.options.While(ctx, func(ctx context.Context) error {
			faults.Run(ctx, ledger.Term{MayWrite: l.options.Lead, Merge: func(found,
				known ledger.Book) {
				l.mergeLedger(ctx, found, known)
			}})
			return nil
		})
	})
}

// mergeLedger merges the entries that the previous leader saved after this process had read the
// ledger, and offers the result for writing.
func (m *Monitor) mergeLedger(ctx context.Context, found, known ledger.Book) {
	done := make(chan struct{})
	request := func(l *loop) {
		defer close(done)
		l.ledgerMerged = true
		l.mergeFaults(found, known)
		l.lastEntries = l.state.ledgerEntries(l.options.BootID)
		l.faults.Offer(l.lastEntries)
	}
	select {
	case m.requests <- request:
		<-done
	case <-ctx.Done():
	}
}

// mergeFaults merges the faults of other processes that are new to this process.
func (l *loop) mergeFaults(found, known ledger.Book) {
	noted := found.Unlike(known, l.state.ledgerEntries(l.options.BootID))
	if noted.Expire(l.options.BootID); !noted.Empty() {
		l.state.restoredEntries.Join(noted)
		l.requestLook()
	}
}

// restoreLate restores the saved state when a hanging disk answers. The driver is released if it
// was released before, unless Quiesce or Resume was called meanwhile.
func (l *loop) restoreLate(ctx context.Context, m savedState) {
	klog.FromContext(ctx).Info("The disk of the fault ledger responds again", "dir", l.options.StateDir)
	if !l.ledgerMerged { // the merged ledger has these faults, and some may be cleared since
		l.mergeFaults(m.entries, ledger.NewBook())
	}
	l.requestLook()
	if m.release != nil && !l.releaseRequested.Load() {
		l.start(func() error {
			_ = l.quiesce(ctx, *m.release) // the monitor retries until resume
			return nil
		})
	}
}

// setRelease saves a release of the driver, or with nil the end of a release, and passes the
// request to the loop. Concurrent calls are saved in the order in which the loop receives them.
// After a save, neither the end of ctx nor a slow loop drops the request: setRelease then returns
// an error, and the loop receives the request later, before that of the next call.
func (m *Monitor) setRelease(ctx context.Context, r *ledger.Release, request func(*loop)) error {
	select {
	case m.releaseLock <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-m.releaseLock }()
	if err := ctx.Err(); err != nil { // the caller has given up
		return err
	}
	m.releaseRequested.Store(true)
	if m.options.StateDir != "" {
		select {
		case <-m.marks: // nobody waits for this mark
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
			klog.FromContext(ctx).Info(
				"Cannot save whether the driver is released; a restart of the daemon may forget it",
				"dir", m.options.StateDir, "reason", err.Error())
		}
	}
	received := make(chan struct{})
	former := func(*loop) {}
	select {
	case former = <-m.releases: // its caller has given up
	default:
	}
	m.releases <- func(l *loop) {
		defer close(received)
		former(l) // a Quiesce after a Resume releases the driver from then on
		request(l)
	}
	select {
	case <-received:
		return nil
	case <-time.After(loopPatience):
		return errors.New("the monitor does not respond: it receives the request later")
	}
}

// loopPatience is the longest wait for the loop. The loop receives a request at once, unless the
// machine is very busy or the daemon is ending.
const loopPatience = time.Second

// savePatience limits the wait of the start for the disk, and of a request for the save of a
// release. A hanging read or write is finished later.
const savePatience = 2 * time.Second

// A mark is a release to save, or with a nil Release the end of a release.
type mark struct {
	*ledger.Release
	saved chan<- error
}

// saveMarks saves marks until ctx ends. No other goroutine waits for the disk.
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

// save saves or removes a release.
func save(dir string, r *ledger.Release) error {
	if r == nil {
		return ledger.RemoveRelease(dir)
	}
	return ledger.WriteRelease(dir, *r)
}
