// Package kubelet is the adapter to the kubelet of this node: the directory shared with device
// plugins, the Registration service, and the account of devices (PodResources). It knows the files
// and the protocol. Other packages decide what to do.
//
// The packages below it serve the kubelet:
//
//   - checkpoint: the format of the kubelet's checkpoint of devices.
//   - serve: one gRPC server for each resource: registration, lists and calls, and the order of two
//     processes.
//   - offer: makes the plan of each Snapshot and Config, and withholds devices that are changing,
//     not proven or not ready.
package kubelet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
)

// A Directory is the directory in which kubelet and device plugins put their sockets.
type Directory struct {
	socket string // the kubelet's own socket
	clock  clock.WithTicker
	token  string        // in the names of this process's sockets only
	lives  atomic.Uint32 // counts the endpoints made
	pulse  supervise.Pulse

	registrations registrationLock

	newWatcher func() (*fsnotify.Watcher, error) // replaced by tests only

	mu      sync.Mutex // guards all following fields
	parsed  bool       // a checkpoint was read; text, saved and damage are those of the last one
	text    []byte     // the file's content
	saved   Checkpoint // the parsed content
	damage  error      // why it could not be parsed; nil if it could
	answers []Answer   // those in it; nil if nobody has asked since
	watched bool       // a watch has looked
	seen    sighting   // what it saw last
	// kubelets counts the kubelets seen by Watch.
	kubelets uint64
	refuses  refusal
	probed   time.Time // when the kubelet called the readiness probe last; zero if it never did
}

// NewDirectory returns the directory of the given kubelet socket. If the path leaves too little
// room for the names of plugin sockets, the error says how many bytes shorter the path must be. A
// nil clock means the real one.
func NewDirectory(socket string, c clock.WithTicker) (*Directory, error) {
	if !filepath.IsAbs(socket) {
		return nil, fmt.Errorf("use kubelet socket %q: the path must be absolute", socket)
	}
	if excess := len(filepath.Dir(socket)) + 1 + maxSocketName - statefile.MaxSocketPath; excess > 0 {
		return nil, fmt.Errorf("use kubelet socket %q: a socket of ours beside it would have a path of up to %d bytes "+
			"and Unix "+
			"allows %d; choose a directory whose path is %d bytes shorter", socket, statefile.MaxSocketPath+
			excess, statefile.MaxSocketPath, excess)
	}
	c = cmp.Or[clock.WithTicker](c, clock.RealClock{})
	return &Directory{socket: socket, clock: c, token: NewToken(), pulse: supervise.NewPulse(),
		newWatcher: fsnotify.NewWatcher}, nil
}

// Path returns the path of the directory.
func (d *Directory) Path() string { return filepath.Dir(d.socket) }

// Alive returns an error if Watch does not respond before ctx ends.
func (d *Directory) Alive(ctx context.Context) error { return d.pulse.Check(ctx) }

// ErrNoDirectory is wrapped by errors about a directory that does not exist or was replaced by
// another one.
var ErrNoDirectory = errors.New("no kubelet device-plugin directory")

// Check returns an error that wraps ErrNoDirectory, with the remedy, unless the directory exists
// and Watch still sees it.
func (d *Directory) Check() error {
	info, err := os.Stat(d.Path())
	switch {
	case err != nil:
		return fmt.Errorf("%w: %w; start kubelet, mount its directory into the container, or name its socket with "+
			"--kubelet-socket",
			ErrNoDirectory, err)
	case !info.IsDir():
		return fmt.Errorf("%w: %s is not a directory; name kubelet's socket with --kubelet-socket", ErrNoDirectory, d.Path())
	case linkCount(info) == 0:
		return fmt.Errorf("%w: %s was removed on the node and this mount shows what is left of it; only a new container "+
			"can see "+
			"the new one", ErrNoDirectory, d.Path())
	}
	return nil
}
