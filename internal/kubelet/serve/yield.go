package serve

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/yield"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
)

// Two servers of one resource never send lists in turn: the kubelet uses the list that it received
// last, and allocates devices through the server that registered last. So a server sends no list
// while a later process has a socket for the resource. When that process has ended, a new
// registration begins and sends its list. Package yield has the rules, and explains the words.

// returnTimeout is how long a muted server waits for the later server at a new kubelet, which has
// removed the sockets of both.
const returnTimeout = time.Second

// previous is the state that one registration leaves to the next.
type previous struct {
	socket    *listener // still accepts connections: other processes see that this one goes on; nil if there is none
	yielded   bool      // the registration was muted by a later server when it ended
	disputes  listing.Disputes
	earlyEnds int // see pauseAfterManyEnds
	keptServer
	// unlock lets other processes register after this process has ended; nil if they are not locked
	// out.
	unlock func()

	mu      sync.Mutex     // guards endsBy and state
	endsBy  time.Time      // when this process ends at the latest, without leaveTimeout; zero if it does not end
	state   yield.State    // what this process knows of the others
	leaving feed.Feed[int] // how many others have announced their end
}

// A keptServer is the server of the previous registration, whose stream stays open beside the
// current stream.
type keptServer struct {
	stopKept func() // ends the server; nil if there is none
	// serveKept makes the server accept connections on another socket. reachable says that the
	// server does so, because no registration is running.
	serveKept func(*net.UnixListener) *listener
	reachable bool
	// prepareEnd prepares the end of this process while the server is its newest.
	prepareEnd func()
}

// release closes the socket of the last registration.
func (p *previous) release() {
	p.reachable = false
	if p.socket != nil {
		p.socket.release()
	}
}

// tell calls f with the state, to record what happened.
func (p *previous) tell(f func(*yield.State)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f(&p.state)
}

// know returns the result of f for the state, which it first tells which sockets there are.
func know[T any](p *previous, peers kubelet.Peers, f func(*yield.State) T) T {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state.Refresh(peers)
	return f(&p.state)
}

// server returns what the registration knows of itself and of other servers.
func (l *registration) server() yield.Server {
	return yield.Server{Listed: l.sent.Value() != nil, Promised: l.reregisterPromised.Value(), Mute: l.mute.Value(),
		Peers: l.Registrar.Peers(l.list.name)}
}

// later returns the sockets of later processes that may serve the resource.
func (l *registration) later() []string {
	peers := l.Registrar.Peers(l.list.name)
	return know(l.previous, peers, func(s *yield.State) []string { return s.Running(peers) })
}

// maySend reports whether a list may be sent now. The channel is closed when the answer may have
// changed. maySend reads the directory itself, because the notice of a later server's socket may
// arrive later than that server's list.
func (l *registration) maySend() (bool, <-chan struct{}) {
	now, changed := l.mute.Latest()
	if now == yield.MuteNone && len(l.later()) > 0 {
		l.mute.Publish(yield.MuteLaterProcess)
		now = yield.MuteLaterProcess
	}
	return now == yield.MuteNone, changed
}

// awaitLaterEnds waits until no later process serves the resource. It returns false when ctx ends
// or another kubelet starts.
func (l *registration) awaitLaterEnds(ctx context.Context, incarnation uint64) bool {
	if l.previous.yielded {
		l.previous.yielded = false
		l.awaitLater(ctx)
	}
	for {
		_, leavingChanged := l.previous.leaving.Latest()
		later := l.later()
		if len(later) == 0 {
			break
		}
		l.listenAgain(ctx)
		l.report(PhaseYielding)
		if err := l.awaitEnd(ctx, incarnation, later, leavingChanged); err != nil {
			l.previous.yielded = errors.Is(err, errKubeletLeft)
			return false
		}
		// A kubelet up to 1.36 stops its endpoint of the resource when it notices that end. An
		// earlier registration is stopped, too, and a list sent after the registration hides the
		// stop.
		l.awaitStopped(ctx, incarnation)
	}
	return ctx.Err() == nil
}

// awaitLater waits for a later process to have a socket again, for a second at most.
func (l *registration) awaitLater(ctx context.Context) {
	timer := l.Clock.NewTimer(returnTimeout)
	defer timer.Stop()
	for {
		_, socketsChanged := l.Sockets.Latest()
		if len(l.later()) > 0 {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-timer.C():
			return
		case <-socketsChanged:
		}
	}
}

// yield sends nothing until no later process serves the resource. It returns nil if no later
// process was registered, and otherwise an error that ends this registration. Until then the stream
// stays open: at its end, the kubelet 1.36 would close the connection to the later server.
func (l *registration) yield(ctx context.Context, incarnation uint64) error {
	log := klog.FromContext(ctx)
	l.previous.tell((*yield.State).NoteYield)
	l.mute.Publish(yield.MuteLaterProcess)
	l.report(PhaseYielding)
	log.Info("Sending no more lists: a process that started later serves the resource")
	account := yield.AccountUnknown
	for {
		_, leavingChanged := l.previous.leaving.Latest()
		peers, running := l.Registrar.Peers(l.list.name), []string(nil)
		switch know(l.previous, peers, func(s *yield.State) yield.Step {
			running = s.Running(peers)
			return s.Yielding(peers, account)
		}) {
		case yield.AwaitEnd:
			account = yield.AccountUnknown
			if err := l.awaitEnd(ctx, incarnation, running, leavingChanged); err != nil {
				l.previous.yielded = true // the kubelet has left, or ended the stream as it left
				return err
			}
		case yield.TakeOver:
			return errTakesOver
		case yield.Compare:
			account = yield.AccountChanged
			if l.undisturbed(ctx, incarnation) {
				account = yield.AccountKept
			}
		case yield.RegisterAgain:
			return errOtherEnded
		case yield.Resume:
			log.Info("Sending lists again: the kubelet kept the registration")
			l.mute.Publish(yield.MuteNone)
			l.report(PhaseServing)
			return nil
		}
	}
}

// undisturbed reports whether the kubelet still uses the last list of this registration, some time
// after another server ended. The kubelet 1.36 does so only if the other server was never
// registered: at the end of a registered server, all devices would count as unhealthy.
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

// awaitEnd waits until one of the servers with these sockets has ended, or leavingChanged is closed
// because another process announces its end. An error means that the kubelet stopped or ctx ended.
func (l *registration) awaitEnd(ctx context.Context, incarnation uint64, sockets []string,
	leavingChanged <-chan struct{}) error {
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
		case <-leavingChanged:
			return nil
		case name := <-ended:
			l.previous.tell(func(s *yield.State) { s.NoteEnd(name) })
			return nil
		}
	}
}
