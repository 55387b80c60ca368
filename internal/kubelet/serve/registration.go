package serve

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/yield"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const (
	// registerTimeout limits a Register call, and then the wait for the ListAndWatch stream. The
	// kubelet tries to connect to the socket for up to 10 s before it answers.
	registerTimeout = 15 * time.Second
	// stopDelay is the pause between the end of the kubelet's connection and the next Register. The
	// kubelet 1.36 marks the resource as stopped shortly after it closes the connection. A server
	// that registers earlier is marked, too.
	stopDelay = 50 * time.Millisecond
	// stopTimeout limits the further wait until the kubelet's account shows that the resource is
	// stopped. If another server of the resource continues, the account never shows a stop.
	stopTimeout = 500 * time.Millisecond
	// deadCloseTimeout limits the wait for the connection of a stopped kubelet to close.
	deadCloseTimeout = 5 * time.Millisecond
	// closeTimeout limits the wait for the kubelet to close its connection after the stream ended.
	closeTimeout = 500 * time.Millisecond
	// handshakeTimeout is how long a connection may stay silent. The default of gRPC is two
	// minutes, and a stopping server waits for silent connections.
	handshakeTimeout = time.Second
	// finishTimeout limits the wait for running calls when a registration ends.
	finishTimeout = time.Second
	// provenAfter is how long a stream must last for its registration to count as successful.
	provenAfter = time.Second
	// After each manyEnds streams in a row that a kubelet up to 1.36 ended within endsSoon of their
	// registrations, the next registration waits for busyPause: see pauseAfterManyEnds.
	manyEnds  = 16
	endsSoon  = 10 * time.Second
	busyPause = 5 * time.Second
	// maxRequest bounds one request, in bytes: GetPreferredAllocation names every free device of a
	// list, and the required devices a second time.
	maxRequest = 2 * resource.MaxList
	// largeRequest is the size of a request, in bytes, whose memory is released after the answer.
	largeRequest = 1 << 20
)

// Why a registration ends.
var (
	errKubeletLeft   = errors.New("the kubelet restarted or went away")
	errSocketRemoved = errors.New("the socket was removed from the kubelet's directory")
	errStreamEnded   = errors.New("the kubelet ended the stream")
	errNoStream      = errors.New("the kubelet accepted the registration and did not call ListAndWatch")
	errOptions       = errors.New("the options changed, and the kubelet reads them only at a registration")
	errClosedEarly   = errors.New("the kubelet accepted the registration and closed its connection before it called " +
		"ListAndWatch")
	errDisagrees   = listing.ErrDisagrees
	errLaterCame   = errors.New("a process that started later serves the resource")
	errOtherEnded  = listing.ErrOtherEnded
	errEarlierLeft = errors.New("another process has exited, and the kubelet has forgotten this server")
	errTakesOver   = errors.New("a process that started later is exiting, and this process serves the resource again")
)

// A registration is one registration of the server of a resource, from a new socket to the end of
// its stream. It runs once.
type registration struct {
	Collaborators
	list     *list
	previous *previous
	report   func(Phase)
	// reportDifference is called with the difference between the kubelet's account and the list;
	// empty if there is none.
	reportDifference func(difference string)
	// adopt adds devices to the list that the kubelet knows and the plan lacks. It is called before
	// each registration.
	adopt func(context.Context)
	// allocating returns the answer to a call of Allocate for the devices of each container, and
	// how containers get devices.
	allocating func(containers [][]string) (listing.Answer, Options)

	sending
	session
	// Another process is ending, and this process has promised to register again afterwards.
	reregisterPromised feed.Feed[bool]
}

// sending is what a registration sends to the kubelet.
type sending struct {
	mute       feed.Feed[yield.Mute]
	resend     feed.Feed[uint64]                          // changes when the last list is to be sent again
	sent       feed.Feed[*pluginapi.ListAndWatchResponse] // the last list; nil before the first
	checkpoint atomic.Pointer[string]                     // version of the kubelet's checkpoint before that list
}

// A session is the server of a registration while it runs.
type session struct {
	connections    *connections
	siblingChanged chan struct{}           // holds a value after the socket of another server came or went
	closing        chan struct{}           // closed when streams are to end
	end            context.CancelCauseFunc // ends the registration, with the reason
	accepted       bool                    // the kubelet has accepted the registration
	unlock         func()                  // lets other processes register
}

