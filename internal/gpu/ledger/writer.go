package ledger

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

const (
	// refusedPause is the pause after a failed write.
	refusedPause = 30 * time.Second
	// diskTimeout is the longest wait for the disk, also at the end of Run.
	diskTimeout = 5 * time.Second
)

// errNotLead is the error of a write after another process took the lead. The other process has
// found the faults itself.
var errNotLead = errors.New("another process leads")

// A FaultWriter writes Books in the background: the caller never waits for the disk.
type FaultWriter struct {
	ledger   ledger
	disk     *statefile.Disk
	books    chan Book // the last Book to be written
	lastBook Book      // the last Book read or written by this process

	// The fields below belong to Run.

	isMerged  bool // the entries of other processes are merged
	nextBook  *Book
	complaint string // the error logged last
}

// NewFaultWriter returns a FaultWriter for a directory. known are the entries already read from the
// directory.
func NewFaultWriter(dir string, known Book) *FaultWriter {
	return &FaultWriter{ledger: ledger{dir: dir}, disk: statefile.NewDisk(), books: make(chan Book, 1),
		lastBook: known.Clone()}
}

// Read returns the Book in a directory; after an error, an empty Book.
func Read(dir string) (Book, error) { return ledger{dir: dir}.read() }

// Offer replaces the Book to be written. It never blocks. Only one goroutine may call it.
func (w *FaultWriter) Offer(b Book) {
	select {
	case <-w.books:
	default:
	}
	w.books <- b
}

// A Term is a period during which this process writes the ledger.
type Term struct {
	// Merge receives the Book on disk, and the entries known before. It returns after the offer of
	// a Book with the merged entries, or when the process ends.
	Merge func(found, known Book)
	// MayWrite returns before each write why this process may not write; nil if it may.
	MayWrite func() error
}

// Run writes offered Books until ctx ends, and then a last time. A damaged file is set aside.
func (w *FaultWriter) Run(ctx context.Context, t Term) {
	w.isMerged, w.nextBook = false, nil
	again := time.NewTimer(0)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			w.finish(ctx, t)
			return
		case b := <-w.books:
			w.nextBook = &b
		case <-again.C:
		}
		if w.write(ctx, t) != nil {
			again.Reset(refusedPause)
		}
	}
}

// finish writes the last Book.
func (w *FaultWriter) finish(ctx context.Context, t Term) {
	w.latest()
	if err := w.write(ctx, t); err != nil && w.nextBook != nil {
		klog.FromContext(ctx).Info("Faults were not written to the ledger and will be lost", "dir", w.ledger.dir)
	}
}

// latest takes the last offered Book, if any.
func (w *FaultWriter) latest() {
	select {
	case b := <-w.books:
		w.nextBook = &b
	default:
	}
}

// write writes the wanted Book, after begin.
func (w *FaultWriter) write(ctx context.Context, t Term) error {
	err := w.begin(ctx, t)
	if err == nil && w.nextBook != nil {
		next := w.nextBook.withUnknownOf(w.lastBook)
		err = w.disk.Do(context.WithoutCancel(ctx), diskTimeout, func() error {
			if t.MayWrite() != nil {
				return errNotLead
			}
			if next.Equal(w.lastBook) {
				return nil
			}
			return w.ledger.replace(next)
		})
		if err == nil {
			w.lastBook, w.nextBook = next, nil
		}
	}
	switch {
	case err == nil || errors.Is(err, errNotLead):
		w.complaint = ""
		return nil
	case err.Error() != w.complaint:
		w.complaint = err.Error()
		klog.FromContext(ctx).Info("Cannot write the fault ledger: a restart would lose faults", "dir", w.ledger.dir,
			"reason", w.complaint)
	}
	return err
}

// begin reads the ledger and merges the entries of other processes.
func (w *FaultWriter) begin(ctx context.Context, t Term) error {
	if w.isMerged {
		return nil
	}
	var found Book
	var setAside error
	err := w.disk.Do(context.WithoutCancel(ctx), diskTimeout, func() (err error) {
		if t.MayWrite() != nil {
			return errNotLead
		}
		found, setAside, err = w.ledger.open()
		return err
	})
	if err != nil {
		return err
	}
	if setAside != nil {
		klog.FromContext(ctx).Info("Set the damaged fault ledger aside and started a new one", "dir", w.ledger.dir,
			"kept", damagedFile,
			"reason", setAside.Error())
	}
	wanted, known := w.nextBook, w.lastBook
	w.isMerged, w.nextBook, w.lastBook = true, nil, found
	t.Merge(found.Clone(), known)
	if w.latest(); w.nextBook == nil && wanted != nil { // nobody merged
		b := wanted.Clone()
		b.Join(found.Unlike(known, b))
		w.nextBook = &b
	}
	return nil
}
