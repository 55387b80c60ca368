package plugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/files"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

const (
	// registerTimeout bounds a Register, and then the wait for the stream. Kubelet tries for up to 10 s to reach us
	// before it answers.
	registerTimeout = 15 * time.Second
	// settleTime is the pause between the moment kubelet closed the connection of one life and the next Register:
	// kubelet 1.36 closes it a little before it marks the resource as stopped, and marks whatever is registered by then.
	settleTime = 50 * time.Millisecond
	// settleLimit bounds the further wait for kubelet's account to say that the resource was marked: where another server of
	// the resource goes on, it never does.
	settleLimit = 500 * time.Millisecond
	// farewellTime is how long the connection of a kubelet that ended may take to be seen closed.
	farewellTime = 5 * time.Millisecond
	// hangUpTimeout bounds the wait for kubelet to close its connection after a stream ended.
	hangUpTimeout = 500 * time.Millisecond
	// handshakeTimeout is how long a connection may say nothing. Where nobody closes it, gRPC waits two minutes for it when the
	// server stops.
	handshakeTimeout = time.Second
	// finishTimeout bounds the wait for calls in flight when a life ends.
	finishTimeout = time.Second
	// lookInterval is how often a server looks whether its socket is still there, beside the notices of changes.
	lookInterval = time.Second
	// provenAfter is how long a stream lives to count as a registration that worked.
	provenAfter = time.Second
	// maxRequest bounds one request, in bytes: GetPreferredAllocation names every free device of a list, and again those that must
	// be chosen.
	maxRequest = 2 * resource.MaxList
	// largeRequest is the size of a request, in bytes, whose memory is given back when it was answered.
	largeRequest = 1 << 20
)

// Why a life ends.
var (
	errKubeletLeft   = errors.New("kubelet restarted or went away")
	errSocketRemoved = errors.New("our socket was removed from kubelet's directory")
	errStreamEnded   = errors.New("kubelet ended the stream")
	errNoStream      = errors.New("kubelet accepted the registration and did not ask for the list")
	errOptions       = errors.New("kubelet has to learn other options")
	errHungUp        = errors.New("kubelet accepted the registration and hung up before it asked for the list")
	errDisagrees     = errors.New("kubelet's account of the devices differs from the list it was sent")
	errYoungerCame   = errors.New("a process that started later serves the resource")
	errOtherEnded    = errors.New("the server that had registered after this one has ended")
)

// A life is one life of the server of one resource: from listening on a fresh socket to closing it. It runs once.
type life struct {
	Collaborators
	list   *list
	past   *past
	report func(Phase)
	// compared is told how kubelet's account differs from the list; empty if it does not.
	compared func(difference string)
	// adopt lists what kubelet knows of the resource and the plan does not have. It is called before each registration.
	adopt func(context.Context)

	silence     feed.Feed[silence]
	sent        atomic.Pointer[pluginapi.ListAndWatchResponse] // the last list of this life
	connections *connections
	visits      chan struct{} // holds one word that another plugin's socket came or went
	closing     chan struct{} // closed when streams are to end
}

// run lives until ctx ends or something breaks the registration. It returns nil when the next life may begin at once, and
// otherwise an error that says what failed.
func (l *life) run(parent context.Context) error {
	incarnation, ok := l.awaitKubelet(parent)
	if !ok || !l.awaitTurn(parent, incarnation) {
		return nil
	}
	log := klog.FromContext(parent)
	endpoint := l.Registrar.NewEndpoint(l.list.name)
	unix, err := files.Listen(parent, endpoint)
	if err != nil {
		return fmt.Errorf("listen beside kubelet's socket: %w", err)
	}
	l.connections = newConnections()
	socket := &listener{unix, l.connections}
	l.past.release()
	ctx, end := context.WithCancelCause(parent)
	defer end(nil)
	l.closing = make(chan struct{})
	l.visits = make(chan struct{}, 1)
	service := &service{
		log: log, list: l.list, inspector: l.Inspector, elder: l.Registrar.CallElder, inspect: l.list.views.Value().options.Inspect,
		closing: l.closing, called: l.connections.called, began: make(chan struct{}), ended: func() { end(errStreamEnded) },
		maySend: l.maySend, sent: &l.sent,
	}
	server := grpc.NewServer(
		grpc.MaxRecvMsgSize(maxRequest),
		grpc.ConnectionTimeout(handshakeTimeout),
		grpc.ChainUnaryInterceptor(recoverCalls(log), freeMemory),
		grpc.ChainStreamInterceptor(recoverStreams(log)),
	)
	pluginapi.RegisterDevicePluginServer(server, service)

	var tasks sync.WaitGroup
	tasks.Go(func() {
		if err := server.Serve(socket); err != nil {
			end(fmt.Errorf("serve %s: %w", endpoint, err))
		}
	})
	tasks.Go(func() { end(l.follow(ctx, endpoint, incarnation, service.inspect)) })
	proven, err := l.stayRegistered(ctx, incarnation, endpoint, service)
	end(err)

	cause := context.Cause(ctx)
	l.hangUp(parent, server, incarnation, cause)
	tasks.Wait()
	if parent.Err() != nil {
		socket.release()
		return nil
	}
	log.Info("A registration ended", "endpoint", filepath.Base(endpoint), "reason", cause.Error())
	for _, cured := range []error{errKubeletLeft, errSocketRemoved, errOptions, errDisagrees, errYoungerCame, errOtherEnded} {
		if errors.Is(cause, cured) {
			l.past.socket = socket
			return nil
		}
	}
	if errors.Is(cause, errStreamEnded) && proven {
		l.past.socket = socket
		return nil
	}
	socket.release()
	return cause
}

