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

// ErrLocked is the error of a lock that another process has.
var ErrLocked = errors.New("another instance has the lock")

// LockFolder takes the lock of a folder alone. It never waits: the error wraps ErrLocked when
// another process has the lock. The end of a process gives its locks back.
func LockFolder(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECTORY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	// Closing the file gives the lock back.
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

// AwaitLock calls take, which takes a lock, again and again with pauses as long as it returns
// ErrLocked, and for limit at most: the process that has the lock may be stopped. It returns the
// last error of take, or that of ctx.
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

// A Lock is a lock in an open file (F_OFD_SETLK of fcntl(2)). It shows that a process which was
// killed is still there: the kernel keeps the lock as long as one of the threads of the process is
// in the driver. Others can ask about it without taking it.
type Lock struct{ f *os.File }

// TakeLock takes the lock of a file alone. It makes the file if there is none, and never waits: the
// error wraps ErrLocked when another process has the lock or a share of it. Close gives it back.
func TakeLock(path string) (*Lock, error) { return take(path, unix.F_WRLCK) }

// TakeShare takes a share of that lock, as TakeLock does.
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

// Close gives the lock back. It may be called again.
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
