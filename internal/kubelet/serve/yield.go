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
)

// Two servers of one resource never send lists in turn: kubelet goes by the list that it received
// last, and gives devices out through the server that registered last. So a server is silent from
// the moment that a later process has a socket for the resource, until that process has ended. Then
// a new life registers and sends its list.

// returnTimeout is how long a server that was silent waits for the later one at a new kubelet,
// which has removed the sockets of both.
const returnTimeout = time.Second

// past is what one life of a server leaves to the next.
type past struct {
	socket   *listener // still accepts connections: other processes see that this one goes on; nil if there is none
	yielded  bool      // the life was silent because of a later server when it ended
	disputes disputes
	// kept ends the server of the life before, whose stream stays open beside that of this one; nil if
	// there is none.
	kept func()
	// serveKept has that server accept connections on another socket. reachable says that it does, as
	// there is no life.
	serveKept func(*net.UnixListener) *listener
	reachable bool
	// prepareEnd prepares the end of this process, where that server is its newest.
	prepareEnd func()
	// unlock lets other processes register when this one has ended; nil if it does not keep them from
	// it.
	unlock func()

	mu    sync.Mutex      // guards all following fields
	ended map[string]bool // sockets of later processes that ended without removing them
	// forgotten is the number of times that an earlier process has made kubelet forget this one. known
	// is what forgotten was when the last accepted registration began. If forgotten is larger than
	// known, kubelet may not know this process: an earlier process may end while kubelet handles a
	// registration.
	forgotten, known int
	began            int            // what forgotten was when the last registration began
	ending           bool           // this process is ending, or no longer serves the resource
	leaving          map[string]int // the tokens of processes that said that they are ending, with what forgotten was then
	left             feed.Feed[int] // changes when another one has said so
}

// release closes the socket of the last life.
func (p *past) release() {
	p.reachable = false
	if p.socket != nil {
		p.socket.release()
	}
}

// end notes that the server behind a socket has ended.
func (p *past) end(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended == nil {
		p.ended = map[string]bool{}
	}
	p.ended[name] = true
}

// later returns the sockets of processes that started later than this one and that may serve the
// resource.
func (l *life) later() []string {
	return l.past.running(l.Registrar.Rivals(l.list.name).Later)
}

// running returns those of the sockets of all later processes whose servers were not seen to have
// ended, and did not say that they do.
func (p *past) running(names []string) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.forgetLeaving(names)
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return p.ended[name] || p.isLeaving(name) })
}

// silence says why a server sends no list.
type silence int

const (
	speaks        silence = iota
	forLater              // a process that started later
	forForeign            // another program, which has registered since
	forDifference         // kubelet's account differs, and the reason is not known yet
	forNext               // the next life has the list
)

// maySend reports whether a list may be sent now. The channel is closed when that may have changed.
// maySend reads the directory itself, because the notice of a later server's socket may come later
// than that server's list.
func (l *life) maySend() (bool, <-chan struct{}) {
	now, changed := l.silence.Latest()
	if now == speaks && len(l.later()) > 0 {
		l.silence.Publish(forLater)
		now = forLater
	}
	return now == speaks, changed
}

// awaitLaterEnds waits until no later process serves the resource. It reports false when ctx ended
// or another kubelet came.
func (l *life) awaitLaterEnds(ctx context.Context, incarnation uint64) bool {
	if l.past.yielded {
		l.past.yielded = false
		l.awaitLater(ctx)
	}
	for {
		_, left := l.past.left.Latest()
		later := l.later()
		if len(later) == 0 {
			break
		}
		l.beReachable(ctx)
		l.report(PhaseYielding)
		if err := l.awaitEnd(ctx, incarnation, later, left); err != nil {
			l.past.yielded = errors.Is(err, errKubeletLeft)
			return false
		}
		// Kubelet up to 1.36 stops the endpoint that it has for the resource when it takes notice of that
		// end: a registration before is stopped, too, and a list that comes after it hides that.
		l.awaitStopped(ctx, incarnation)
	}
	return ctx.Err() == nil
}

// awaitLater waits for a later process to have a socket again, for a second at most.
func (l *life) awaitLater(ctx context.Context) {
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

// yield is silent until no later process serves the resource any more. It returns nil if none ever
// was registered, and an error with which this life ends otherwise. Until then the stream stays
// open: at its end, kubelet 1.36 would close the connection to the later server.
func (l *life) yield(ctx context.Context, incarnation uint64) error {
	log := klog.FromContext(ctx)
	l.silence.Publish(forLater)
	l.report(PhaseYielding)
	log.Info("Sending no more lists: a process that started later serves the resource")
	for {
		_, left := l.past.left.Latest()
		if later := l.later(); len(later) > 0 {
			if err := l.awaitEnd(ctx, incarnation, later, left); err != nil {
				l.past.yielded = true // kubelet has left, or ended the stream as it left
				return err
			}
			continue
		}
		if len(l.past.ofLeaving(l.Registrar.Rivals(l.list.name).Later)) > 0 {
			return errTakesOver
		}
		switch kept := l.undisturbed(ctx, incarnation); {
		case len(l.later()) > 0: // another one
		case !kept || l.past.isForgotten():
			return errOtherEnded
		default:
			log.Info("Sending lists again: kubelet has kept the registration")
			l.silence.Publish(speaks)
			l.report(PhaseServing)
			return nil
		}
	}
}

// undisturbed reports whether kubelet still goes by the list that this life sent last, some time
// after another server ended. On kubelet 1.36 it does so only if that server was never registered:
// at its end, all devices would count as unhealthy.
func (l *life) undisturbed(ctx context.Context, incarnation uint64) bool {
	for _, d := range []time.Duration{stopDelay, checkSoon} {
		if !l.pause(ctx, incarnation, d) {
			return false
		}
		ids, err := l.allocatable(ctx)
		sent := l.sent.Value()
		if err != nil || sent == nil || len(ids) == 0 || !sameIDs(ids, healthyIDs(sent)) {
			return false
		}
	}
	return true
}

// awaitEnd waits until one of the servers with these sockets has ended, or another process says
// that it is ending, for which left is closed. An error means that the kubelet left or ctx ended.
func (l *life) awaitEnd(ctx context.Context, incarnation uint64, sockets []string, left <-chan struct{}) error {
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
			l.past.end(name)
			return nil
		}
	}
}
