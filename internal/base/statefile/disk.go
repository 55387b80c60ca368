package statefile

import (
	"context"
	"errors"
	"time"
)

// ErrHangs is returned if the disk does not answer.
var ErrHangs = errors.New("the disk does not answer")

// A Disk runs file operations in a separate goroutine, so that callers wait for a hanging disk only
// up to a limit. Create a Disk with NewDisk.
type Disk struct{ busy chan struct{} }

// NewDisk returns an idle Disk.
func NewDisk() *Disk { return &Disk{make(chan struct{}, 1)} }

// Do calls work, one function at a time, and returns its error. It returns ErrHangs after the
// limit, and the error of ctx when ctx ends. Work then never starts, or ends later and must store
// the result itself.
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

// Within returns the result of read, or the zero value if Do returns before read.
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
