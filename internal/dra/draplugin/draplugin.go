// Package draplugin is the driver of Dynamic Resource Allocation as kubelet sees it: one socket in
// kubelet's folder for plugins, with which kubelet registers it, has claims prepared and
// unprepared, and follows the health of devices.
//
// It keeps nothing between calls, so that two instances may serve one kubelet, as in a roll-out:
// its Claims keep what is prepared. The API server is needed only to prepare a claim.
//
// Package cluster uses it; the program gpu-device-plugin does not link it.
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
	// lookInterval is the pace at which the folder is looked at.
	lookInterval = time.Second
	// registerTimeout is how long kubelet may leave the driver unregistered, or without a connection,
	// until it is offered with another socket. A kubelet needs some seconds for a restart.
	registerTimeout = 30 * time.Second
	// finishTimeout limits the wait for calls that are being answered when the driver ends: kubelet
	// waits for an answer as long.
	finishTimeout = 45 * time.Second
	// nextTimeout is the same when the next life is to begin: kubelet calls no driver meanwhile.
	nextTimeout = 5 * time.Second
	// leftAfter is how long the socket of another process must have refused connections before it is
	// removed: a process that ends refuses them while it answers its last calls, and kubelet, which
	// forgets the driver with its socket, would not get the answers.
	leftAfter = finishTimeout + 15*time.Second
	// connectTimeout limits what comes before the first call of a connection.
	connectTimeout = 5 * time.Second
)

// Why a life ends.
var (
	errSocketRemoved = errors.New("our socket was removed from kubelet's folder for plugins")
	errLeadsAgain    = errors.New("this process leads again, and kubelet calls the one that registered last")
	errForeign       = errors.New("another driver of the same name registers with kubelet")
	errUnregistered  = fmt.Errorf("kubelet has not registered the driver within %v", registerTimeout)
	errKubeletLeft   = fmt.Errorf("kubelet ended its connection and has not registered the driver again within %v",
		registerTimeout)
)

// Claims prepares claims: it decides what a claim gets, and records that. Its methods may be called
// concurrently, also for the same claim.
type Claims interface {
	// Prepare makes the devices of a claim ready for containers. It reads the claim by the function
	// read. For a claim that is prepared already it returns the same result again. The error is a
	// sentence for the Event of the pod.
	Prepare(ctx context.Context, uid string, read func(context.Context) (dra.Claim, error)) ([]dra.Prepared, error)
	// Unprepare takes back what Prepare did. A claim that is not prepared is no error.
	Unprepare(ctx context.Context, uid, namespace, name string) error
}

// A ClaimReader reads claims from the API server.
type ClaimReader interface {
	// Claim returns the claim of that name as it is now.
	Claim(ctx context.Context, namespace, name string) (dra.Claim, error)
}

// Options are the parts of the daemon that a Plugin uses.
type Options struct {
	// RegistryDir is the folder in which kubelet looks for the sockets of plugins, with the path that
	// it has on the node.
	RegistryDir string
	// Driver is the name of the driver; empty for dra.Driver.
	Driver string
	Claims Claims
	Reader ClaimReader
	// Rival returns why a driver of another name may give the same GPUs; empty if none does. Without
	// the function none does.
	Rival func(context.Context) string
	// Pools and Snapshots are the devices in slices and what is known of their GPUs, for the health of
	// devices.
	Pools     *feed.Feed[dra.Pool]
	Snapshots *feed.Feed[inventory.Snapshot]
	// Leads says whether this process leads on the node. While it does not, it does not register, and
	// it forwards calls to the process that leads. Nil means that there is no other process.
	Leads *feed.Feed[bool]
	// Problems are the reasons why containers cannot use a healthy device, by its name. Without the
	// feed there are none.
	Problems *feed.Feed[map[string]string]
	// Clock is the clock to wait by; nil means the real one.
	Clock clock.WithTicker
}

