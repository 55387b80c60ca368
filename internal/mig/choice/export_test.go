package choice

import (
	"context"
	"time"
)

// HangDisk makes the state directory hang until the returned function is called, as if it had hung
// since the start of the process.
func (l *Chooser) HangDisk() (answer func()) {
	hangs := make(chan struct{})
	go func() { _ = l.disk.Do(context.Background(), time.Minute, func() error { <-hangs; return nil }) }()
	l.state = savedState{Version: stateVersion}
	return func() { close(hangs) }
}
