package serve

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/yield"
)

// A kubelet up to 1.36 takes the end of any stream of a resource for the end of the server that
// registered last. In a roll-out, the end of the earlier process would cost the later process its
// registration. So the earlier process first makes the kubelet forget the last registration: then
// the kubelet ignores the end of a stream. The later process registers a second time when the
// earlier process has ended, and the kubelet knows the later process again. The first stream of the
// later process stays open as long as the second: the kubelet would take the end of the first for
// the end of the second.
//
// A roll-out that overtakes the previous roll-out ends the later process: the earlier process
// serves again until the next process starts. The later process tells the earlier process so, and
// stays until the earlier process has registered. From then on the roles are exchanged. A process
// whose successor listens and has not registered yet waits in the same way.
//
// The kubelet 1.37 knows whose stream ends, so none of this is done: with two streams of one
// process, the kubelet could call the stream that ends last.

const (
	// leaveTimeout limits the preparation of the end of a process, without the wait for another
	// process. The process has 2 s in all.
	leaveTimeout = 800 * time.Millisecond
	// handOverTimeout limits all that an ending process waits for: the registration of the process that
	// serves afterwards, and the kubelet's answer to a registration of its own. The pod has 10 s.
	handOverTimeout = 5 * time.Second
	// handOverPause is the time between two checks whether that process has registered.
	handOverPause = 20 * time.Millisecond
	// leftFor is how long no earlier process must have had a socket before this process registers
	// again. By then, the kubelet has noticed the end of the earlier stream. The resource is served
	// all the time.
	leftFor = time.Second
	// earlierPause is how often an ending process checks whether the earlier process has ended.
	earlierPause = 5 * time.Millisecond
)

// detachFromKubelet prepares the end of the stream of this registration, while another process
// serves the resource or is about to. It reports whether the kubelet will ignore the end.
func (l *registration) detachFromKubelet(ctx context.Context, incarnation uint64) bool {
	log := klog.FromContext(ctx)
	// A busy kubelet may fail after a call has timed out, and forget a process that registers meanwhile.
	ctx, cancel := context.WithTimeout(ctx, l.extendEnd())
	defer cancel()
	rivals := l.Registrar.Peers(l.list.name)
	if len(rivals.Later)+len(rivals.Earlier) > 0 || l.previous.stopKept != nil {
		l.awaitTakenIn(ctx)
	}
	err := l.tryDetach(ctx, incarnation)
	if errors.Is(err, kubelet.ErrNotYet) {
		log.Info("Staying until the process that serves the resource from now on has registered")
		for err != nil && !errors.Is(err, fs.ErrNotExist) && ctx.Err() == nil { // it changes its socket meanwhile
			l.wait(ctx, nil, handOverPause)
			err = l.tryDetach(ctx, incarnation)
		}
	}
	switch {
	case err == nil:
		log.V(2).Info("The kubelet ignores the end of the stream")
	case !errors.Is(err, fs.ErrNotExist):
		log.Info("The kubelet disconnects the other process when this process exits; the other process registers again",
			"reason", err.Error())
	}
	return err == nil
}

// timeToEnd returns what remains of handOverTimeout since the first call, but not less than leaveTimeout.
func (l *registration) timeToEnd() time.Duration {
	l.previous.mu.Lock()
	defer l.previous.mu.Unlock()
	now := l.Clock.Now()
	if l.previous.endsBy.IsZero() {
		l.previous.endsBy = now.Add(handOverTimeout)
	}
	return max(l.previous.endsBy.Sub(now), leaveTimeout)
}

// extendEnd extends the time of this process to end, and returns what it may wait for others.
func (l *registration) extendEnd() time.Duration {
	left := l.timeToEnd()
	l.ExtendEnd(left + leaveTimeout)
	return left
}

// noteCheckpoint is called before a list is sent.
func (l *registration) noteCheckpoint() {
	if l.CheckpointVersion != nil {
		version := l.CheckpointVersion()
		l.checkpoint.Store(&version)
	}
}