// Status is the state of the driver's registration at kubelet.
type Status struct {
	// Registered says that kubelet has registered the driver and can call it.
	Registered bool
	// Registrations is how often kubelet has registered the driver since the process started. A
	// kubelet that starts deletes the ResourceSlices of the node before it registers drivers.
	Registrations int
	// Problem is why the driver is not registered, a sentence without a full stop; empty if it is.
	Problem string
	// Foreign is the socket of another program's driver of the same name that runs on the node; empty
	// if there is none. While there is one, this one does not register, and nobody may publish
	// devices.
	Foreign string
	// Rival is why a driver of another name may give the same GPUs; empty if none does. While one
	// does, no device may be in a slice.
	Rival string
}

// A Plugin is the driver. Make it with New.
type Plugin struct {
	o      Options
	token  string
	lives  atomic.Uint32 // counts the sockets made
	status *feed.Feed[Status]
	beside *feed.Feed[bool] // whether another process of this program serves, or did until a short time ago
	// earlier is the life before, which serves until kubelet calls the one after it; nil if there is
	// none. It belongs to the goroutine of Run.
	earlier *life
	ending  sync.WaitGroup // earlier lives that are ending

	mu      sync.Mutex // guards all following fields
	current Status
}

// New returns the driver of a process, which Run offers to kubelet.
func New(o Options) *Plugin {
	o.Clock = cmp.Or[clock.WithTicker](o.Clock, clock.RealClock{})
	o.Driver = cmp.Or(o.Driver, dra.Driver)
	if o.Problems == nil {
		o.Problems = feed.New(map[string]string(nil))
	}
	return &Plugin{o: o, token: kubelet.NewToken(), status: feed.New(Status{}), beside: feed.New(false)}
}

// Status returns the feed of the driver's registration at kubelet.
func (s *Plugin) Status() *feed.Feed[Status] { return s.status }

// Ready reports whether kubelet can call the driver, with the reason if it cannot.
func (s *Plugin) Ready(context.Context) (ready bool, reason string) {
	status := s.status.Value()
	return status.Registered, status.Problem
}

// Run offers the driver to kubelet until ctx ends, and then returns nil. It may be called again
// after that.
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
	if s.current.Foreign != "" { // whatever kubelet does with our socket until that is closed
		s.current.Registered = false
		s.current.Problem = fmt.Sprintf("%v with the socket %s; remove that driver from the node", errForeign,
			s.current.Foreign)
	}
	if s.current != before {
		s.status.Publish(s.current)
	}
}

