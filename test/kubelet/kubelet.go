package kubelet

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"
)

// Version says which kubelet's rules are followed.
type Version string

// The versions whose rules are known.
const (
	V136 Version = "1.36" // one client a resource
	V137 Version = "1.37" // one client a resource and socket path
)

// userAgent is how a kubelet of the version names itself in its calls.
func (v Version) userAgent() string {
	if v == V136 {
		return "grpc-go/1.79.3"
	}
	return "grpc-go/1.82.1"
}

// ErrStopped is what a call gets that needs a running kubelet while there is none.
var ErrStopped = errors.New("kubelet is not running")

// Options says how a Kubelet is to be.
type Options struct {
	// Dir is the device plugin directory, /var/lib/kubelet/device-plugins on a node. It is made if
	// missing. Required.
	Dir string
	// PodResourcesSocket is where the PodResources service listens; "" means that there is none.
	PodResourcesSocket string
	// Starting is called when a kubelet that starts answers PodResources and does not listen in Dir
	// yet, which takes a real one 0.2 s.
	Starting func()
	// Version defaults to V137.
	Version Version
	// SeesEndsAfter is how long after the end of a stream the kubelet takes notice of it. A busy one
	// needs milliseconds.
	SeesEndsAfter time.Duration
	// Clock is what the grace of stopped endpoints is measured with; nil means the real one. Time
	// stamps in the log are always real.
	Clock clock.PassiveClock
}

// A Kubelet is one node's kubelet over any number of its process's incarnations. What outlives an
// incarnation on a node outlives it here: the pods, and what is on disk. All methods may be called
// by several goroutines.
type Kubelet struct {
	options Options
	log     *eventLog
	gate    gate
	pods    podTable
	// allocating is what WhileAllocating was told.
	allocating atomic.Pointer[func(Moment)]

	admission sync.Mutex // kubelet admits one pod at a time

	mu      sync.Mutex // guards all following fields
	current *manager   // nil while kubelet is down
}

// Start starts a kubelet. The caller owns it and ends it with Stop.
func Start(o Options) (*Kubelet, error) {
	if o.Version == "" {
		o.Version = V137
	}
	if o.Version != V136 && o.Version != V137 {
		return nil, fmt.Errorf("start kubelet: version %q is neither %q nor %q", o.Version, V136, V137)
	}
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	k := &Kubelet{options: o, log: newEventLog()}
	if err := k.Resume(); err != nil {
		return nil, err
	}
	return k, nil
}

// Stop ends kubelet's process as a kill would: every connection breaks, and its socket files stay
// behind. It returns when no goroutine of it is left. Stopping a stopped kubelet does nothing.
func (k *Kubelet) Stop() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.current == nil {
		return
	}
	k.current.stop()
	k.current = nil
	k.log.add(Event{Kind: Stopped})
}

// Resume starts a stopped kubelet again: it reads its checkpoint, wipes the sockets in its
// directory and listens. Whatever stood in the directory meanwhile is what it finds there.
func (k *Kubelet) Resume() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.current != nil {
		return errors.New("start kubelet: it is running")
	}
	m, err := startManager(k)
	if err != nil {
		return fmt.Errorf("start kubelet: %w", err)
	}
	k.current = m
	k.log.add(Event{Kind: Started})
	return nil
}

// Restart is Stop and Resume.
func (k *Kubelet) Restart() error {
	k.Stop()
	return k.Resume()
}

// RecreateSocket removes kubelet.sock and listens on it again, while all streams live on. The new
// file has another inode: on the same one, made within the same tick of the kernel's clock, nobody
// could tell it from the old one.
func (k *Kubelet) RecreateSocket() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.current == nil {
		return ErrStopped
	}
	old, err := unix.Open(k.Socket(), unix.O_PATH|unix.O_CLOEXEC, 0) // keeps the inode from being used again
	switch {
	case err == nil:
		defer func() { _ = unix.Close(old) }()
	case !errors.Is(err, unix.ENOENT):
		return fmt.Errorf("look at the old socket: %w", err)
	}
	return k.current.listen()
}

