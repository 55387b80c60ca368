// Package kubelet is the adapter to the kubelet of this node: the directory it shares with device plugins, its
// Registration service, and its account of devices (PodResources). It knows the files and the wire; what to do about
// them is decided elsewhere.
//
// Only package cli creates its values.
package kubelet

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/fsnotify/fsnotify"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/files"
)

const (
	// socketPrefix begins the name of every socket of ours.
	socketPrefix = "gpu-device-plugin-"
	// maxResourcePart is how much of a resource's name goes into a socket's name: enough to tell sockets apart in a
	// listing. What makes a name unique is the token and the number behind it.
	maxResourcePart = 16
	// tokenLength is the number of random characters in a process's token, of 5 bits each.
	tokenLength = 8
	// counterLength bounds the digits of a life's number.
	counterLength = 7
	// maxSocketName is the length of the longest name that NewEndpoint makes.
	maxSocketName = len(socketPrefix) + maxResourcePart + 1 + tokenLength + 1 + counterLength + len(".sock")
)

// A Directory is the directory in which kubelet and device plugins put their sockets.
type Directory struct {
	socket string // kubelet's own socket
	clock  clock.WithTicker
	token  string        // in the names of this process's sockets only
	lives  atomic.Uint32 // counts the endpoints made

	newWatcher func() (*fsnotify.Watcher, error) // replaced by tests only

	mu      sync.Mutex // guards all following fields
	parsed  bool       // a checkpoint was read; text and saved are the last one's
	text    []byte     // as it was in the file
	saved   Checkpoint // what it says
	watched bool       // a watch has looked
	seen    sighting   // what it saw last
}

// NewDirectory returns the directory of the given kubelet socket. A path that leaves too little room for the names of
// plugin sockets is an error that says how many bytes it has to lose. A nil clock means the real one.
func NewDirectory(socket string, c clock.WithTicker) (*Directory, error) {
	if !filepath.IsAbs(socket) {
		return nil, fmt.Errorf("use kubelet socket %q: the path must be absolute", socket)
	}
	if excess := len(filepath.Dir(socket)) + 1 + maxSocketName - files.MaxSocketPath; excess > 0 {
		return nil, fmt.Errorf("use kubelet socket %q: a socket of ours beside it would have a path of up to %d bytes and Unix "+
			"allows %d; choose a directory whose path is %d bytes shorter", socket, files.MaxSocketPath+excess, files.MaxSocketPath, excess)
	}
	if c == nil {
		c = clock.RealClock{}
	}
	return &Directory{socket: socket, clock: c, token: strings.ToLower(rand.Text()[:tokenLength]),
		newWatcher: fsnotify.NewWatcher}, nil
}

// Path returns the path of the directory.
func (d *Directory) Path() string { return filepath.Dir(d.socket) }

// NewEndpoint returns the path of a socket for resource that was never used before, by this process or another. (A
// process ID would not do: in a container it is 1 each time.)
func (d *Directory) NewEndpoint(resource string) string {
	_, name, found := strings.Cut(resource, "/")
	if !found {
		name = resource
	}
	if len(name) > maxResourcePart {
		name = name[:maxResourcePart]
	}
	return filepath.Join(d.Path(), fmt.Sprintf("%s%s-%s-%d.sock", socketPrefix, name, d.token, d.lives.Add(1)))
}

// Ours reports whether NewEndpoint made the socket of that name.
func (d *Directory) Ours(name string) bool {
	return strings.HasPrefix(name, socketPrefix) && strings.Contains(name, "-"+d.token+"-")
}

// ErrNoDirectory is wrapped by errors about a directory that is not there or is not the one that the node uses any
// more.
var ErrNoDirectory = errors.New("no kubelet device-plugin directory")

// Check returns an error that wraps ErrNoDirectory, with the remedy, unless the directory is there and alive.
func (d *Directory) Check() error {
	info, err := os.Stat(d.Path())
	switch {
	case err != nil:
		return fmt.Errorf("%w: %w; start kubelet, mount its directory into the container, or name its socket with --kubelet-socket",
			ErrNoDirectory, err)
	case !info.IsDir():
		return fmt.Errorf("%w: %s is not a directory; name kubelet's socket with --kubelet-socket", ErrNoDirectory, d.Path())
	case linkCount(info) == 0:
		return fmt.Errorf("%w: %s was removed on the node and this mount shows what is left of it; only a new container can see "+
			"the new one", ErrNoDirectory, d.Path())
	}
	return nil
}