// awaitTakenIn waits until the kubelet has processed the last list of this registration, as far as
// known. The kubelet writes its checkpoint for each list, and notices the end of the stream only
// afterwards: on a busy disk, a second later. It would take that end for the end of a process that
// has registered meanwhile. At the end of a kept stream, it would count the devices of that list after
// it has disconnected this process.
func (l *registration) awaitTakenIn(ctx context.Context) {
	before := l.checkpoint.Load()
	if before == nil || *before == "" || l.CheckpointVersion() != *before {
		return
	}
	klog.FromContext(ctx).Info("Waiting until the kubelet has processed the list of this process")
	for ctx.Err() == nil && l.CheckpointVersion() == *before {
		l.wait(ctx, nil, handOverPause)
	}
}

// tryDetach keeps other processes from registering once the kubelet has forgotten the other
// process: the kubelet would take the end of this process for the end of a process that registers
// meanwhile.
func (l *registration) tryDetach(ctx context.Context, incarnation uint64) error {
	locking, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	unlock, _ := l.Registrar.LockRegistrations(locking)
	err := l.Registrar.Detach(ctx, incarnation, l.list.name)
	if err != nil {
		unlock()
		return err
	}
	l.previous.unlock = unlock
	return nil
}

// prepareEnd prepares the end of this process, whose newest stream belongs to this registration.
func (l *registration) prepareEnd(ctx context.Context, incarnation uint64, server *grpc.Server, service *service) {
	l.previous.tell((*yield.State).End)
	before := service.server()
	// The other process has the list. A list that the kubelet processed after the end would add the
	// devices again.
	l.mute.Publish(yield.MuteReplaced)
	if before.Detaches() && l.detachFromKubelet(ctx, incarnation) {
		return
	}
	registers := func() bool {
		now := service.server()
		now.Mute = before.Mute
		return know(l.previous, now.Peers, func(s *yield.State) bool { return s.RegistersBeforeExit(now) })
	}
	if registers() && !l.registerBeforeExit(ctx, incarnation, server, service.options(), registers) &&
		before.Detaches() {
		l.detachFromKubelet(ctx, incarnation)
	}
}

// registerBeforeExit registers once more before this process ends. It is called if the kubelet may have
// forgotten this process, while no other process serves the resource: the kubelet would not notice the
// end of this process's streams, and count the devices until it restarts.
// It first waits for the end of earlier processes, because they could make the kubelet also forget this
// registration. It returns false if another process has come meanwhile, so that registers returns false.
func (l *registration) registerBeforeExit(ctx context.Context, incarnation uint64, server *grpc.Server,
	options *pluginapi.DevicePluginOptions, registers func() bool) bool {
	ctx, cancel := context.WithTimeout(ctx, l.extendEnd())
	defer cancel()
	l.awaitEarlier(ctx)
	unlock, _ := l.Registrar.LockRegistrations(ctx)
	if !registers() {
		unlock()
		return false
	}
	l.previous.unlock = unlock // a process that starts now registers after the end of this process
	endpoint := l.Registrar.NewEndpoint(l.list.name)
	socket, err := statefile.Listen(ctx, endpoint)
	if err == nil {
		go func() { _ = server.Serve(socket) }() // it ends with the server
		err = l.register(ctx, incarnation, endpoint, options)
	}
	if err != nil {
		klog.FromContext(ctx).Info("A kubelet up to 1.36 may not notice the end of this process", "reason", err.Error())
	}
	return true
}

// registerAgain registers beside a kept stream. It waits for the kubelet's answer for handOverTimeout
// after ctx has ended, unless another kubelet starts: if the call were canceled, the kubelet could fail
// while the next registration runs, and forget that one.
func (l *registration) registerAgain(ctx context.Context, incarnation uint64, endpoint string,
	options *pluginapi.DevicePluginOptions) error {
	if ctx.Err() != nil { // before the lock was taken
		return ctx.Err()
	}
	call, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() {
		left := handOverTimeout
		if errors.Is(context.Cause(ctx), context.Canceled) { // the process ends
			left = l.extendEnd()
		}
		l.pause(call, incarnation, left)
		cancel()
	})()
	return l.register(call, incarnation, endpoint, options)
}

