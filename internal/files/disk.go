package files

import (
	"context"
	"errors"
	"time"
)

// ErrHangs is the error of a disk that does not answer.
var ErrHangs = errors.New("the disk does not answer")

// A Disk is the one on which somebody keeps state. It works beside those who use it, so that a disk that hangs delays nobody for long. Make
// it with NewDisk.
type Disk struct{ turn chan struct{} }

// NewDisk returns a Disk that does nothing yet.
func NewDisk() *Disk { return &Disk{make(chan struct{}, 1)} }

// Do has work done, one after the other, and returns its error. It returns ErrHangs after the limit, and the error of ctx at its end: the
// work has not begun then, and never does, or its end comes later. What has to be known of that end is noted by the work itself.
func (d *Disk) Do(ctx context.Context, limit time.Duration, work func() error) error {
	late := time.After(limit)
	select {
	case d.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	case <-late:
		return ErrHangs
	}
	ended := make(chan error, 1)
	go func() {
		defer func() { <-d.turn }()
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
