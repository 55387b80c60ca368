package serve

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
)

// Two servers of one resource never send lists in turn: the kubelet uses the list
// that it received last, and allocates devices through the server that registered
// last. So a server sends no list while a later process has a socket for the
// resource. When that process has ended, a new registration begins and sends its
// list.

// returnTimeout is how long a muted server waits for the later server at a new
// kubelet, which has removed the sockets of both.
const returnTimeout = time.Second

// previous is the state that one registration leaves to the next.
type previous struct {
	socket   *listener // still accepts connections: other processes see that this one goes on; nil if there is none
	yielded  bool      // the registration was muted by a later server when it ended
	disputes listing.Disputes
	keptServer
	// unlock lets other processes register after this process has ended; nil if
	// they are not locked out.
	unlock func()

	mu           sync.Mutex      // guards all following fields
	endedSockets map[string]bool // sockets of later processes that ended without removing them
	forgetting
	ending bool // this process is ending, or no longer serves the resource
	// the tokens of processes that announced their end, with the value of forgotten
	// at that time
	leaving      map[string]int
	leavingCount feed.Feed[int] // changes when another one has said so
}

// A keptServer is the server of the previous registration, whose stream stays open beside the current
// stream.
type keptServer struct {
	stopKept func() // ends the server; nil if there is none
	// serveKept makes the server accept connections on another socket. reachable says that the server
	// does so, because no registration is running.
	serveKept func(*net.UnixListener) *listener
	reachable bool
	// prepareEnd prepares the end of this process while the server is its newest.
	prepareEnd func()
}

// forgetting counts how often an earlier process has made the kubelet forget this process.
type forgetting struct {
	// forgottenAtAccept is the value of forgotten when the last accepted registration began. If forgotten
	// is larger, the kubelet may not know this process: an earlier process may end while the kubelet
	// handles a registration.
	forgotten, forgottenAtAccept int
	forgottenAtStart             int // when the last registration began
}

// release closes the socket of the last registration.
func (p *previous) release() {
	p.reachable = false
	if p.socket != nil {
		p.socket.release()
	}
}

// noteEnd records that the server behind a socket has ended.
func (p *previous) noteEnd(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.endedSockets == nil {
		p.endedSockets = map[string]bool{}
	}
	p.endedSockets[name] = true
}

// later returns the sockets of later processes that may serve the resource.
func (l *registration) later() []string {
	return l.previous.running(l.Registrar.Peers(l.list.name).Later)
}

// running returns the sockets of later processes whose servers have not ended and
// have not announced their end.
func (p *previous) running(names []string) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.forgetLeaving(names)
	return slices.DeleteFunc(slices.Clone(names),
		func(name string) bool { return p.endedSockets[name] || p.isLeaving(name) })
}

// A mute says why a server sends no list.
type mute int

const (
	muteNone           mute = iota
	muteLaterProcess        // a process that started later
	muteOtherPlugin         // another program, which has registered since
	muteAccountDiffers      // the kubelet's account differs, and the reason is not known yet
	muteReplaced            // the next registration has the list
)

// maySend reports whether a list may be sent now. The channel is closed when the
// answer may have changed. maySend reads the directory itself, because the notice
// of a later server's socket may arrive later than that server's list.
func (l *registration) maySend() (bool, <-chan struct{}) {
	now, changed := l.mute.Latest()
	if now == muteNone && len(l.later()) > 0 {
		l.mute.Publish(muteLaterProcess)
		now = muteLaterProcess
	}
	return now == muteNone, changed
}

// awaitLaterEnds waits until no later process serves the resource. It returns false
// when ctx ends or another kubelet starts.
func (l *registration) awaitLaterEnds(ctx context.Context, incarnation uint64) bool {
	if l.previous.yielded {
		l.previous.yielded = false
		l.awaitLater(ctx)
	}
	for {
		_, left := l.previous.leavingCount.Latest()
		later := l.later()
		if len(later) == 0 {
			break
		}
		l.beReachable(ctx)
		l.report(PhaseYielding)
		if err := l.awaitEnd(ctx, incarnation, later, left); err != nil {
			l.previous.yielded = errors.Is(err, errKubeletLeft)
			return false
		}
		// A kubelet up to 1.36 stops its endpoint of the resource when it notices
		// that end. An earlier registration is stopped, too, and a list sent after
		// the registration hides the stop.
		l.awaitStopped(ctx, incarnation)
	}
	return ctx.Err() == nil
}

// awaitLater waits for a later process to have a socket again, for a second at
// most.
func (l *registration) awaitLater(ctx context.Context) {
	timer := l.Clock.NewTimer(returnTimeout)
	defer timer.Stop()
	for {
		_, moved := l.Sockets.Latest()
		if len(l.later()) > 0 {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-timer.C():
			return
		case <-moved:
		}
	}
}

// yield sends nothing until no later process serves the resource. It returns nil if
// no later process was registered, and otherwise an error that ends this
// registration. Until then the stream stays open: at its end, the kubelet 1.36
// would close the connection to the later server.
func (l *registration) yield(ctx context.Context, incarnation uint64) error {
	log := klog.FromContext(ctx)
	l.mute.Publish(muteLaterProcess)
	l.report(PhaseYielding)
	log.Info("Sending no more lists: a process that started later serves the resource")
	for {
		_, left := l.previous.leavingCount.Latest()
		if later := l.later(); len(later) > 0 {
			if err := l.awaitEnd(ctx, incarnation, later, left); err != nil {
				l.previous.yielded = true // the kubelet has left, or ended the stream as it left
				return err
			}
			continue
		}
		if len(l.previous.ofLeaving(l.Registrar.Peers(l.list.name).Later)) > 0 {
			return errTakesOver
		}
		switch kept := l.undisturbed(ctx, incarnation); {
		case len(l.later()) > 0: // another one
		case !kept || l.previous.isForgotten():
			return errOtherEnded
		default:
			log.Info("Sending lists again: the kubelet kept the registration")
			l.mute.Publish(muteNone)
			l.report(PhaseServing)
			return nil
		}
	}
}

// undisturbed reports whether the kubelet still uses the last list of this
// registration, some time after another server ended. The kubelet 1.36 does so only
// if the other server was never registered: at the end of a registered server, all
// devices would count as unhealthy.
func (l *registration) undisturbed(ctx context.Context, incarnation uint64) bool {
	for _, d := range []time.Duration{stopDelay, checkSoon} {
		if !l.pause(ctx, incarnation, d) {
			return false
		}
		ids, err := l.allocatable(ctx)
		sent := l.sent.Value()
		if err != nil || sent == nil || len(ids) == 0 || !listing.SameIDs(ids, healthyIDs(sent)) {
			return false
		}
	}
	return true
}

// awaitEnd waits until one of the servers with these sockets has ended, or left is
// closed because another process announces its end. An error means that the kubelet
// stopped or ctx ended.
func (l *registration) awaitEnd(ctx context.Context, incarnation uint64, sockets []string, left <-chan struct{}) error {
	var waits sync.WaitGroup
	defer waits.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan string, len(sockets))
	for _, name := range sockets {
		waits.Go(func() {
			if l.Registrar.AwaitEnd(ctx, name) == nil {
				ended <- name
			}
		})
	}
	for {
		now, changed := l.Incarnation.Latest()
		if now != incarnation {
			return errKubeletLeft
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		case <-left:
			return nil
		case name := <-ended:
			l.previous.noteEnd(name)
			return nil
		}
	}
}
