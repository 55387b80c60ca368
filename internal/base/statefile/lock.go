package statefile

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"
)

// ErrLocked is returned if another process has the lock.
var ErrLocked = errors.New("another instance has the lock")

// LockFolder takes the exclusive lock of a folder. It never waits: the error wraps ErrLocked if
// another process has the lock. The exit of a process releases the lock.
func LockFolder(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECTORY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	// Closing the file releases the lock.
	unlock = func() { _ = f.Close() }
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		unlock()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = ErrLocked
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return unlock, nil
}

// AwaitLock calls take repeatedly, with pauses, while take returns ErrLocked, for limit at most:
// the process with the lock may be stopped. It returns the last error of take, or the error of ctx.
func AwaitLock(ctx context.Context, c clock.Clock, limit, pause time.Duration, take func() error) error {
	late := c.NewTimer(limit)
	defer late.Stop()
	for {
		err := take()
		if !errors.Is(err, ErrLocked) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-late.C():
			return err
		case <-c.After(pause):
		}
	}
}

// A Lock is a lock of an open file (F_OFD_SETLK of fcntl(2)). The kernel keeps the lock of a killed
// process while a thread is in the driver. Other processes can query the lock without taking it.
type Lock struct{ f *os.File }

// TakeLock takes the exclusive lock of a file, which it creates if necessary. It never waits: the
// error wraps ErrLocked if another process has the lock or a share.
func TakeLock(path string) (*Lock, error) { return take(path, unix.F_WRLCK) }

// TakeShare takes a share of the same lock, as TakeLock does.
func TakeShare(path string) (*Lock, error) { return take(path, unix.F_RDLCK) }

func take(path string, kind int16) (*Lock, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: kind}); err != nil {
		_ = f.Close()
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
			err = ErrLocked
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return &Lock{f}, nil
}

// Others reports whether another process has the lock or a share of it.
func (l *Lock) Others() bool {
	held := unix.Flock_t{Type: unix.F_WRLCK}
	return unix.FcntlFlock(l.f.Fd(), unix.F_OFD_GETLK, &held) == nil && held.Type != unix.F_UNLCK
}

// Close releases the lock. Further calls have no effect.
func (l *Lock) Close() { _ = l.f.Close() }

// IsLocked reports whether a process has the lock of a file or a share of it.
func IsLocked(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	l := &Lock{f}
	defer l.Close()
	return l.Others()
}
