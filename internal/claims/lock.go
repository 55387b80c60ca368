package claims

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"
)

// The locks of claims and GPUs are bytes of one file: processes that overlap and goroutines of one exclude each other in the same way,
// no lock leaves a file behind, and the end of a process gives all of its locks back.
const lockFile = "claims.lock"

// The pauses between two tries to take a lock.
const (
	firstTry = time.Millisecond
	mostTry  = 20 * time.Millisecond
)

// A turn is what holds locks.
type turn struct {
	file  *os.File
	clock clock.Clock
}

// begin returns a turn without locks.
func begin(dir string, c clock.Clock) (*turn, error) {
	path := filepath.Join(dir, lockFile)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if errors.Is(err, os.ErrNotExist) {
		if err = os.MkdirAll(dir, 0o700); err == nil {
			f, err = os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open the lock file: %w", err)
	}
	return &turn{f, c}, nil
}

// end gives all locks back.
func (t *turn) end() { _ = t.file.Close() }

// claim takes the lock of a claim. It comes before those of GPUs.
func (t *turn) claim(ctx context.Context, uid string) error { return t.take(ctx, 0, uid) }

// gpus takes the locks of GPUs. All of them are taken by one call: their order is what keeps two turns from waiting for each other.
func (t *turn) gpus(ctx context.Context, uuids []string) error { return t.take(ctx, 1<<62, uuids...) }

func (t *turn) take(ctx context.Context, base int64, names ...string) error {
	at := make([]int64, len(names))
	for i, name := range names {
		sum := fnv.New64a()
		_, _ = sum.Write([]byte(name))
		at[i] = base + int64(sum.Sum64()>>3) // 61 bits
	}
	slices.Sort(at)
	for _, start := range slices.Compact(at) {
		if err := t.wait(ctx, start); err != nil {
			return err
		}
	}
	return nil
}

// wait takes the lock of a byte.
func (t *turn) wait(ctx context.Context, start int64) error {
	for pause := firstTry; ; pause = min(2*pause, mostTry) {
		err := unix.FcntlFlock(t.file.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: start, Len: 1})
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EINTR):
			return fmt.Errorf("take a lock in %s: %w", t.file.Name(), err)
		}
		timer := t.clock.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("wait until another call for the claim or its GPUs has ended: %w", ctx.Err())
		case <-timer.C():
		}
	}
}
