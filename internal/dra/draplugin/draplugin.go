// Package draplugin serves the DRA driver to the kubelet: a socket in the kubelet's plugin
// folder. Through the socket the kubelet registers the driver, has claims prepared and
// unprepared, and follows the health of devices.
//
// The package keeps no state between calls, so that two processes may serve one kubelet
// during a rolling update: its Claims keep the prepared claims. The API server is needed
// only to prepare a claim.
//
// Package cluster uses the package; the program gpu-device-plugin does not link it.
package draplugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

const (
	// lookInterval is how often the folder is checked.
	lookInterval = time.Second
	// registerTimeout is how long the kubelet may leave the driver unregistered or unconnected, until
	// the driver tries another socket. A kubelet needs some seconds for a restart.
	registerTimeout = 30 * time.Second
	// finishTimeout limits the wait for calls in progress when the driver stops: the kubelet waits as
	// long for an answer.
	finishTimeout = 45 * time.Second
	// nextTimeout is the same limit before the next life: the kubelet calls no driver meanwhile.
	nextTimeout = 5 * time.Second
	// staleAfter is how long the socket of another process must have refused connections
	// before its removal. A stopping process refuses connections while it answers its last
	// calls. Without the socket the kubelet would forget the driver and miss the answers.
	staleAfter = finishTimeout + 15*time.Second
	// connectTimeout limits the time before the first call of a connection.
	connectTimeout = 5 * time.Second
)

// The reasons why a life ends.
var (
	errSocketRemoved = errors.New("the socket was removed from the kubelet's plugin folder")
	errLeadsAgain    = errors.New("this process leads again, and the kubelet calls the process that registered last")
	errForeign       = errors.New("another driver of the same name registers with the kubelet")
	errUnregistered  = fmt.Errorf("the kubelet has not registered the driver within %v", registerTimeout)
	errKubeletLeft   = fmt.Errorf("the kubelet ended its connection and has not registered the driver again within %v",
		registerTimeout)
)

// Claims decides about claims and records them. All methods may be called concurrently,
// also for the same claim.
type Claims interface {
	// Prepare makes the devices of a claim ready for containers, and returns the same
	// result again for a prepared claim. It reads the claim with read. The error is a
	// sentence for the Event of the pod.
	Prepare(ctx context.Context, uid string, read func(context.Context) (dra.Claim, error)) ([]dra.Prepared, error)
	// Unprepare undoes Prepare. An unprepared claim is no error.
	Unprepare(ctx context.Context, uid, namespace, name string) error
}

// A ClaimReader reads claims from the API server.
type ClaimReader interface {
	// Claim returns the current claim.
	Claim(ctx context.Context, namespace, name string) (dra.Claim, error)
}

// Options configure a Plugin.
type Options struct {
	// RegistryDir is the folder in which the kubelet finds the sockets of plugins, with its path on
	// the node.
	RegistryDir string
	// Driver is the name of the driver; empty for dra.Driver.
	Driver string
	Claims Claims
	Reader ClaimReader
	// CompetingDriver returns why a driver of another name may give the same GPUs; empty
	// without such a driver. May be nil.
	CompetingDriver func(context.Context) string
	// Pools and Snapshots are the devices in slices and the state of their GPUs, for the health of
	// devices.
	Pools     *feed.Feed[dra.Pool]
	Snapshots *feed.Feed[inventory.Snapshot]
	// Leads says whether this process leads on the node. A process without the lead does
	// not register, and forwards calls to the leader. Nil means that there is no other
	// process.
	Leads *feed.Feed[bool]
	// Problems are the reasons why containers cannot use a healthy device, by device name. Without the
	// feed there are none.
	Problems *feed.Feed[map[string]string]
	// Clock is the clock for all waits; nil means the real clock.
	Clock clock.WithTicker
}

// Status is the state of the driver's registration with the kubelet.
type Status struct {
	// Registered says that the kubelet has registered the driver and can call the driver.
	Registered bool
	// Registrations counts the registrations since the process started. A starting kubelet deletes the
	// ResourceSlices of the node before it registers drivers.
	Registrations int
	// Problem is why the driver is not registered, a sentence without a full stop; empty if it is.
	Problem string
	// NameConflict is the socket of another program's driver of the same name on the node;
	// empty if there is none. During a conflict this driver does not register, and must
	// not publish devices.
	NameConflict string
	// CompetingDriver is why a driver of another name may give the same GPUs; empty if none does.
	// Meanwhile no device may be in a slice.
	CompetingDriver string
}

// A Plugin is the driver. Create a Plugin with New.
type Plugin struct {
	o      Options
	token  string
	lives  atomic.Uint32 // counts the created sockets
	status *feed.Feed[Status]
	beside *feed.Feed[bool] // another process of this program serves, or did a short time ago
	// earlier is the previous life, which serves until the kubelet calls the next life; nil if there
	// is none. Used by Run only.
	earlier *life
	ending  sync.WaitGroup // earlier lives that are stopping

	mu      sync.Mutex // guards all following fields
	current Status
}