// run registers and serves until ctx or the registration ends. It returns nil if the next
// registration may begin at once, and otherwise the reason for the failure. Servers.live calls run of
// the next registration after each end.
func (l *registration) run(parent context.Context) error {
	incarnation, ok := l.awaitKubelet(parent)
	if !ok || !l.awaitLaterEnds(parent, incarnation) {
		return nil
	}
	log := klog.FromContext(parent)
	endpoint := l.Registrar.NewEndpoint(l.list.name)
	unix, err := statefile.Listen(parent, endpoint)
	if err != nil {
		return fmt.Errorf("listen beside the kubelet's socket: %w", err)
	}
	l.connections = newConnections()
	socket := &listener{UnixListener: unix, connections: l.connections, logger: log}
	l.previous.release()
	ctx, end := context.WithCancelCause(parent)
	defer end(nil)
	l.end, l.unlock = end, func() {}
	defer func() { l.unlock() }() // a failed registration unlocks when the kubelet has closed it
	l.closing = make(chan struct{})
	l.siblingChanged = make(chan struct{}, 1)
	service := newService(l, log)
	server := newServer(service)
	var tasks sync.WaitGroup
	tasks.Go(func() {
		if err := server.Serve(socket); err != nil {
			end(fmt.Errorf("serve %s: %w", endpoint, err))
		}
	})
	tasks.Go(func() { end(l.follow(ctx, endpoint, incarnation, service.inspect)) })
	began := l.Clock.Now()
	proven, err := l.stayRegistered(ctx, incarnation, endpoint, service)
	end(err)

	cause := context.Cause(ctx)
	prepareEnd := func() { l.prepareEnd(context.WithoutCancel(parent), incarnation, server, service) }
	switch {
	case parent.Err() != nil:
		prepareEnd()
	case errors.Is(cause, errEarlierLeft), errors.Is(cause, errTakesOver):
		if errors.Is(cause, errEarlierLeft) {
			l.endKept(parent, incarnation)
		}
		l.previous.prepareEnd = prepareEnd
		l.keepStream(socket, server, &tasks)
		return nil
	}
	l.disconnect(parent, server, incarnation, cause)
	tasks.Wait()
	if parent.Err() != nil {
		socket.release()
		return nil
	}
	log.Info("A registration ended", "endpoint", filepath.Base(endpoint), "reason", cause.Error())
	if service.streamed() {
		l.Metrics.StreamEnded(l.list.name, endOf(cause))
		l.pauseAfterManyEnds(parent, incarnation, service, cause, l.Clock.Since(began))
	}
	return l.leaveSocket(socket, proven, cause)
}

// pauseAfterManyEnds lets a busy kubelet up to 1.36 notice the end of each stream. Such a kubelet takes
// the end of a stream for the end of the registration that has followed meanwhile. The end of that
// one it notices late again, so that it would end one registration after the other.
func (l *registration) pauseAfterManyEnds(ctx context.Context, incarnation uint64, s *service, cause error,
	lasted time.Duration) {
	if !s.oneClient || !errors.Is(cause, errStreamEnded) || lasted >= endsSoon {
		l.previous.earlyEnds = 0
		return
	}
	if l.previous.earlyEnds++; l.previous.earlyEnds%manyEnds == 0 {
		l.report(PhaseRegistering)
		l.pause(ctx, incarnation, busyPause)
	}
}

// newServer returns the gRPC server of a service.
func newServer(s *service) *grpc.Server {
	limit := newRequestLimit()
	server := grpc.NewServer(
		grpc.MaxRecvMsgSize(maxRequest),
		grpc.InitialWindowSize(streamWindow),
		grpc.InitialConnWindowSize(connectionWindow),
		grpc.InTapHandle(limit.tap),
		grpc.ConnectionTimeout(handshakeTimeout),
		grpc.StatsHandler(limit),
		grpc.ChainUnaryInterceptor(boundPreStart, countCalls(s.Metrics), noteAllocations(s.Accountant),
			recoverCalls(s.log),
			freeMemory),
		grpc.ChainStreamInterceptor(recoverStreams(s.log)),
	)
	pluginapi.RegisterDevicePluginServer(server, s)
	return server
}

