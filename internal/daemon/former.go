package daemon

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/files"
)

// Version 0.1 knew no lead. Its processes had the locks of these files in the state directory while they wrote the ledger of faults,
// divided GPUs, published slices, and told the API server of the GPUs. The process that leads has a share of each of them, so that a
// process of version 0.1 that starts later does none of this. One that divides GPUs or publishes slices is waited for. What is here is for
// a roll-out from that version or back to it, and goes with the release after the next, as its part in package claims.
var formerLocks = []string{"faults.lock", FormerDivides, FormerPublishes, "reporter.lock"}

// The locks of version 0.1 that are waited for.
const (
	FormerDivides   = "mig.lock"
	FormerPublishes = "dra-publisher.lock"
)

// Former watches the lock files of version 0.1, to tell what processes of that version still do on the node.
type Former struct {
	dir    string
	locked *feed.Feed[[]string]  // the files whose lock they may have
	tried  *feed.Feed[bool]      // each lock was tried: a process may have it whose file is in locked, and not only until it is tried
	since  *feed.Feed[time.Time] // when a lock was first seen that one has; zero if none is
	mu     sync.Mutex            // held while these are published: nothing that a term found counts after it
}

// NewFormer returns the Former of a state directory; empty for none.
func NewFormer(dir string) *Former {
	f := &Former{dir: dir, locked: feed.New[[]string](nil), tried: feed.New(dir == ""), since: feed.New(time.Time{})}
	if dir != "" {
		f.locked.Publish(formerLocks)
	}
	return f
}

// Does reports whether a process of version 0.1 may do what this lock is for.
func (f *Former) Does(lock string) bool { return slices.Contains(f.locked.Value(), lock) }

// Try waits until each lock was tried, for five seconds at most: a disk may hang.
func (f *Former) Try(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	feed.Until(ctx, f.tried, func(tried bool) bool { return tried })
}

// Await waits until no process of version 0.1 has the lock. It reports false when ctx ended before.
func (f *Former) Await(ctx context.Context, lock string) bool {
	return feed.Until(ctx, f.locked, func(locked []string) bool { return !slices.Contains(locked, lock) })
}

// Waits says since when which locks are waited for; empty if none are.
func (f *Former) Waits() string {
	locked, since := f.locked.Value(), f.since.Value()
	if len(locked) == 0 || since.IsZero() {
		return ""
	}
	return fmt.Sprintf("since %s a process of version 0.1 has %s in %s, which has to end before GPUs are divided and slices are published",
		since.UTC().Format(time.RFC3339), strings.Join(locked, ", "), f.dir)
}

// formerPoll is how often a lock is tried that such a process has.
const formerPoll = time.Second

// Run has a share of the locks until ctx ends. Locks that cannot be had for another reason than such a process are nobody's.
func (f *Former) Run(ctx context.Context) error {
	if f.dir == "" {
		return nil
	}
	go f.share(ctx) // a disk that hangs is not waited for
	<-ctx.Done()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tried.Publish(false)
	f.locked.Publish(formerLocks)
	f.since.Publish(time.Time{})
	return nil
}

func (f *Former) share(ctx context.Context) {
	left := slices.Clone(formerLocks)
	for told := false; ctx.Err() == nil; told = true {
		left = slices.DeleteFunc(left, func(name string) bool {
			unlock, err := files.LockShared(filepath.Join(f.dir, name))
			if err == nil {
				context.AfterFunc(ctx, unlock)
			}
			return !errors.Is(err, files.ErrLocked)
		})
		if !told && len(left) > 0 {
			klog.FromContext(ctx).Info("Waiting for a process of version 0.1", "locks", left)
		}
		f.found(ctx, left, !told)
		if len(left) == 0 {
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(formerPoll):
		}
	}
}

// found publishes which locks are left, unless the term has ended.
func (f *Former) found(ctx context.Context, left []string, first bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if ctx.Err() != nil {
		return
	}
	if first && len(left) > 0 {
		f.since.Publish(time.Now())
	}
	if len(left) < len(f.locked.Value()) {
		f.locked.Publish(slices.Clone(left))
	}
	if first {
		f.tried.Publish(true)
	}
}
