package mig

import (
	"context"
	"sync"
	"time"
)

// HangDisk makes the disk with the journal hang until the returned function is called.
func (c *Controller) HangDisk() (answer func()) {
	hangs, begun := make(chan struct{}), make(chan struct{})
	c.mu.Lock()
	disk := c.journal.disk
	c.mu.Unlock()
	hang := func() error { close(begun); <-hangs; return nil }
	go func() { _ = disk.Do(context.Background(), time.Nanosecond, hang) }()
	<-begun
	return sync.OnceFunc(func() { close(hangs) })
}
