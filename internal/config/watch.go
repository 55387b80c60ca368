package config

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"reflect"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

const (
	// quiet is how long the file must be unchanged before it is read: an editor writes in pieces,
	// and half a file may be valid. A ConfigMap's swap also makes several events.
	quiet = 100 * time.Millisecond
	// patience is the longest wait for quiet.
	patience = 500 * time.Millisecond
	// lookEvery is the interval of reads without events: the file may be a link into an unwatched
	// directory.
	lookEvery = 10 * time.Second
	// lookOften is the interval if the directory cannot be watched.
	lookOften = time.Second
)

// A Watcher reads the configuration file again after every change, and publishes valid
// configurations, whose Startup is that of the first one. NewWatcher returns it.
type Watcher struct {
	sources Sources
	clock   clock.WithTicker
	configs *feed.Feed[Config]
	errors  *feed.Feed[error]
	reload  chan struct{} // holds one request
	changes atomic.Uint64
	pulse   supervise.Pulse
	node    func() inventory.Snapshot // the node on which a new configuration is checked; nil for no check
	chosen  error                     // why the file is not the requested file
	loaded  atomic.Int64              // time of the last read of the configuration in force, in nanoseconds since 1970
}

// NewWatcher returns a Watcher of the file of first, which Load made from the same sources. It
// publishes first at once, and starts with Run.
func NewWatcher(s Sources, first Config, c clock.WithTicker) *Watcher {
	s.started = first.started
	w := &Watcher{
		sources: s, clock: c, configs: feed.New(first), errors: feed.New[error](nil), reload: make(chan struct{}, 1),
		pulse: supervise.NewPulse(),
	}
	w.loaded.Store(c.Now().UnixNano())
	return w
}

// JudgeOn makes the Watcher refuse a configuration that must not replace the running
// configuration on a node; see Config.Replaces. Call JudgeOn before Run.
func (w *Watcher) JudgeOn(node func() inventory.Snapshot) { w.node = node }

// Configs returns the feed of valid configurations. A reader with the latest one has nothing to do.
func (w *Watcher) Configs() *feed.Feed[Config] { return w.configs }

// Generation returns the number of the configuration in force, from 1.
func (w *Watcher) Generation() uint64 { return 1 + w.changes.Load() }

// Loaded returns the time of the last read of the configuration in force. A changed file with the
// same configuration also counts.
func (w *Watcher) Loaded() time.Time { return time.Unix(0, w.loaded.Load()) }

// Reload makes the Watcher read the file now, changed or not. It never blocks.
func (w *Watcher) Reload() {
	select {
	case w.reload <- struct{}{}:
	default:
	}
}

// Errors returns the feed of the reason why the present file is not in force; nil while it is.
func (w *Watcher) Errors() *feed.Feed[error] { return w.errors }

// Alive returns an error if the Watcher completes no round before ctx ends.
func (w *Watcher) Alive(ctx context.Context) error { return w.pulse.Check(ctx) }

// Run watches until ctx ends, and then returns nil.
func (w *Watcher) Run(ctx context.Context) error {
	chosen := Chosen{File: w.configs.Value().File}
	var changed <-chan struct{}
	for ctx.Err() == nil {
		if w.sources.Chosen != nil {
			chosen, changed = w.sources.Chosen.Latest()
		}
		w.follow(ctx, chosen, changed)
	}
	return nil
}

