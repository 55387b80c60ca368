package kubelet

import (
	"errors"

	"github.com/fsnotify/fsnotify"
)

// WithoutNotices has the directory watched as if inotify were exhausted: no test may exhaust that
// of its machine.
func (d *Directory) WithoutNotices() {
	d.newWatcher = func() (*fsnotify.Watcher, error) { return nil, errors.New("too many open files") }
}
