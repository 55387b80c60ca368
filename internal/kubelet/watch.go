package kubelet

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
)

const (
	// lookInterval is how often the directory is checked without notices: inotify is exhausted, or the
	// directory does not exist.
	lookInterval = time.Second
	// lookRarely is how often the directory is checked in addition to notices, because inotify does
	// not report a filesystem mounted over the directory. Each check wakes an idle process.
	lookRarely = 5 * time.Second
)

// Watch publishes the present kubelet and the names of the other sockets in the directory,
// at once and after each change. It returns nil when ctx ends, and an error that wraps
// ErrNoDirectory when the directory can never again be the kubelet's. Watch waits for a
// directory that does not exist yet.
//
// The incarnation numbers the kubelets since Watch began, from 1, and is 0 while the
// kubelet's socket does not exist. The sockets are the sorted sockets of all device plugins.
// Watch also publishes unchanged names when a socket may have appeared or disappeared since.
func (d *Directory) Watch(ctx context.Context, incarnation *feed.Feed[uint64], sockets *feed.Feed[[]string]) error {
	log := klog.FromContext(ctx)
	notices, err := fsnotify.NewWatcher()
	if err != nil {
		log.Info("Watching the kubelet's directory only once a second; raise fs.inotify.max_user_instances",
			"reason", err.Error())
		notices = &fsnotify.Watcher{} // nil channels: no notice ever comes
	} else {
		defer func() { _ = notices.Close() }()
	}
	look := &look{directory: d, notices: notices}
	pause := lookInterval
	timer := d.clock.NewTimer(pause)
	defer timer.Stop()
	var sweep Sweep
	sweep.Look(ctx, d.Path(), d.ofOthers())
	for noticed := false; ; {
		if err := look.once(log); err != nil {
			return err
		}
		// Sockets come first: a new kubelet removes all sockets before Watch publishes the
		// kubelet.
		if names := d.sockets(); noticed || !look.hasNotices || !slices.Equal(names, sockets.Value()) {
			sockets.Publish(names)
		}
		if now := look.now(); now != incarnation.Value() {
			incarnation.Publish(now)
		}
		if p := look.pause(); p != pause {
			pause = p
			timer.Reset(pause)
		}
		noticed = false
		select {
		case <-ctx.Done():
			return nil
		case d.pulse.Heartbeat() <- struct{}{}:
		case <-timer.C():
			sweep.Look(ctx, d.Path(), d.ofOthers())
			timer.Reset(pause)
		case event := <-notices.Events:
			noticed = true
			if event.Name == d.Path() {
				look.watchedKey = fileKey{} // a directory created again may have the same inode
			}
			// A notice only triggers a scan. Two kubelets with sockets from one tick of the
			// kernel's clock, on one inode, look alike; the end of the streams tells them
			// apart.
		case err := <-notices.Errors:
			noticed = true
			// An overflow only loses notices: the next look finds the changes.
			log.V(2).Info("Notices about the kubelet's directory were lost", "reason", err.Error())
		}
	}
}

// look has the result of the last scan, to tell one kubelet from the next.
type look struct {
	directory    *Directory
	notices      *fsnotify.Watcher
	watchedKey   fileKey // the directory of the subscribed notices
	hasNotices   bool
	removedSince time.Time // since when the directory has no name on the node; zero while it has a name
	incarnation  uint64
	kubelet      fileKey // the kubelet's socket in this incarnation
	present      bool
}

func (l *look) once(log klog.Logger) error {
	if err := l.watchDirectory(log); err != nil {
		return err
	}
	key, err := keyOf(l.directory.socket)
	if err == nil && (!l.present || key != l.kubelet) {
		l.incarnation++
		l.kubelet = key
	}
	l.present = err == nil
	l.directory.recordSighting(sighting{l.now(), key}, l.incarnation)
	if !l.present {
		return nil
	}
	return l.directory.checkStale(log, key)
}

// pause returns the time to the next look.
func (l *look) pause() time.Duration {
	if l.hasNotices && l.removedSince.IsZero() {
		return lookRarely
	}
	return lookInterval
}

// now returns the incarnation of the kubelet that is there; 0 if none is.
func (l *look) now() uint64 {
	if !l.present {
		return 0
	}
	return l.incarnation
}

// A sighting is an observed kubelet. The zero value means no kubelet.
type sighting struct {
	incarnation uint64
	socket      fileKey
}

// recordSighting records the result of a scan.
func (d *Directory) recordSighting(s sighting, kubelets uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.hasLooked, d.lastSighting, d.kubelets = true, s, kubelets
}

// Kubelets returns how many kubelets were seen since Watch began.
func (d *Directory) Kubelets() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.kubelets
}

// shows reports whether the current socket belongs to the kubelet of an incarnation, as far
// as known from the scans.
func (d *Directory) shows(incarnation uint64) bool {
	key, err := keyOf(d.socket)
	d.mu.Lock()
	defer d.mu.Unlock()
	return !d.hasLooked || err == nil && d.lastSighting == sighting{incarnation, key}
}

// watchDirectory subscribes to notices about the current directory.
func (l *look) watchDirectory(log klog.Logger) error {
	info, err := os.Stat(l.directory.Path())
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			log.V(2).Info("Cannot see the kubelet's directory", "reason", err.Error())
		}
		l.watchedKey, l.hasNotices, l.removedSince = fileKey{}, false, time.Time{}
		return nil
	}
	if linkCount(info) == 0 {
		// A directory being removed looks like this for a moment, and a directory behind a
		// mount forever.
		now := l.directory.clock.Now()
		if l.removedSince.IsZero() {
			l.removedSince = now
		}
		if now.Sub(l.removedSince) < lookInterval {
			return nil
		}
		return l.directory.Check()
	}
	l.removedSince = time.Time{}
	key := keyOfInfo(info)
	key.ctime = syscall.Timespec{} // a directory's changes with every entry
	if key == l.watchedKey || l.notices.Events == nil {
		return nil
	}
	// After a switched link in the path, the former directory still exists and is still
	// watched. An error of Remove says that the directory was not watched, as after a
	// removal.
	_ = l.notices.Remove(l.directory.Path())
	err = l.notices.Add(l.directory.Path())
	if l.hasNotices = err == nil; !l.hasNotices {
		log.Info("Watching the kubelet's directory only once a second; raise fs.inotify.max_user_watches",
			"reason", err.Error())
	}
	l.watchedKey = key // also after a failure: one log line, and the scans go on
	return nil
}

// fileKey tells a file from another file of the same name. An inode alone is not enough, because
// ext4 reuses inodes at once.
type fileKey struct {
	device, inode uint64
	ctime         syscall.Timespec
}

func keyOf(path string) (fileKey, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return fileKey{}, err
	}
	return keyOfInfo(info), nil
}

func keyOfInfo(info fs.FileInfo) fileKey {
	stat := info.Sys().(*syscall.Stat_t) // os.Stat on Linux gives nothing else
	return fileKey{device: uint64(stat.Dev), inode: stat.Ino, ctime: stat.Ctim}
}

func linkCount(info fs.FileInfo) uint64 { return uint64(info.Sys().(*syscall.Stat_t).Nlink) }
