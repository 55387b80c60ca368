package files

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// ErrLocked is the error of a lock that another process has.
var ErrLocked = errors.New("another instance has the lock")

// LockShared takes a share of the lock of a file, which it makes if there is none, and the folder that it is in. It never waits: the error
// wraps ErrLocked when another process has the lock. The end of a process gives its locks back.
func LockShared(path string) (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("make the folder of a lock: %w", err)
	}
	return flock(path, os.O_CREATE|os.O_RDWR, syscall.LOCK_SH)
}

// LockFolder takes the lock of a folder alone, as LockShared does, and makes nothing.
func LockFolder(path string) (unlock func(), err error) {
	return flock(path, os.O_RDONLY|syscall.O_DIRECTORY, syscall.LOCK_EX)
}

func flock(path string, flags, how int) (unlock func(), err error) {
	f, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	// Closing the file gives the lock back.
	unlock = func() { _ = f.Close() }
	if err := syscall.Flock(int(f.Fd()), how|syscall.LOCK_NB); err != nil {
		unlock()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = ErrLocked
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return unlock, nil
}