// New returns the driver of a process. Run offers the driver to the kubelet.
func New(o Options) *Plugin {
	o.Clock = cmp.Or[clock.WithTicker](o.Clock, clock.RealClock{})
	o.Driver = cmp.Or(o.Driver, dra.Driver)
	if o.Problems == nil {
		o.Problems = feed.New(map[string]string(nil))
	}
	return &Plugin{o: o, token: kubelet.NewToken(), status: feed.New(Status{}), beside: feed.New(false)}
}

// Status returns the feed of the driver's registration with the kubelet.
func (s *Plugin) Status() *feed.Feed[Status] { return s.status }

// Ready reports whether the kubelet can call the driver, or why not.
func (s *Plugin) Ready(context.Context) (ready bool, reason string) {
	status := s.status.Value()
	return status.Registered, status.Problem
}

// Run offers the driver to the kubelet until ctx ends, and then returns nil. Further calls
// are allowed afterwards.
func (s *Plugin) Run(ctx context.Context) error {
	defer s.change(func(status *Status) { *status = Status{Registrations: status.Registrations} })
	defer s.ending.Wait()
	defer s.endEarlier()
	backoff := supervise.Backoff{First: time.Second, Most: time.Minute, Proven: time.Minute, Clock: s.o.Clock}
	return supervise.Run(ctx, backoff, func(ctx context.Context) error {
		err := s.live(ctx)
		if err != nil {
			s.change(func(status *Status) { status.Registered, status.Problem = false, err.Error() })
		}
		if errors.Is(err, errSocketRemoved) || errors.Is(err, errForeign) || errors.Is(err, errLeadsAgain) {
			klog.FromContext(ctx).Info("Registering the driver again", "reason", err.Error())
			return nil
		}
		return err
	})
}

// change publishes a changed status.
func (s *Plugin) change(change func(*Status)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.current
	change(&s.current)
	if s.current.NameConflict != "" { // regardless of the kubelet and our socket, until the other one is closed
		s.current.Registered = false
		s.current.Problem = fmt.Sprintf("%v with the socket %s; remove that driver from the node", errForeign,
			s.current.NameConflict)
	}
	if s.current != before {
		s.status.Publish(s.current)
	}
}

// live offers the driver to the kubelet with a new socket as soon as no other driver of the
// same name exists. It returns why the offer ended; nil if ctx ended.
func (s *Plugin) live(parent context.Context) error {
	log := klog.FromContext(parent)
	f := &folder{path: s.o.RegistryDir, driver: s.o.Driver, token: s.token,
		left: kubelet.Sweep{Clock: s.o.Clock, After: staleAfter}}
	if !s.awaitTurn(parent, f) {
		return nil
	}
	name := kubelet.SocketName(socketKind, s.token, s.lives.Add(1))
	path := filepath.Join(f.path, name)
	if len(path) > statefile.MaxSocketPath {
		return fmt.Errorf("use folder %q for the driver's socket: the path of the socket would have %d bytes and "+
			"Unix allows %d; choose a folder whose path is %d bytes shorter",
			f.path, len(path), statefile.MaxSocketPath,
			len(path)-statefile.MaxSocketPath)
	}
	socket, err := statefile.Listen(parent, path)
	if err != nil {
		return fmt.Errorf("listen in the kubelet's plugin folder: %w", err)
	}
	// without the file the kubelet forgets the driver, which would break calls in progress
	socket.SetUnlinkOnClose(false)

	ctx, end := context.WithCancelCause(parent)
	defer end(nil)
	life := &life{Plugin: s, log: log, path: path, end: end, closing: make(chan struct{}),
		kubelet: feed.New(registration{}),
		server:  grpc.NewServer(grpc.ConnectionTimeout(connectTimeout))}
	life.register(life.server)
	life.served.Go(func() {
		if err := life.server.Serve(listener{socket, life}); err != nil {
			end(fmt.Errorf("serve %s: %w", path, err))
		}
	})
	log.Info("Offering the driver to the kubelet", "socket", name)
	end(life.follow(ctx, f))
	if errors.Is(context.Cause(ctx), errLeadsAgain) {
		s.keepServing(life)
		return errLeadsAgain
	}
	s.endEarlier()
	limit := nextTimeout
	if parent.Err() != nil {
		limit = finishTimeout
	}
	life.finish(limit)
	if parent.Err() != nil {
		return nil
	}
	return context.Cause(ctx)
}

// awaitTurn waits until this process leads and no other program has a driver of the same
// name. It reports false if ctx ended first.
func (s *Plugin) awaitTurn(ctx context.Context, f *folder) bool {
	for {
		leads := true
		var leadChanged <-chan struct{}
		if s.o.Leads != nil {
			leads, leadChanged = s.o.Leads.Latest()
		}
		switch others := s.look(ctx, f); {
		case others.foreign != "":
			s.endEarlier()
		case leads:
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-leadChanged:
		case <-s.o.Clock.After(lookInterval):
		}
	}
}

