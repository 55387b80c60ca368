package draslices

import (
	"context"
	"errors"
)

// NewOn returns the devices of a node on a disk that hangs until it is closed.
func NewOn(ctx context.Context, o Options, disk <-chan struct{}) *Devices {
	d := newDevices(o)
	d.begin(ctx, func() error {
		<-disk
		return errors.Join(d.Reread(), d.readNumbers())
	})
	return d
}
