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

// Watch publishes which kubelet is there, and the names of the other sockets in the directory,
// at once and after each change, until ctx ends. Then it returns nil. It returns an error that
// wraps ErrNoDirectory when the directory can never again be the kubelet's. It waits for a
// directory that does not exist yet.
//
// The incarnation numbers the kubelets seen since Watch began, from 1. It is 0 while the kubelet's
// socket does not exist. The sockets are the sockets of all device plugins, sorted. They are also
// published, unchanged, when a socket may have appeared or disappeared since.
func (d *Directory) Watch(ctx context.Context, incarnation *feed.Feed[uint64], sockets *feed.Feed[[]string]) error {
	log := klog.FromContext(ctx)
	notices, err := d.newWatcher()
	if err != nil {
		log.Info("Watching kubelet's directory once a second only; raise fs.inotify.max_user_instances to learn of changes at once",
			"reason", err.Error())
		notices = &fsnotify.Watcher{} // nil channels: no notice ever comes
	} else {
		defer func() { _ = notices.Close() }()
	}
	look := &look{directory: d, notices: notices}
	pause := lookInterval
	timer := d.clock.NewTimer(pause)
	defer timer.Stop()
	var left Sweep
	left.Look(ctx, d.Path(), d.ofOthers())
	for noticed := false; ; {
		if err := look.once(log); err != nil {
			return err
		}
		// Sockets come first: when a new kubelet is published, the sockets that it removed are gone.
		if names := d.sockets(); noticed || !look.watches || !slices.Equal(names, sockets.Value()) {
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
			left.Look(ctx, d.Path(), d.ofOthers())
			timer.Reset(pause)
		case event := <-notices.Events:
			noticed = true
			if event.Name == d.Path() {
				look.watched = fileKey{} // a directory that is made anew may have the same inode
			}
			// A notice only says when to look. Two kubelets whose sockets came within one tick of the
			// kernel's clock, on one inode, look alike; the end of the streams tells them apart.
		case err := <-notices.Errors:
			noticed = true
			// An overflow only loses notices: the next look finds the changes.
			log.V(2).Info("Notices about kubelet's directory were lost", "reason", err.Error())
		}
	}
}

// look remembers the result of the last look, to tell one kubelet from the next.
type look struct {
	directory   *Directory
	notices     *fsnotify.Watcher
	watched     fileKey   // the directory that notices come from, or were asked for
	watches     bool      // notices come
	removed     time.Time // since when the directory has no name on the node any more; zero while it has one
	incarnation uint64
	kubelet     fileKey // the kubelet's socket in this incarnation
	present     bool
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
	l.directory.sight(sighting{l.now(), key}, l.incarnation)
	if !l.present {
		return nil
	}
	return l.directory.checkStale(log, key)
}

// pause returns the time to the next look.
func (l *look) pause() time.Duration {
	if l.watches && l.removed.IsZero() {
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

// sight records the result of a look.
func (d *Directory) sight(s sighting, kubelets uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.watched, d.seen, d.kubelets = true, s, kubelets
}

// Kubelets returns how many kubelets were seen since Watch began.
func (d *Directory) Kubelets() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.kubelets
}

// shows reports whether the current socket belongs to the kubelet of an incarnation, as far as
// known from the looks.
func (d *Directory) shows(incarnation uint64) bool {
	key, err := keyOf(d.socket)
	d.mu.Lock()
	defer d.mu.Unlock()
	return !d.watched || err == nil && d.seen == sighting{incarnation, key}
}

// watchDirectory subscribes to notices about the current directory.
func (l *look) watchDirectory(log klog.Logger) error {
	info, err := os.Stat(l.directory.Path())
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			log.V(2).Info("Cannot see kubelet's directory", "reason", err.Error())
		}
		l.watched, l.watches, l.removed = fileKey{}, false, time.Time{}
		return nil
	}
	if linkCount(info) == 0 {
		// A directory that is being removed looks like this for a moment, and a directory behind a mount
		// forever.
		now := l.directory.clock.Now()
		if l.removed.IsZero() {
			l.removed = now
		}
		if now.Sub(l.removed) < lookInterval {
			return nil
		}
		return l.directory.Check()
	}
	l.removed = time.Time{}
	key := keyOfInfo(info)
	key.ctime = syscall.Timespec{} // a directory's changes with every entry
	if key == l.watched || l.notices.Events == nil {
		return nil
	}
	// Where the path leads through a link that was switched, the former directory is still there and
	// watched. The error says that it is not watched, which is so after a removal.
	_ = l.notices.Remove(l.directory.Path())
	err = l.notices.Add(l.directory.Path())
	if l.watches = err == nil; !l.watches {
		log.Info("Watching kubelet's directory once a second only; raise fs.inotify.max_user_watches to learn of changes at once",
			"reason", err.Error())
	}
	l.watched = key // also after a failure: it is said once, and the looks go on
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
