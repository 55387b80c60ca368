package serve

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// The kubelet up to 1.36 takes the end of any stream of a resource for the end of the server that
// registered last. In a roll-out, the end of the earlier process would cost the later one its
// registration. So the earlier one first has the kubelet forget who registered last: then the
// kubelet takes no notice of an end. The later one registers a second time when the earlier one has
// ended, and the kubelet knows it again. Its first stream stays open as long as the second: the
// kubelet would take the end of the first for that of the second.
//
// A roll-out that overtakes the one before ends the later process: the earlier one is to serve
// again until the next one is there. The later one tells it so, and stays until it has registered.
// From then on it is as above, with the two in each other's place. A process whose successor
// listens and has not registered yet waits for that in the same way.
//
// Kubelet 1.37 knows whose stream ends. There, nothing of this is done: with two streams of one
// process, it could ask the one that ends last.

const (
	// leaveTimeout limits the preparation of the end of a process, without the wait for another one:
	// it has 2 s in all.
	leaveTimeout = 800 * time.Millisecond
	// handOverTimeout limits the wait for the registration of the process that serves afterwards.
	handOverTimeout = 5 * time.Second
	// handOverPause is how often that process is asked.
	handOverPause = 20 * time.Millisecond
	// leftFor is how long no earlier process must have had a socket before this one registers again:
	// kubelet has taken notice of the end of its stream by then. It is served all the time.
	leftFor = time.Second
	// earlierPause is how often a process that ends looks whether the earlier one has ended.
	earlierPause = 5 * time.Millisecond
)

// leave prepares the end of the stream of this life, while another process serves the resource, or
// is about to. It reports whether the kubelet takes no notice of the end.
func (l *life) leave(ctx context.Context, incarnation uint64) bool {
	log := klog.FromContext(ctx)
	ctx, cancel := context.WithTimeout(ctx, handOverTimeout)
	defer cancel()
	if rivals := l.Registrar.Rivals(l.list.name); len(rivals.Later)+len(rivals.Earlier) > 0 {
		l.awaitTakenIn(ctx)
	}
	err := l.tryLeave(ctx, incarnation)
	if errors.Is(err, kubelet.ErrNotYet) {
		l.ExtendEnd(handOverTimeout + leaveTimeout)
		log.Info("Staying until the process that serves the resource from now on has registered")
		for err != nil && !errors.Is(err, fs.ErrNotExist) && ctx.Err() == nil { // it changes its socket meanwhile
			l.wait(ctx, nil, handOverPause)
			err = l.tryLeave(ctx, incarnation)
		}
	}
	switch {
	case err == nil:
		log.V(2).Info("Kubelet takes no notice of the end of this stream")
	case !errors.Is(err, fs.ErrNotExist):
		log.Info("Kubelet disconnects the other process when this one ends; that one registers again",
			"reason", err.Error())
	}
	return err == nil
}

// noteCheckpoint is called before a list is sent.
func (l *life) noteCheckpoint() {
	if l.CheckpointVersion != nil {
		version := l.CheckpointVersion()
		l.checkpoint.Store(&version)
	}
}

// awaitTakenIn waits until the kubelet has taken in the last list of this life, as far as that is
// known. The kubelet writes its checkpoint for each list, and sees the end of the stream only then:
// on a busy disk, a second later. It would take the end for that of the process that has registered
// meanwhile.
func (l *life) awaitTakenIn(ctx context.Context) {
	before := l.checkpoint.Load()
	if before == nil || *before == "" || l.CheckpointVersion() != *before {
		return
	}
	l.ExtendEnd(handOverTimeout + leaveTimeout)
	klog.FromContext(ctx).Info("Staying until the kubelet has taken in the list of this process")
	for ctx.Err() == nil && l.CheckpointVersion() == *before {
		l.wait(ctx, nil, handOverPause)
	}
}

// tryLeave keeps other processes from registering if the kubelet has forgotten the other process:
// the kubelet would take the end of this one for that of a process which registers meanwhile.
func (l *life) tryLeave(ctx context.Context, incarnation uint64) error {
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	unlock := l.Registrar.LockRegistrations(ctx)
	err := l.Registrar.Leave(ctx, incarnation, l.list.name)
	if err != nil {
		unlock()
		return err
	}
	l.past.unlock = unlock
	return nil
}

