package ledger

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/files"
)

const (
	// lockedPause is how long a FaultWriter waits to write again after another instance was writing, lockedLong how long that takes
	// until it is logged, and lockedEnd how long a FaultWriter that ends waits for the other instance.
	lockedPause = 50 * time.Millisecond
	lockedLong  = 10 * time.Second
	lockedEnd   = time.Second
	// refusedPause is how long a FaultWriter waits after the disk refused.
	refusedPause = 30 * time.Second
)

// A FaultWriter writes Books for somebody who never waits for the disk.
type FaultWriter struct {
	ledger  ledger
	clock   clock.Clock
	books   chan Book // the latest that is to be written
	written Book

	// The rest belongs to Run.

	wanted    *Book
	complaint string    // that was logged last
	locked    time.Time // since when another instance has the lock; zero if none has
}

// Open returns a FaultWriter for a folder, and the Book that earlier processes wrote into it. The error says why that could not
// be read: then the Book is empty, and the FaultWriter sets a damaged file aside.
func Open(dir string, c clock.Clock) (*FaultWriter, Book, error) {
	w := &FaultWriter{ledger: ledger{dir: dir}, clock: c, books: make(chan Book, 1)}
	noted, err := w.ledger.read()
	w.written = noted.Clone()
	return w, noted, err
}

// Offer has the FaultWriter write a Book in place of all that were offered before. It never blocks; only one goroutine calls it.
func (w *FaultWriter) Offer(b Book) {
	select {
	case <-w.books:
	default:
	}
	w.books <- b
}

// Run writes what is offered until ctx ends, and then what is left.
func (w *FaultWriter) Run(ctx context.Context) {
	again := w.clock.NewTimer(refusedPause)
	again.Stop()
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			w.finish(ctx)
			return
		case b := <-w.books:
			w.wanted = &b
		case <-again.C():
		}
		if pause := w.write(ctx); pause > 0 {
			again.Reset(pause)
		}
	}
}

// finish writes what is left. An overlapping instance that writes is waited for, but not for long.
func (w *FaultWriter) finish(ctx context.Context) {
	select {
	case b := <-w.books:
		w.wanted = &b
	default:
	}
	again := w.clock.NewTimer(0)
	defer again.Stop()
	for end := w.clock.Now().Add(lockedEnd); ; {
		<-again.C()
		pause := w.write(ctx)
		if pause == 0 {
			return
		}
		if pause != lockedPause || !w.clock.Now().Before(end) {
			klog.FromContext(ctx).Info("Faults are not in the ledger and will be forgotten", "dir", w.ledger.dir)
			return
		}
		again.Reset(pause)
	}
}

// write writes what is wanted, and returns how long to wait before it is tried again; 0 if nothing is left to write.
func (w *FaultWriter) write(ctx context.Context) time.Duration {
	if w.wanted == nil {
		return 0
	}
	log := klog.FromContext(ctx)
	setAside, err := w.ledger.write(w.written, *w.wanted)
	if setAside != nil {
		log.Info("Set the fault ledger aside and began another", "dir", w.ledger.dir, "kept", damagedFile, "reason", setAside.Error())
	}
	switch {
	case err == nil:
		w.written, w.wanted, w.complaint, w.locked = *w.wanted, nil, "", time.Time{}
		return 0
	case !errors.Is(err, files.ErrLocked):
		w.locked = time.Time{}
	case w.locked.IsZero():
		w.locked = w.clock.Now()
		return lockedPause
	case w.clock.Since(w.locked) < lockedLong:
		return lockedPause
	}
	if err.Error() != w.complaint {
		w.complaint = err.Error()
		log.Info("Cannot write the fault ledger: a restart would forget faults", "dir", w.ledger.dir, "reason", w.complaint)
	}
	if errors.Is(err, files.ErrLocked) {
		return lockedPause
	}
	return refusedPause
}