// leaveSocket leaves the socket to the next registration and returns nil if the next registration
// may begin at once: this registration was successful, or a new registration repairs the cause.
// Otherwise leaveSocket closes the socket and returns the cause.
func (l *registration) leaveSocket(socket *listener, proven bool, cause error) error {
	fixable := []error{errKubeletLeft, errSocketRemoved, errOptions, errDisagrees, errLaterCame, errOtherEnded}
	if proven || slices.ContainsFunc(fixable, func(e error) bool { return errors.Is(cause, e) }) {
		l.previous.socket = socket
		return nil
	}
	socket.release()
	return cause
}

// awaitKubelet waits for a kubelet. It returns false if ctx ends first.
func (l *registration) awaitKubelet(ctx context.Context) (incarnation uint64, ok bool) {
	for {
		incarnation, changed := l.Incarnation.Latest()
		if incarnation != 0 {
			return incarnation, true
		}
		l.previous.release()
		l.report(PhaseNoKubelet)
		if !feed.WaitAny(ctx, changed) {
			return 0, false
		}
	}
}

// follow returns why this registration must end, as shown by the kubelet's directory and the list.
// Until then, it signals siblingChanged when the socket of another server appears or disappears.
func (l *registration) follow(ctx context.Context, endpoint string, incarnation uint64, inspect bool) error {
	before := l.Registrar.Peers(l.list.name)
	var alone <-chan time.Time
	for {
		newest, incarnationChanged := l.Incarnation.Latest()
		_, socketsChanged := l.Sockets.Latest()
		view, listChanged := l.list.views.Latest()
		_, muteChanged := l.mute.Latest()
		_, promiseChanged := l.reregisterPromised.Latest()
		now := l.server()
		switch {
		case newest != incarnation:
			return errKubeletLeft
		case know(l.previous, now.Peers, func(s *yield.State) bool { return s.Yields(now) }):
			if err := l.yield(ctx, incarnation); err != nil {
				return err
			}
			continue
		case isGone(endpoint):
			return errSocketRemoved
		case view.options.Inspect != inspect:
			return errOptions
		case !reflect.DeepEqual(now.Peers, before):
			before = now.Peers
			select {
			case l.siblingChanged <- struct{}{}:
			default:
			}
		}
		if alone == nil && know(l.previous, now.Peers, func(s *yield.State) bool { return s.ReregistersSoon(now) }) {
			alone = l.Clock.After(leftFor)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-promiseChanged:
		case <-alone:
			if alone = nil; now.Mute == yield.MuteNone {
				return errEarlierLeft
			}
		case <-incarnationChanged:
		case <-socketsChanged:
		case <-listChanged:
		case <-muteChanged:
		}
	}
}

func isGone(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, os.ErrNotExist)
}

// stayRegistered registers, and returns when ctx ends or the kubelet no longer serves the
// registration. It reports whether the registration was successful: the kubelet counted the
// devices, the kubelet allocated a device, or the stream lasted.
func (l *registration) stayRegistered(
	ctx context.Context, incarnation uint64, endpoint string, service *service,
) (proven bool, err error) {
	l.report(PhaseRegistering)
	l.adopt(ctx)
	unlock, locked := l.Registrar.LockRegistrations(ctx)
	l.unlock = unlock
	lockedAt := l.Clock.Now()
	if l.isOvertaken(false, 0) {
		return false, errLaterCame
	}
	l.previous.tell((*yield.State).Begin)
	register := l.register
	if l.previous.stopKept != nil {
		register = l.registerAgain
	}
	err = register(ctx, incarnation, endpoint, service.options())
	l.Metrics.Registered(l.list.name, err == nil)
	if err != nil {
		return false, err
	}
	l.accepted = true
	l.previous.tell((*yield.State).Accept)
	klog.FromContext(ctx).Info("Registered", "endpoint", filepath.Base(endpoint))
	// A later server whose socket exists now may have registered before or after this registration.
	// It registers afterwards if it still waits for the lock, or if this registration sent a list
	// before the socket appeared. Then this registration stays, without further lists: its end
	// would take the devices away until the other server has registered.
	if l.isOvertaken(locked, l.Clock.Since(lockedAt)) {
		return false, errLaterCame
	}
	l.unlock()
	timeout := l.Clock.NewTimer(registerTimeout)
	defer timeout.Stop()
	select {
	case <-ctx.Done():
		return false, context.Cause(ctx)
	case <-timeout.C():
		return false, errNoStream
	case <-l.connections.kubeletClosed():
		// If the stream had begun, the end of the stream is the better reason.
		if !service.streamed() {
			return false, errClosedEarly
		}
	case <-service.began:
	}
	l.report(PhaseServing)
	if l.mute.Value() != yield.MuteNone {
		l.report(PhaseYielding)
	}
	began := l.Clock.Now()
	agreed, err := l.checkAccount(ctx, incarnation)
	return agreed || service.used.Load() || l.Clock.Since(began) >= provenAfter, err
}

