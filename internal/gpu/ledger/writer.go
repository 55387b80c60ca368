package ledger

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

const (
	// refusedPause is how long a FaultWriter waits after the disk refused.
	refusedPause = 30 * time.Second
	// diskTimeout is how long the disk may take. Nobody waits any longer for the end of Run.
	diskTimeout = 5 * time.Second
)

// errNotLead is the error of a write after another process took the lead. That one has found the
// faults itself.
var errNotLead = errors.New("another process leads")

// A FaultWriter writes Books in the background, so that the caller never waits for the disk.
type FaultWriter struct {
	ledger ledger
	disk   *statefile.Disk
	books  chan Book // the latest that is to be written
	known  Book      // what this process read or wrote last

	// The rest belongs to Run.

	begun     bool // what other processes noted is taken in
	wanted    *Book
	complaint string // that was logged last
}

// NewFaultWriter returns a FaultWriter for a folder of whose Book this process knows some, or
// nothing.
func NewFaultWriter(dir string, known Book) *FaultWriter {
	return &FaultWriter{ledger: ledger{dir: dir}, disk: statefile.NewDisk(), books: make(chan Book, 1),
		known: known.Clone()}
}

// Read returns the Book that other processes wrote into a folder. The error says why that could not
// be read: then the Book is empty.
func Read(dir string) (Book, error) { return ledger{dir: dir}.read() }

// Offer has the FaultWriter write a Book in place of all that were offered before. It never blocks;
// only one goroutine calls it.
func (w *FaultWriter) Offer(b Book) {
	select {
	case <-w.books:
	default:
	}
	w.books <- b
}

// A Term is a time in which this process writes the ledger.
type Term struct {
	// TakeIn gets what is on the disk, and what this process knew of it before, and returns once a
	// Book was offered that has what other processes noted, or without one when the process ends.
	TakeIn func(found, known Book)
	// May says before each write why this process may not write; nil if it may.
	May func() error
}

// Run writes what is offered until ctx ends, and then what is left. A damaged file is set aside.
func (w *FaultWriter) Run(ctx context.Context, t Term) {
	w.begun, w.wanted = false, nil
	again := time.NewTimer(0)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			w.finish(ctx, t)
			return
		case b := <-w.books:
			w.wanted = &b
		case <-again.C:
		}
		if w.write(ctx, t) != nil {
			again.Reset(refusedPause)
		}
	}
}

// finish writes what is left.
func (w *FaultWriter) finish(ctx context.Context, t Term) {
	w.latest()
	if err := w.write(ctx, t); err != nil && w.wanted != nil {
		klog.FromContext(ctx).Info("Faults are not in the ledger and will be forgotten", "dir", w.ledger.dir)
	}
}

// latest takes what was offered last, if there is something.
func (w *FaultWriter) latest() {
	select {
	case b := <-w.books:
		w.wanted = &b
	default:
	}
}

// write writes what is wanted, after it has begun with what is on the disk.
func (w *FaultWriter) write(ctx context.Context, t Term) error {
	err := w.begin(ctx, t)
	if err == nil && w.wanted != nil {
		next := w.wanted.keeping(w.known)
		err = w.disk.Do(context.WithoutCancel(ctx), diskTimeout, func() error {
			if t.May() != nil {
				return errNotLead
			}
			if next.Equal(w.known) {
				return nil
			}
			return w.ledger.replace(next)
		})
		if err == nil {
			w.known, w.wanted = next, nil
		}
	}
	switch {
	case err == nil || errors.Is(err, errNotLead):
		w.complaint = ""
		return nil
	case err.Error() != w.complaint:
		w.complaint = err.Error()
		klog.FromContext(ctx).Info("Cannot write the fault ledger: a restart would forget faults", "dir", w.ledger.dir,
			"reason", w.complaint)
	}
	return err
}

// begin reads the ledger, and has what other processes noted be taken in.
func (w *FaultWriter) begin(ctx context.Context, t Term) error {
	if w.begun {
		return nil
	}
	var found Book
	var setAside error
	err := w.disk.Do(context.WithoutCancel(ctx), diskTimeout, func() (err error) {
		if t.May() != nil {
			return errNotLead
		}
		found, setAside, err = w.ledger.open()
		return err
	})
	if err != nil {
		return err
	}
	if setAside != nil {
		klog.FromContext(ctx).Info("Set the fault ledger aside and began another", "dir", w.ledger.dir, "kept", damagedFile,
			"reason", setAside.Error())
	}
	wanted, known := w.wanted, w.known
	w.begun, w.wanted, w.known = true, nil, found
	t.TakeIn(found.Clone(), known)
	if w.latest(); w.wanted == nil && wanted != nil { // nobody was there to take it in
		b := wanted.Clone()
		b.Join(found.Unlike(known, b))
		w.wanted = &b
	}
	return nil
}
