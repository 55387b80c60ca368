package statefile

import (
	"context"
	"errors"
	"time"
)

// ErrHangs is the error of a disk that does not answer.
var ErrHangs = errors.New("the disk does not answer")

// A Disk does work on files in a goroutine of its own, so that a disk that hangs delays its callers
// no longer than they allow. Make it with NewDisk.
type Disk struct{ busy chan struct{} }

// NewDisk returns a Disk that does nothing yet.
func NewDisk() *Disk { return &Disk{make(chan struct{}, 1)} }

// Do calls work and returns its error. It runs one work at a time. It returns ErrHangs after the
// limit, and the error of ctx when ctx ends: the work then never begins, or ends later. Work that
// may end later must keep its result itself.
func (d *Disk) Do(ctx context.Context, limit time.Duration, work func() error) error {
	late := time.After(limit)
	select {
	case d.busy <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	case <-late:
		return ErrHangs
	}
	ended := make(chan error, 1)
	go func() {
		defer func() { <-d.busy }()
		ended <- work()
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return ctx.Err()
	case <-late:
		return ErrHangs
	}
}

// Within returns what read returns of the disk, and its error; the zero value where Do ends before
// it.
func Within[T any](ctx context.Context, d *Disk, limit time.Duration, read func() (T, error)) (value T, err error) {
	found := make(chan T, 1) // read may end later
	err = d.Do(ctx, limit, func() error {
		v, err := read()
		found <- v
		return err
	})
	select {
	case value = <-found:
	default:
	}
	return value, err
}