// live offers the driver to kubelet with a new socket, once no other driver of its name is there.
// It returns why that ended; nil if ctx did.
func (s *Plugin) live(parent context.Context) error {
	log := klog.FromContext(parent)
	f := &folder{path: s.o.RegistryDir, driver: s.o.Driver, token: s.token,
		left: kubelet.Sweep{Clock: s.o.Clock, After: leftAfter}}
	if !s.awaitTurn(parent, f) {
		return nil
	}
	name := kubelet.SocketName(socketKind, s.token, s.lives.Add(1))
	path := filepath.Join(f.path, name)
	if len(path) > statefile.MaxSocketPath {
		return fmt.Errorf("use folder %q for the driver's socket: the path of the socket would have %d bytes and Unix allows %d; "+
			"choose a folder whose path is %d bytes shorter", f.path, len(path), statefile.MaxSocketPath, len(path)-statefile.MaxSocketPath)
	}
	socket, err := statefile.Listen(parent, path)
	if err != nil {
		return fmt.Errorf("listen in kubelet's folder for plugins: %w", err)
	}
	// kubelet forgets the driver when the file goes: calls that are being answered would break
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
	log.Info("Offering the driver to kubelet", "socket", name)
	end(life.follow(ctx, f))
	if errors.Is(context.Cause(ctx), errLeadsAgain) {
		s.keep(life)
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

// awaitTurn waits until this process leads, and no driver of the same name is there that is another
// program's. It reports false if ctx ended first.
func (s *Plugin) awaitTurn(ctx context.Context, f *folder) bool {
	for {
		leads := true
		var changed <-chan struct{}
		if s.o.Leads != nil {
			leads, changed = s.o.Leads.Latest()
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
		case <-changed:
		case <-s.o.Clock.After(lookInterval):
		}
	}
}

// look looks at the folder, and publishes what that tells.
func (s *Plugin) look(ctx context.Context, f *folder) others {
	now := s.o.Clock.Now()
	others := f.look(ctx)
	if others.beside {
		f.seen = now
	}
	beside := now.Sub(f.seen) <= healthInterval
	if beside != s.beside.Value() {
		s.beside.Publish(beside)
	}
	rival := ""
	if s.o.Rival != nil {
		rival = s.o.Rival(ctx)
	}
	s.change(func(status *Status) {
		if rival != "" && status.Rival == "" {
			klog.FromContext(ctx).Info("No GPU is given to claims", "reason", rival)
		}
		status.Rival = rival
		if others.foreign != "" && status.Foreign == "" {
			klog.FromContext(ctx).Info("Another driver of the same name registers with kubelet; this one does not until that one has ended",
				"socket", others.foreign)
		}
		status.Foreign = others.foreign
	})
	return others
}

// A life is one socket, from the time at which it is made.
type life struct {
	*Plugin
	log     klog.Logger
	path    string // of the socket
	end     func(error)
	closing chan struct{} // closed when streams are to end
	kubelet *feed.Feed[registration]
	server  *grpc.Server
	served  sync.WaitGroup

	mu    sync.Mutex // guards all following fields
	state registration
	past  bool // another life comes after this one, and the status is that one's
}

// keep lets a life serve on, while the next one registers. Kubelet may not be connected to the
// process that registered last, and call this one: a call that finds no server fails, and kubelet
// repeats it after a minute or more.
func (s *Plugin) keep(l *life) {
	s.endEarlier()
	l.mu.Lock()
	l.past = true
	l.mu.Unlock()
	s.earlier = l
}

// endEarlier begins the end of the life before, if that one still serves.
func (s *Plugin) endEarlier() {
	if s.earlier != nil {
		earlier := s.earlier
		s.ending.Go(func() { earlier.finish(finishTimeout) })
		s.earlier = nil
	}
}

// finish ends the server of a life, and then removes its socket. It waits for calls that are being
// answered, for so long at most.
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

// A registration is what kubelet did with a socket.
type registration struct {
	done      bool // kubelet has registered the driver
	connected int  // open connections that are not for the registration
	left      bool // kubelet has registered, has connected, and has no connection now
}

// ok reports whether kubelet can call the driver.
func (r registration) ok() bool { return r.done && !r.left }

// set changes what is known of the registration.
func (l *life) set(change func(*registration)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before := l.state
	change(&l.state)
	if l.state != before {
		l.kubelet.Publish(l.state)
	}
	if l.state.ok() != before.ok() && !l.past {
		l.change(func(status *Status) {
			status.Registered, status.Problem = l.state.ok(), ""
			if !status.Registered {
				status.Problem = "kubelet ended its connection"
			}
		})
	}
}

// follow returns why the life ends: nil if ctx ended.
func (l *life) follow(ctx context.Context, f *folder) error {
	l.change(func(status *Status) {
		status.Registered, status.Problem = false, "kubelet has not registered the driver yet"
	})
	since, was, led := l.o.Clock.Now(), true, true
	for {
		var moved <-chan struct{}
		leads := true
		if l.o.Leads != nil {
			leads, moved = l.o.Leads.Latest()
		}
		now, changed := l.kubelet.Latest()
		others := l.look(ctx, f)
		switch {
		case others.foreign != "":
			return errForeign
		case leads && !led && others.serves && now.ok(): // it may be stopped, and kubelet would wait for it
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
			l.endEarlier() // no call that kubelet begins now is for that one
		case !ok && lasted >= registerTimeout && now.done:
			return errKubeletLeft
		case !ok && lasted >= registerTimeout:
			return fmt.Errorf("%w; check that it runs and that %s is its folder for plugins", errUnregistered,
				strings.TrimSuffix(f.path, "/"))
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-changed:
		case <-moved:
		case <-l.o.Clock.After(lookInterval):
		}
	}
}
