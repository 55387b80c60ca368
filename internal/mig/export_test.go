package mig

import (
	"context"
	"sync"
	"time"
)

// HangDisk has the disk with the journal hang, until the function is called that it returns.
func (o *Owner) HangDisk() (answer func()) {
	hangs, begun := make(chan struct{}), make(chan struct{})
	go func() {
		_ = o.journal.disk.Do(context.Background(), time.Nanosecond, func() error {
			close(begun)
			<-hangs
			return nil
		})
	}()
	<-begun
	return sync.OnceFunc(func() { close(hangs) })
}