// follow watches one file until another is chosen or ctx ends.
func (w *Watcher) follow(ctx context.Context, chosen Chosen, other <-chan struct{}) {
	path := chosen.File
	w.chosen = chosen.Err
	if path == "" {
		w.look(ctx, "", nil, false)
		w.wait(ctx, other)
		return
	}
	pace := lookEvery
	directory, err := watchDirectory(path)
	if err != nil {
		directory, pace = &fsnotify.Watcher{}, lookOften // a Watcher without channels
		klog.FromContext(ctx).Info(
			"Cannot watch the directory of the configuration file; reading the file periodically",
			"path", path, "after", pace.String(), "reason", err.Error())
	} else {
		defer directory.Close()
	}
	ticker := w.clock.NewTicker(pace)
	defer ticker.Stop()
	var settle <-chan time.Time
	var began time.Time // of the unread changes
	changed := func() {
		if settle == nil {
			began = w.clock.Now()
		}
		settle = w.clock.After(min(quiet, patience-w.clock.Since(began)))
	}
	seen := w.look(ctx, path, nil, false)
	for {
		select {
		case <-ctx.Done():
			return
		case <-other:
			return
		case event := <-directory.Events:
			if concerns(event, path) {
				changed()
			}
		case err := <-directory.Errors:
			klog.FromContext(ctx).V(2).Info("Lost events of the configuration file; reading it", "reason", err.Error())
			changed()
		case <-settle:
			settle = nil
			seen = w.look(ctx, path, seen, false)
		case <-ticker.C():
			if settle == nil {
				seen = w.look(ctx, path, seen, false)
			}
		case w.pulse.Heartbeat() <- struct{}{}:
		case <-w.reload:
			seen = w.look(ctx, path, nil, true)
		}
	}
}

// wait waits until another file is chosen or ctx ends.
func (w *Watcher) wait(ctx context.Context, other <-chan struct{}) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-other:
			return
		case w.pulse.Heartbeat() <- struct{}{}:
		}
	}
}

// watchDirectory returns a watcher of the directory of a file. The caller closes it.
func watchDirectory(path string) (*fsnotify.Watcher, error) {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	if err := watcher.Add(filepath.Dir(path)); err != nil {
		_ = watcher.Close() // nothing is watched yet
		return nil, err
	}
	return watcher, nil
}

// concerns reports whether an event can mean a changed file at path: an event of the file itself,
// or of the link by which the kubelet swaps the content of a mounted ConfigMap.
func concerns(event fsnotify.Event, path string) bool {
	return filepath.Clean(event.Name) == filepath.Clean(path) || filepath.Base(event.Name) == "..data"
}

// look reads the file and, after a change, applies it. It returns the content of the file; nil if
// the file cannot be read. After a Reload an error is logged again.
func (w *Watcher) look(ctx context.Context, path string, seen []byte, asked bool) []byte {
	logger := klog.FromContext(ctx)
	var data []byte
	var err error
	if path != "" {
		data, err = readFile(path)
	}
	if err == nil && seen != nil && bytes.Equal(data, seen) {
		return seen
	}
	var next Config
	doc := &document{}
	if err == nil {
		next, doc, err = w.sources.resolve(path, data)
	}
	before := w.configs.Value()
	same := reflect.DeepEqual(next, before)
	if err == nil && !same && doc.empty && path == before.File && isFile(path) {
		err = &Invalid{File: path, Problems: []Remark{{Where: "file", Text: emptied}}}
		data = nil // the next file may be intentionally empty
	}
	if err == nil && !same && w.node != nil {
		if err = next.Replaces(before, w.node()); err != nil {
			data = nil // check again in the next round: the node may have changed
		}
	}
	if err != nil {
		last := w.errors.Value()
		fresh := last == nil || last.Error() != err.Error()
		if fresh {
			w.errors.Publish(err)
		}
		if fresh || asked {
			logger.Error(err, "Cannot use the configuration file; the last valid configuration stays in use")
		}
		return data
	}
	w.loaded.Store(w.clock.Now().UnixNano())
	if w.errors.Value() != w.chosen { //nolint:errorlint // the value itself, which is nil or from chosen
		w.errors.Publish(w.chosen)
	}
	if !same || doc.restarts {
		for _, warning := range doc.warnings.list() {
			logger.Info("Configuration warning", "path", path, "warning", warning.String())
		}
	}
	if same {
		return data
	}
	logger.Info("Configuration changed", "path", path)
	w.changes.Add(1) // before the feed wakes readers of the generation
	w.configs.Publish(next)
	return data
}

// emptied is the problem of a file emptied while the daemon runs, for example by a full
// disk, or by an editor that truncates the file first.
const emptied = "is empty; the last valid configuration stays in use. To use the defaults, write version: v1"

// isFile reports whether path leads to a file other than the null device. NVIDIA's config-manager
// links to the null device on nodes with the defaults.
func isFile(path string) bool {
	info, err := os.Stat(path)
	return err != nil || info.Mode().IsRegular()
}
