package kubelet

import (
	"context"
	"errors"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

// LockTimeout limits the wait for registrations of other processes. One of them may hang.
const LockTimeout = time.Second

// lockPause is the pause between two attempts to take the lock.
const lockPause = 2 * time.Millisecond

// A registrationLock is this process's share of the lock of the kubelet's directory.
type registrationLock struct {
	mu     sync.Mutex // guards all following fields
	users  int        // registrations of this process under the lock
	unlock func()     // nil if there are none
}

// LockRegistrations keeps other processes of this program from registering until unlock is
// called. Calls of unlock may be repeated. LockRegistrations waits until no other process
// registers, for at most a second. After that second, or if the directory cannot be locked,
// locked is false and unlock has no effect. Registrations of this process may run at the
// same time.
//
// When registrations of two servers of a resource overlap, a kubelet up to 1.36 can use the
// list of one server and call the other.
func (d *Directory) LockRegistrations(ctx context.Context) (unlock func(), locked bool) {
	err := statefile.AwaitLock(ctx, d.clock, LockTimeout, lockPause,
		func() error { return d.registrations.lock(d.Path()) })
	switch {
	case err == nil:
		return sync.OnceFunc(d.registrations.release), true
	case errors.Is(err, statefile.ErrLocked):
		klog.FromContext(ctx).Info("Registering although another process has been registering for a second")
	case ctx.Err() == nil:
		klog.FromContext(ctx).Info("Cannot lock the kubelet's directory", "reason", err.Error())
	}
	return func() {}, false
}

// lock takes the lock, or a share if this process has the lock already.
func (l *registrationLock) lock(path string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.users == 0 {
		unlock, err := statefile.LockFolder(path)
		if err != nil {
			return err
		}
		l.unlock = unlock
	}
	l.users++
	return nil
}

func (l *registrationLock) release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.users--; l.users == 0 {
		l.unlock()
		l.unlock = nil
	}
}