// Wipe removes everything in the device plugin directory, the checkpoint included.
func (k *Kubelet) Wipe() error {
	entries, err := os.ReadDir(k.options.Dir)
	if err != nil {
		return fmt.Errorf("wipe the device plugin directory: %w", err)
	}
	for _, entry := range entries {
		if err := os.RemoveAll(filepath.Join(k.options.Dir, entry.Name())); err != nil {
			return fmt.Errorf("wipe the device plugin directory: %w", err)
		}
	}
	return nil
}

// ReplaceDirectory removes the device plugin directory and makes another, empty one of the same
// name.
func (k *Kubelet) ReplaceDirectory() error {
	err := os.RemoveAll(k.options.Dir)
	for errors.Is(err, unix.ENOTEMPTY) { // a plugin made a socket meanwhile
		err = os.RemoveAll(k.options.Dir)
	}
	if err != nil {
		return fmt.Errorf("replace the device plugin directory: %w", err)
	}
	if err := os.Mkdir(k.options.Dir, 0o750); err != nil {
		return fmt.Errorf("replace the device plugin directory: %w", err)
	}
	return nil
}

// Socket returns the path of kubelet.sock.
func (k *Kubelet) Socket() string { return filepath.Join(k.options.Dir, "kubelet.sock") }

// PodResourcesSocket returns the path of the PodResources socket.
func (k *Kubelet) PodResourcesSocket() string { return k.options.PodResourcesSocket }

// DropStream ends kubelet's side of every ListAndWatch stream of a resource, as a broken connection
// would, and says how many there were. Kubelet itself goes on.
func (k *Kubelet) DropStream(resource string) int {
	m, err := k.running()
	if err != nil {
		return 0
	}
	return m.dropStreams(resource)
}

// SetRegister says how Register calls are answered from now on. Calls that hang go on when that
// changes.
func (k *Kubelet) SetRegister(mode RegisterMode) { k.gate.set(mode) }

// SetPodsKnown says whether kubelet knows the node's pods. A kubelet that starts while the API
// server is away does not: PodResources shows none of them, and what they hold is theirs for as
// long. One that was started knows them.
func (k *Kubelet) SetPodsKnown(known bool) { k.pods.setKnown(known) }

// Quantity is what a node shows of one resource.
type Quantity struct {
	Capacity    int // devices known
	Allocatable int // of those, the healthy ones
}

// Resources returns what the node shows, by resource name. Like kubelet's own look at it, made for
// every node status, it forgets those resources whose endpoint has been stopped for over five
// minutes. A kubelet that is down shows nothing.
func (k *Kubelet) Resources() map[string]Quantity {
	m, err := k.running()
	if err != nil {
		return nil
	}
	return m.capacity()
}

// Capacity returns the number of devices of a resource, healthy or not.
func (k *Kubelet) Capacity(resource string) int { return k.Resources()[resource].Capacity }

// Allocatable returns the number of healthy devices of a resource, held by pods or not.
func (k *Kubelet) Allocatable(resource string) int { return k.Resources()[resource].Allocatable }

// OffersNothing reports whether it has no Healthy device of any resource, which it could give to a pod.
func (k *Kubelet) OffersNothing() bool {
	for _, r := range k.Resources() {
		if r.Allocatable > 0 {
			return false
		}
	}
	return true
}

// Devices returns kubelet's account of a resource's devices: ID → true if healthy. Devices whose
// stream has ended are not.
func (k *Kubelet) Devices(resource string) map[string]bool {
	m, err := k.running()
	if err != nil {
		return nil
	}
	return m.devices(resource)
}

func (k *Kubelet) running() (*manager, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.current == nil {
		return nil, ErrStopped
	}
	return k.current, nil
}