// prepareEnd prepares the end of this process, whose newest stream is that of this life.
func (l *life) prepareEnd(ctx context.Context, incarnation uint64, server *grpc.Server, service *service) {
	forgotten := l.past.endsForgotten()
	switch silence := l.silence.Value(); {
	case !service.streamed() || !service.oneClient, silence == forForeign: // another program serves the resource
	default:
		l.silence.Publish(forNext) // the other process has the list
		if l.leave(ctx, incarnation) {
			return
		}
	}
	if forgotten && len(l.later()) == 0 {
		l.sayFarewell(ctx, incarnation, server, service.options())
	}
}

// sayFarewell registers once more before this process ends. It is called where an earlier process
// has made kubelet forget this one, and no other process serves the resource: kubelet would not see
// that the streams of this one end. It first waits for the end of earlier processes, which could
// make kubelet forget this registration, too.
func (l *life) sayFarewell(ctx context.Context, incarnation uint64, server *grpc.Server,
	options *pluginapi.DevicePluginOptions) {
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	l.silence.Publish(forNext) // a list that kubelet took in after the end would bring the devices back
	l.awaitEarlier(ctx)
	l.past.unlock = l.Registrar.LockRegistrations(ctx) // a process that starts now registers when this one has ended
	endpoint := l.Registrar.NewEndpoint(l.list.name)
	socket, err := statefile.Listen(ctx, endpoint)
	if err == nil {
		go func() { _ = server.Serve(socket) }() // it ends with the server
		err = l.register(ctx, incarnation, endpoint, options)
	}
	if err != nil {
		klog.FromContext(ctx).Info("Kubelet up to 1.36 may not see that this process ends", "reason", err.Error())
	}
}

// awaitEarlier waits until no earlier process has a socket, for half of leaveTimeout at most. The
// directory may be watched no longer.
func (l *life) awaitEarlier(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout/2)
	defer cancel()
	for ctx.Err() == nil && len(l.Registrar.Rivals(l.list.name).Earlier) > 0 {
		l.wait(ctx, nil, earlierPause)
	}
}

// forget notes that an earlier process makes kubelet forget this one. It reports false if this
// process is ending: then it would not register again.
func (p *past) forget() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.ending {
		p.forgotten++
	}
	return !p.ending
}

// beginRegistration returns how often the kubelet was made to forget this process, and notes that
// a registration begins.
func (p *past) beginRegistration() (forgotten int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.began = p.forgotten
	return p.forgotten
}

// remembered notes that kubelet has accepted a registration. forgotten is what beginRegistration
// returned for it.
func (p *past) remembered(forgotten int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known = forgotten
}

// isForgotten reports whether kubelet was made to forget this process and has accepted no
// registration of it since. Kubelet may have forgotten a later process, too, and not have seen that
// one end.
func (p *past) isForgotten() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.forgotten > p.known
}

// endsForgotten notes that this process is ending, and reports whether kubelet was made to forget
// it.
func (p *past) endsForgotten() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ending = true
	return p.forgotten > p.known
}

// seesLeave notes that the process with this token is ending. It reports whether this process
// registers again once that one has ended, as it serves the resource now, or else whether it does
// so soon. Both are false where another server serves the resource, or this process is ending
// itself.
//
// This process serves the resource when the kubelet has its list and calls no other process. The
// kubelet calls a later process that registered after this life, even if this life has not noticed
// the socket of that process yet.
func (s *service) seesLeave(token string) (again, soon bool) {
	if !s.past.forget() {
		return false, false
	}
	s.past.seeLeave(token)
	if !s.streamed() {
		return false, true
	}
	if !s.oneClient {
		return false, false
	}
	switch s.silence.Value() {
	case speaks, forDifference:
		switch {
		case s.mayHaveRegisteredLater(token):
			s.silence.Publish(forLater)
			return false, true
		case s.sent.Value() == nil:
			return false, true
		}
		s.leaves.Publish(true)
		return true, false
	case forNext:
		return false, true
	case forLater: // if not for that process, then for another one that has come since
		return false, len(s.past.ofLeaving(s.Registrar.Rivals(s.list.name).Later)) > 0
	default:
		return false, false
	}
}

