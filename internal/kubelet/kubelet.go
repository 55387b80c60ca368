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

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
)

// A Directory is the directory of the sockets of the kubelet and the device plugins.
type Directory struct {
	socket string // the kubelet's own socket
	clock  clock.WithTicker
	token  string        // part of the names of this process's sockets
	lives  atomic.Uint32 // counts the endpoints made
	pulse  supervise.Pulse

	registrations registrationLock

	mu sync.Mutex // guards all following fields
	lastCheckpoint
	hasLooked    bool // Watch has scanned the directory
	lastSighting sighting
	// kubelets counts the kubelets seen by Watch.
	kubelets  uint64
	refusal   refusal
	lastProbe time.Time // of the readiness probe by the kubelet; zero before the first
}

// lastCheckpoint is the kubelet's checkpoint at the last read.
type lastCheckpoint struct {
	hasParsed bool       // a checkpoint was read; the other fields describe the last read
	text      []byte     // the file's content
	saved     Checkpoint // the parsed content
	damage    error      // parse error; nil after success
	answers   []Answer   // parsed answers; nil if not requested since
}

// NewDirectory returns the directory of the given kubelet socket. If the path leaves too little
// room for the names of plugin sockets, the error says how many bytes shorter the path must be. A
// nil clock means the real one.
func NewDirectory(socket string, c clock.WithTicker) (*Directory, error) {
	if !filepath.IsAbs(socket) {
		return nil, fmt.Errorf("use socket %q of the kubelet: the path must be absolute", socket)
	}
	if excess := len(filepath.Dir(socket)) + 1 + maxSocketName - statefile.MaxSocketPath; excess > 0 {
		return nil, fmt.Errorf("use socket %q of the kubelet: a socket of ours beside it would have a path of up to "+
			"%d bytes and Unix allows %d; choose a directory whose path is %d bytes shorter",
			socket, statefile.MaxSocketPath+excess, statefile.MaxSocketPath, excess)
	}
	c = cmp.Or[clock.WithTicker](c, clock.RealClock{})
	return &Directory{socket: socket, clock: c, token: NewToken(), pulse: supervise.NewPulse()}, nil
}

// Path returns the path of the directory.
func (d *Directory) Path() string { return filepath.Dir(d.socket) }

// Alive returns an error if Watch does not respond before ctx ends.
func (d *Directory) Alive(ctx context.Context) error { return d.pulse.Check(ctx) }

// ErrNoDirectory is wrapped by errors about a missing or replaced directory.
var ErrNoDirectory = errors.New("no kubelet device-plugin directory")

// Check returns an error that wraps ErrNoDirectory and names the remedy, unless the
// directory exists and is still visible to Watch.
func (d *Directory) Check() error {
	info, err := os.Stat(d.Path())
	switch {
	case err != nil:
		return fmt.Errorf("%w: %w. Start the kubelet, mount the directory into the container, or set "+
			"--kubelet-socket",
			ErrNoDirectory, err)
	case !info.IsDir():
		return fmt.Errorf("%w: %s is not a directory; set --kubelet-socket to the kubelet's socket", ErrNoDirectory,
			d.Path())
	case linkCount(info) == 0:
		return fmt.Errorf("%w: %s was removed on the node and this mount shows what is left of it; only a new "+
			"container can see the new one", ErrNoDirectory, d.Path())
	}
	return nil
}