// awaitEarlier waits until no earlier process has a socket, for half of leaveTimeout at most. The
// directory may no longer be watched.
func (l *registration) awaitEarlier(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout/2)
	defer cancel()
	for ctx.Err() == nil && len(l.Registrar.Peers(l.list.name).Earlier) > 0 {
		l.wait(ctx, nil, earlierPause)
	}
}

// server returns what the service knows of itself and of other servers.
func (s *service) server() yield.Server {
	v := s.registration.server()
	v.Streams = s.streamed()
	v.OneClient = v.Streams && s.oneClient // known once the stream has begun
	return v
}

// answerLeaving records that the process with this token is ending, and returns the answer for it.
func (s *service) answerLeaving(token string) yield.Answer {
	now := s.server()
	s.previous.mu.Lock()
	known := s.previous.state.Leaving()
	answer, mute := s.previous.state.Answer(token, now)
	leaving := s.previous.state.Leaving()
	s.previous.mu.Unlock()
	if leaving > known {
		s.previous.leaving.Publish(leaving)
	}
	if mute != now.Mute {
		s.mute.Publish(mute)
	}
	if answer == yield.WillReregister {
		s.reregisterPromised.Publish(true)
	}
	return answer
}

// endKept ends the server of the previous registration, if it still runs, while the kubelet has
// forgotten this process and ignores the end. It returns when the kubelet has noticed the end: the
// kubelet would take it for the end of whichever process registers meanwhile. If a later process
// may have registered, the server continues.
func (l *registration) endKept(ctx context.Context, incarnation uint64) {
	if l.previous.stopKept == nil {
		return
	}
	unlock, _ := l.Registrar.LockRegistrations(ctx)
	defer unlock()
	if len(l.later()) > 0 {
		return
	}
	l.previous.endKept()
	l.pause(ctx, incarnation, stopDelay)
}

// keepStream leaves the stream of this registration open, without further lists, and its server
// running until the next registration ends. A stream that was kept before stays open, too.
func (l *registration) keepStream(socket *listener, server *grpc.Server, tasks *sync.WaitGroup) {
	before := l.previous.stopKept
	l.mute.Publish(yield.MuteReplaced)
	_ = socket.Close() // the socket stays until the next one is there
	l.previous.socket = socket
	l.previous.serveKept = func(unix *net.UnixListener) *listener {
		socket := &listener{UnixListener: unix, connections: l.connections, logger: socket.logger}
		tasks.Go(func() { _ = server.Serve(socket) }) // it ends with the server
		return socket
	}
	l.previous.stopKept = func() {
		if before != nil {
			before()
		}
		close(l.closing)
		l.connections.close()
		server.Stop()
		tasks.Wait()
	}
}

// listenAgain makes the server of the previous registration, if it still runs, answer other
// processes while this process has no registration. Without such a server it closes the last
// socket.
func (l *registration) listenAgain(ctx context.Context) {
	if l.previous.stopKept == nil {
		l.previous.release()
		return
	}
	if l.previous.reachable {
		return
	}
	unix, err := statefile.Listen(ctx, l.Registrar.NewEndpoint(l.list.name))
	l.previous.release()
	if err != nil {
		klog.FromContext(ctx).Info("Other processes cannot ask this process to serve the resource", "reason",
			err.Error())
		return
	}
	l.previous.socket, l.previous.reachable = l.previous.serveKept(unix), true
}

// endBetween prepares the end of a process that ends between two registrations, while the server of
// the previous registration still runs.
func (p *previous) endBetween() {
	if p.stopKept != nil && p.unlock == nil { // else the end is prepared already
		p.prepareEnd()
	}
}

// unlockRegistrations lets other processes register again, if this process locked them out until the
// kubelet noticed its end.
func (p *previous) unlockRegistrations(c clock.WithTicker) {
	if p.unlock == nil {
		return
	}
	timer := c.NewTimer(stopDelay)
	defer timer.Stop()
	<-timer.C()
	p.unlock()
}

// endKept ends the server of the previous registration, if it still runs.
func (p *previous) endKept() {
	if p.stopKept != nil {
		p.stopKept()
		p.stopKept, p.serveKept = nil, nil
	}
}