// awaitKubelet waits for a kubelet to register at; it reports false when ctx ended first.
func (l *life) awaitKubelet(ctx context.Context) (incarnation uint64, ok bool) {
	for {
		incarnation, changed := l.Incarnation.Latest()
		if incarnation != 0 {
			return incarnation, true
		}
		l.past.release()
		l.report(PhaseNoKubelet)
		select {
		case <-ctx.Done():
			return 0, false
		case <-changed:
		}
	}
}

// follow returns why the registration cannot hold any more, as far as kubelet's directory and the list tell. Until then, it
// passes on when a socket beside ours came or went: it may be that of another server of this resource.
func (l *life) follow(ctx context.Context, endpoint string, incarnation uint64, inspect bool) error {
	// Our socket is looked for by ourselves: who publishes the sockets may never have seen it before it was removed.
	look := l.Clock.NewTicker(lookInterval)
	defer look.Stop()
	before := l.Registrar.Rivals(l.list.name)
	for {
		now, came := l.Incarnation.Latest()
		_, moved := l.Sockets.Latest()
		view, listed := l.list.views.Latest()
		hush, hushed := l.silence.Latest()
		rivals := l.Registrar.Rivals(l.list.name)
		switch {
		case now != incarnation:
			return errKubeletLeft
		case hush == forYounger || len(l.younger()) > 0:
			if err := l.yield(ctx, incarnation); err != nil {
				return err
			}
			continue
		case isGone(endpoint):
			return errSocketRemoved
		case view.options.Inspect != inspect:
			return errOptions // kubelet learns them when we register, and never asks again
		case !reflect.DeepEqual(rivals, before):
			before = rivals
			select {
			case l.visits <- struct{}{}:
			default:
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-look.C():
		case <-came:
		case <-moved:
		case <-listed:
		case <-hushed:
		}
	}
}

func isGone(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, os.ErrNotExist)
}

// stayRegistered registers and stays until ctx ends or kubelet does not do its part. It reports whether kubelet was seen
// to make use of the registration.
func (l *life) stayRegistered(
	ctx context.Context, incarnation uint64, endpoint string, service *service,
) (proven bool, err error) {
	l.report(PhaseRegistering)
	l.adopt(ctx)
	if len(l.younger()) > 0 {
		return false, errYoungerCame
	}
	if err := l.register(ctx, incarnation, endpoint, service.options()); err != nil {
		return false, err
	}
	klog.FromContext(ctx).Info("Registered", "endpoint", filepath.Base(endpoint))
	// Nobody can tell which of the two registered last, unless this one had a list to send before the other was there. One that
	// comes from here on registers later.
	if len(l.younger()) > 0 && l.sent.Load() == nil {
		return false, errYoungerCame
	}
	patience := l.Clock.NewTimer(registerTimeout)
	defer patience.Stop()
	select {
	case <-ctx.Done():
		return false, context.Cause(ctx)
	case <-patience.C():
		return false, errNoStream
	case <-l.connections.hungUp():
		// The stream may have begun before: then its end tells more.
		select {
		case <-service.began:
		default:
			return false, errHungUp
		}
	case <-service.began:
	}
	l.report(PhaseServing)
	if l.silence.Value() != speaks {
		l.report(PhaseYielding)
	}
	began := l.Clock.Now()
	agreed, err := l.checkAccount(ctx, incarnation)
	return agreed || service.used.Load() || l.Clock.Since(began) >= provenAfter, err
}

func (l *life) register(
	ctx context.Context, incarnation uint64, endpoint string, options *pluginapi.DevicePluginOptions,
) error {
	ctx, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	return l.Registrar.Register(ctx, incarnation, l.list.name, endpoint, options)
}

// hangUp ends what is left of the life. Where the kubelet that registered us still runs, it waits until that kubelet has
// let go: a Register that comes too early can be taken for the life that just ended.
func (l *life) hangUp(parent context.Context, server *grpc.Server, incarnation uint64, cause error) {
	// A kubelet that ended has closed its connection, or its kernel is about to. One that only made its socket anew has not.
	left := errors.Is(cause, errKubeletLeft)
	stays := parent.Err() == nil && !(left && l.wait(parent, l.connections.left(), farewellTime))
	close(l.closing)
	if stays {
		l.wait(parent, l.connections.left(), hangUpTimeout)
	}
	l.connections.close(false)
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		server.GracefulStop()
	}()
	if !l.wait(context.WithoutCancel(parent), finished, finishTimeout) {
		l.connections.close(true)
		server.Stop() // does not wait for calls: one that never ends must not keep the resource from being served
	}
	switch {
	case stays && left:
		l.settle(parent, 0) // whatever the directory shows: the one that registered us goes on
	case stays:
		l.settle(parent, incarnation)
	}
}

// wait waits for done and reports whether it came: not after d, nor after ctx ended.
func (l *life) wait(ctx context.Context, done <-chan struct{}, d time.Duration) bool {
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

// settle waits until kubelet has marked the resource as stopped, as far as its account tells, unless ctx ends or, where an
// incarnation is given, another kubelet comes, which has nothing to mistake.
func (l *life) settle(ctx context.Context, incarnation uint64) {
	for began := l.Clock.Now(); ; {
		if !l.pause(ctx, incarnation, settleTime) || !l.counted(ctx) || l.Clock.Since(began) >= settleLimit {
			return
		}
	}
}

// pause waits for d; it reports false when ctx ended or, where an incarnation is given, another kubelet came first.
func (l *life) pause(ctx context.Context, incarnation uint64, d time.Duration) bool {
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

// counted reports whether kubelet's account still has healthy devices of the resource; not if it cannot be had at once.
func (l *life) counted(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, settleLimit)
	defer cancel()
	ids, err := l.allocatable(ctx)
	return err == nil && len(ids) > 0
}
