package plugin

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/files"
)

// Kubelet up to 1.36 takes the end of any stream of a resource for the end of the server that registered last. In a roll-out, the end of
// the earlier process would cost the later one its registration. So the earlier one first has kubelet forget who registered last: then
// kubelet takes no notice of an end. The later one registers a second time when the earlier one has ended, and kubelet knows it again. Its
// first stream stays open as long as the second: kubelet would take the end of the first for that of the second.
//
// Kubelet 1.37 knows whose stream ends. There, nothing of this is done: with two streams of one process, it could ask the one that ends
// last.

const (
	// leaveTimeout limits the preparation of the end of a process: it has 2 s in all.
	leaveTimeout = 800 * time.Millisecond
	// leftFor is how long no earlier process must have had a socket before this one registers again: kubelet has taken notice of the
	// end of its stream by then. It is served all the time.
	leftFor = time.Second
	// earlierPause is how often a process that ends looks whether the earlier one has ended.
	earlierPause = 5 * time.Millisecond
)

// leave prepares the end of the stream of this life, while a later process serves the resource.
func (l *life) leave(ctx context.Context, incarnation uint64) {
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	log := klog.FromContext(ctx)
	if err := l.Registrar.Leave(ctx, incarnation, l.list.name); err != nil {
		log.Info("Kubelet disconnects the later process when this one ends; that one registers again", "reason", err.Error())
		return
	}
	log.V(2).Info("Kubelet takes no notice of the end of this stream")
}

// prepareEnd prepares the end of this process, whose newest stream is that of this life.
func (l *life) prepareEnd(ctx context.Context, incarnation uint64, server *grpc.Server, service *service) {
	switch {
	case len(l.later()) > 0:
		if service.streamed() && service.oneClient {
			l.leave(ctx, incarnation)
		}
	case l.past.endsForgotten():
		l.sayFarewell(ctx, incarnation, server, service.options())
	}
}

// sayFarewell registers once more before this process ends. It is called where an earlier process has made kubelet forget this one, and
// no other process serves the resource: kubelet would not see that the streams of this one end. It first waits for the end of earlier
// processes, which could make kubelet forget this registration, too.
func (l *life) sayFarewell(ctx context.Context, incarnation uint64, server *grpc.Server, options *pluginapi.DevicePluginOptions) {
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	l.silence.Publish(forNext) // a list that kubelet took in after the end would bring the devices back
	l.awaitEarlier(ctx)
	defer l.Registrar.LockRegistrations(ctx)() // a server of a process that starts now registers after this one
	endpoint := l.Registrar.NewEndpoint(l.list.name)
	socket, err := files.Listen(ctx, endpoint)
	if err == nil {
		go func() { _ = server.Serve(socket) }() // it ends with the server
		err = l.register(ctx, incarnation, endpoint, options)
	}
	if err != nil {
		klog.FromContext(ctx).Info("Kubelet up to 1.36 may not see that this process ends", "reason", err.Error())
	}
}

// awaitEarlier waits until no earlier process has a socket, for half of leaveTimeout at most. The directory may be watched no longer.
func (l *life) awaitEarlier(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout/2)
	defer cancel()
	for ctx.Err() == nil && len(l.Registrar.Rivals(l.list.name).Earlier) > 0 {
		l.wait(ctx, nil, earlierPause)
	}
}

// forget notes that an earlier process makes kubelet forget this one. It reports false if this process is ending: then it would not
// register again.
func (p *past) forget() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.ending {
		p.forgotten++
	}
	return !p.ending
}

// timesForgotten returns how often kubelet was made to forget this process.
func (p *past) timesForgotten() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.forgotten
}

// remembered notes that kubelet has accepted a registration. forgotten is what timesForgotten returned before that registration began.
func (p *past) remembered(forgotten int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known = forgotten
}

// isForgotten reports whether kubelet was made to forget this process and has accepted no registration of it since. Kubelet may have
// forgotten a later process, too, and not have seen that one end.
func (p *past) isForgotten() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.forgotten > p.known
}

// endsForgotten notes that this process is ending, and reports whether kubelet was made to forget it.
func (p *past) endsForgotten() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ending = true
	return p.forgotten > p.known
}

// registersAgain reports whether this life registers again when an earlier process has ended. Where another server has registered after
// this one, it does not.
func (l *life) registersAgain() bool {
	if !l.past.forget() {
		return false
	}
	if silence := l.silence.Value(); silence != speaks && silence != forDifference {
		return false
	}
	l.leaves.Publish(true)
	return true
}

// keep leaves the stream of this life open, without further lists, and its server running until the next life ends.
func (l *life) keep(socket *listener, server *grpc.Server, tasks *sync.WaitGroup) {
	l.past.endKept()
	l.silence.Publish(forNext)
	_ = socket.Close() // the socket stays until the next one is there
	l.past.socket = socket
	l.past.kept = func() {
		close(l.closing)
		l.connections.close()
		server.Stop()
		tasks.Wait()
	}
}

// endBetween prepares the end of a process that ends between two lives, while the server of the life before goes on.
func (p *past) endBetween() {
	if p.kept != nil {
		p.prepareEnd()
	}
}

// endKept ends the server of the life before, if there still is one.
func (p *past) endKept() {
	if p.kept != nil {
		p.kept()
		p.kept = nil
	}
}