// isOvertaken reports whether a later process may register, or have registered, first. locked says
// that this server has the lock of registrations, for so long.
func (l *registration) isOvertaken(locked bool, held time.Duration) bool {
	now := l.server()
	return know(l.previous, now.Peers, func(s *yield.State) bool { return s.Overtaken(now, locked, held) })
}

func (l *registration) register(
	ctx context.Context, incarnation uint64, endpoint string, options *pluginapi.DevicePluginOptions,
) error {
	ctx, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	return l.Registrar.Register(ctx, incarnation, l.list.name, endpoint, options)
}

// disconnect ends the streams and stops the gRPC server. If the kubelet of this registration still
// runs, disconnect waits until the kubelet has closed its connection and stopped the resource,
// because the kubelet can mistake an earlier Register for this registration.
func (l *registration) disconnect(parent context.Context, server *grpc.Server, incarnation uint64, cause error) {
	// A stopped kubelet has closed its connection, or the kernel does so soon. A kubelet that only
	// created its socket again keeps the connection.
	left := errors.Is(cause, errKubeletLeft)
	stays := parent.Err() == nil && !(left && l.wait(parent, l.connections.kubeletGone(), deadCloseTimeout))
	if l.accepted { // otherwise the kubelet still calls the previous server
		l.previous.endKept()
	}
	close(l.closing)
	if stays {
		l.wait(parent, l.connections.kubeletGone(), closeTimeout)
	}
	l.connections.close()
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		server.GracefulStop()
	}()
	if !l.wait(context.WithoutCancel(parent), finished, finishTimeout) {
		server.Stop() // does not wait for calls that never end
	}
	switch {
	case stays && left:
		l.awaitStopped(parent, 0) // the kubelet that registered us goes on, although the directory shows another one
	case stays:
		l.awaitStopped(parent, incarnation)
	}
}

// wait waits until done is closed. It returns false if d passes or ctx ends first.
func (l *registration) wait(ctx context.Context, done <-chan struct{}, d time.Duration) bool {
	timer := l.Clock.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-done:
		return true
	case <-timer.C():
		return false
	}
}

// awaitStopped waits until the kubelet's account shows no device of the resource, for stopTimeout
// at most. It returns early when ctx ends or, if incarnation is not 0, when another kubelet starts.
func (l *registration) awaitStopped(ctx context.Context, incarnation uint64) {
	for began := l.Clock.Now(); ; {
		if !l.pause(ctx, incarnation, stopDelay) || !l.countsDevices(ctx) || l.Clock.Since(began) >= stopTimeout {
			return
		}
	}
}

// pause waits for d. It returns false if ctx ends or, if incarnation is not 0, another kubelet
// starts first.
func (l *registration) pause(ctx context.Context, incarnation uint64, d time.Duration) bool {
	timer := l.Clock.NewTimer(d)
	defer timer.Stop()
	for {
		now, changed := l.Incarnation.Latest()
		if incarnation != 0 && now != incarnation {
			return false
		}
		select {
		case <-ctx.Done():
			return false
		case <-timer.C():
			return true
		case <-changed:
		}
	}
}

// countsDevices reports whether the kubelet's account shows healthy devices of the resource. It returns
// false without an answer.
func (l *registration) countsDevices(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	ids, _ := l.allocatable(ctx)
	return len(ids) > 0
}
