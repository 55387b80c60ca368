package claims

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/files"
)

// Version 0.1 knew no lead: its processes answered calls for claims beside each other, each under locks in one file, and kept tombstones on
// disk. What is in this file is for a roll-out from that version or back to it, and goes with the release after the next.
const (
	formerLock      = "claims.lock"
	formerTombstone = ".gone"
	// formerTimeout is how long processes of that version have to end their calls. One that hangs is not waited for.
	formerTimeout = 5 * time.Second
	formerPause   = 20 * time.Millisecond
)

// lockOut keeps processes of the former version from changing claims until release is called. It waits for calls that they are answering,
// for some seconds at most. It takes a share, so that one that led before and was stopped is not waited for.
func lockOut(ctx context.Context, dir string) (release func()) {
	for _, name := range names(store{dir: dir}.folder()) {
		if strings.HasSuffix(name, formerTombstone) {
			_ = files.Remove(filepath.Join(store{dir: dir}.folder(), name)) // another time does as well
		}
	}
	path := filepath.Join(dir, formerLock)
	release = func() {}
	err := files.AwaitLock(ctx, clock.RealClock{}, formerTimeout, formerPause, func() error {
		share, err := files.TakeShare(path) // such a process may come later
		if err == nil {
			release = share.Close
		}
		return err // without the folder, or on a disk that cannot be written, that version has no claims either
	})
	if errors.Is(err, files.ErrLocked) {
		klog.FromContext(ctx).Info("Another process has a lock of claims still", "path", path)
	}
	return release
}