// mayHaveRegisteredLater reports whether the process with this token started later and was not
// known to be ending when this life registered.
func (l *life) mayHaveRegisteredLater(token string) bool {
	later := slices.ContainsFunc(l.Registrar.Rivals(l.list.name).Later, func(name string) bool {
		_, its, _ := kubelet.ParseSocketName(name)
		return its == token
	})
	l.past.mu.Lock()
	defer l.past.mu.Unlock()
	return later && l.past.leaving[token] > l.past.began
}

// seeLeave notes that the process with this token is ending: it is no later process any more.
func (p *past) seeLeave(token string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, known := p.leaving[token]; known {
		return
	}
	if p.leaving == nil {
		p.leaving = map[string]int{}
	}
	p.leaving[token] = p.forgotten
	p.left.Publish(len(p.leaving))
}

// ofLeaving returns those of the sockets whose processes are ending.
func (p *past) ofLeaving(names []string) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return !p.isLeaving(name) })
}

// isLeaving needs the lock.
func (p *past) isLeaving(name string) bool {
	_, token, _ := kubelet.ParseSocketName(name)
	_, leaving := p.leaving[token]
	return leaving
}

// forgetLeaving forgets that processes are ending which have none of these sockets. It needs the
// lock.
func (p *past) forgetLeaving(names []string) {
	there := map[string]bool{}
	for _, name := range names {
		_, token, _ := kubelet.ParseSocketName(name)
		there[token] = true
	}
	maps.DeleteFunc(p.leaving, func(token string, _ int) bool { return !there[token] })
}

// endKept ends the server of the life before, if there still is one, while the kubelet has
// forgotten this process and takes no notice of that. It returns when the kubelet has seen the end:
// it would take that for the end of whichever process registers meanwhile. Where a later process
// may have registered, the server goes on.
func (l *life) endKept(ctx context.Context, incarnation uint64) {
	if l.past.kept == nil {
		return
	}
	defer l.Registrar.LockRegistrations(ctx)()
	if len(l.later()) > 0 {
		return
	}
	l.past.endKept()
	l.pause(ctx, incarnation, stopDelay)
}

// keep leaves the stream of this life open, without further lists, and its server running until the
// next life ends. So does a stream that was kept before.
func (l *life) keep(socket *listener, server *grpc.Server, tasks *sync.WaitGroup) {
	before := l.past.kept
	l.silence.Publish(forNext)
	_ = socket.Close() // the socket stays until the next one is there
	l.past.socket = socket
	l.past.serveKept = func(unix *net.UnixListener) *listener {
		socket := &listener{UnixListener: unix, connections: l.connections, logger: socket.logger}
		tasks.Go(func() { _ = server.Serve(socket) }) // it ends with the server
		return socket
	}
	l.past.kept = func() {
		if before != nil {
			before()
		}
		close(l.closing)
		l.connections.close()
		server.Stop()
		tasks.Wait()
	}
}

// beReachable has the server of the life before, if there still is one, answer other processes
// while this process has no life. Without such a server it closes the last socket.
func (l *life) beReachable(ctx context.Context) {
	if l.past.kept == nil {
		l.past.release()
		return
	}
	if l.past.reachable {
		return
	}
	unix, err := statefile.Listen(ctx, l.Registrar.NewEndpoint(l.list.name))
	l.past.release()
	if err != nil {
		klog.FromContext(ctx).Info("Other processes cannot ask this one to serve the resource", "reason", err.Error())
		return
	}
	l.past.socket, l.past.reachable = l.past.serveKept(unix), true
}

// endBetween prepares the end of a process that ends between two lives, while the server of the
// life before goes on.
func (p *past) endBetween() {
	if p.kept != nil && p.unlock == nil { // else the end is prepared already
		p.prepareEnd()
	}
}

// letRegister lets other processes register, where this one kept them from it until the kubelet has
// seen its end.
func (p *past) letRegister(c clock.WithTicker) {
	if p.unlock == nil {
		return
	}
	timer := c.NewTimer(stopDelay)
	defer timer.Stop()
	<-timer.C()
	p.unlock()
}

// endKept ends the server of the life before, if there still is one.
func (p *past) endKept() {
	if p.kept != nil {
		p.kept()
		p.kept, p.serveKept = nil, nil
	}
}