// look checks the folder and publishes the result.
func (s *Plugin) look(ctx context.Context, f *folder) others {
	now := s.o.Clock.Now()
	others := f.look(ctx)
	if others.beside {
		f.lastSeen = now
	}
	beside := now.Sub(f.lastSeen) <= healthInterval
	if beside != s.beside.Value() {
		s.beside.Publish(beside)
	}
	rival := ""
	if s.o.CompetingDriver != nil {
		rival = s.o.CompetingDriver(ctx)
	}
	s.change(func(status *Status) {
		if rival != "" && status.CompetingDriver == "" {
			klog.FromContext(ctx).Info("No GPU is given to claims", "reason", rival)
		}
		status.CompetingDriver = rival
		if others.foreign != "" && status.NameConflict == "" {
			klog.FromContext(ctx).Info("Another driver of the same name is registered; waiting until it stops",
				"socket", others.foreign)
		}
		status.NameConflict = others.foreign
	})
	return others
}

// A life is the use of a socket, from creation to removal.
type life struct {
	*Plugin
	log     klog.Logger
	path    string // of the socket
	end     func(error)
	closing chan struct{} // closed to end the streams
	kubelet *feed.Feed[registration]
	server  *grpc.Server
	served  sync.WaitGroup

	mu       sync.Mutex // guards all following fields
	state    registration
	replaced bool // another life has followed and owns the status
}

// keepServing lets a life continue while the next life registers. The kubelet may still call the
// earlier process: a call without a server fails, and the kubelet repeats it only after a minute or
// more.
func (s *Plugin) keepServing(l *life) {
	s.endEarlier()
	l.mu.Lock()
	l.replaced = true
	l.mu.Unlock()
	s.earlier = l
}

// endEarlier starts to stop the previous life, if it still serves.
func (s *Plugin) endEarlier() {
	if s.earlier != nil {
		earlier := s.earlier
		s.ending.Go(func() { earlier.finish(finishTimeout) })
		s.earlier = nil
	}
}

// finish stops the server of a life and removes its socket. It waits up to limit for calls in
// progress.
func (l *life) finish(limit time.Duration) {
	close(l.closing)
	finished, late := make(chan struct{}), l.o.Clock.NewTimer(limit)
	defer late.Stop()
	go func() {
		l.server.GracefulStop()
		close(finished)
	}()
	select {
	case <-finished:
	case <-late.C():
		l.server.Stop()
		<-finished
	}
	l.served.Wait()
	_ = os.Remove(l.path)
}

// A registration is the kubelet's use of a socket.
type registration struct {
	registered   bool // the kubelet has registered the driver
	connected    int  // open connections for calls, except the connection for the registration
	disconnected bool // the kubelet registered and connected, but has no connection now
}

// ok reports whether the kubelet can call the driver.
func (r registration) ok() bool { return r.registered && !r.disconnected }

// set changes the state of the registration.
func (l *life) set(change func(*registration)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before := l.state
	change(&l.state)
	if l.state != before {
		l.kubelet.Publish(l.state)
	}
	if l.state.ok() != before.ok() && !l.replaced {
		l.change(func(status *Status) {
			status.Registered, status.Problem = l.state.ok(), ""
			if !status.Registered {
				status.Problem = "the kubelet ended its connection"
			}
		})
	}
}

// follow waits for the end of the life, and returns why it ended: nil if ctx ended.
func (l *life) follow(ctx context.Context, f *folder) error {
	l.change(func(status *Status) {
		status.Registered, status.Problem = false, "the kubelet has not registered the driver yet"
	})
	since, was, led := l.o.Clock.Now(), true, true
	for {
		var leadChanged <-chan struct{}
		leads := true
		if l.o.Leads != nil {
			leads, leadChanged = l.o.Leads.Latest()
		}
		now, changed := l.kubelet.Latest()
		others := l.look(ctx, f)
		switch {
		case others.foreign != "":
			return errForeign
		// ^The leader may be paused, and then the kubelet would wait for the leader.
		case leads && !led && others.serves && now.ok():
			return errLeadsAgain
		}
		led = leads && (led || !others.serves)
		if _, err := os.Lstat(l.path); errors.Is(err, os.ErrNotExist) {
			return errSocketRemoved
		}
		switch ok, lasted := now.ok(), l.o.Clock.Since(since); {
		case ok != was:
			since, was = l.o.Clock.Now(), ok
		case ok && (now.connected > 0 && lasted >= lookInterval || lasted >= registerTimeout):
			l.endEarlier() // new calls of the kubelet come to this life
		case !ok && lasted >= registerTimeout && now.registered:
			return errKubeletLeft
		case !ok && lasted >= registerTimeout:
			return fmt.Errorf("%w; check that it runs and that %s is its plugin folder", errUnregistered,
				strings.TrimSuffix(f.path, "/"))
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-changed:
		case <-leadChanged:
		case <-l.o.Clock.After(lookInterval):
		}
	}
}
