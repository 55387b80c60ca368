package serve_test

import (
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// A later daemon may come while a daemon that ends waits for the lock of registrations: the one that ends
// registers no more, and the kubelet ignores its end.
func TestALaterProcessComesBeforeTheLastRegistration(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubelet(t, standin.V136)
	r := newPausedRegistrar(n.directory(t))
	r.lock = make(chan struct{})
	close(r.goOn)
	ending := n.startPaused(t, r)
	<-r.locks
	r.lock <- struct{}{}
	n.awaitAllocatable(t, 2)
	ending.status(t, "agreed", agreed)
	n.registerInVain(t, func() { ending.status(t, "silent", yielding) })
	ending.status(t, "agreed again", agreed)
	stopped := make(chan struct{})
	go func() { ending.stop(); close(stopped) }()
	<-r.locks // to detach from another process: there is none
	r.lock <- struct{}{}
	<-r.locks // to register once more
	mark := n.Mark()
	later := n.startDaemon(t, clock.RealClock{})
	later.offer(2)
	n.await(t, "the later daemon's devices", func() bool { return n.listedAnew(mark) })
	later.status(t, "agreed", agreed)
	stop := n.lowest(t)
	close(r.lock)
	<-stopped
	n.await(t, "the later daemon again", func() bool { return n.count(standin.Registered, mark) >= 2 })
	later.status(t, "agreed again", agreed)
	if least, refused := stop(), n.count(standin.Refused, mark); least < 2 || refused != 1 {
		t.Errorf("%d devices were allocatable, and %d registrations refused; kubelet saw %v", least, refused, n.Events(mark))
	}
}

// A daemon that must end while it waits for the lock of registrations does not begin its second registration
// without the lock: the process that has the lock may be one whose end the kubelet is about to notice.
func TestADaemonEndsBeforeItsSecondRegistration(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubelet(t, standin.V136)
	earlier := n.startDaemon(t, clock.RealClock{})
	earlier.offer(2)
	n.awaitAllocatable(t, 2)
	r := newPausedRegistrar(n.directory(t))
	r.lock = make(chan struct{})
	close(r.goOn)
	mark := n.Mark()
	later := n.startPaused(t, r)
	<-r.locks
	r.lock <- struct{}{}
	n.await(t, "the later daemon's devices", func() bool { return n.listedAnew(mark) })
	earlier.status(t, "silent", yielding)
	later.status(t, "agreed", agreed)
	earlier.stop()
	<-r.locks // to register a second time
	mark = n.Mark()
	stopped := make(chan struct{})
	go func() { later.stop(); close(stopped) }() // ends the wait for the lock
	select {
	case <-r.locks: // to register once more
	case <-stopped:
	}
	if events := n.Events(mark); n.count(standin.Registering, mark) > 0 {
		t.Errorf("the daemon registered without the lock; kubelet saw %v", events)
	}
	close(r.lock)
	<-stopped
	n.awaitAllocatable(t, 0)
}

// All waits of a daemon that ends take less time than its pod has, whatever the kubelet does.
func TestADaemonEndsBesideAKubeletThatHangs(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("the daemon waits for the kubelet for more than five seconds")
	}
	n, earlier := serving(t, standin.V136, clock.RealClock{}, 2)
	mark := n.Mark()
	var until atomic.Int64 // when the daemon may end at the latest
	later := n.startSetOn(t, serve.Collaborators{Accountant: n.account(t, clock.RealClock{}), Clock: clock.RealClock{},
		ExtendEnd: func(d time.Duration) { until.Store(time.Now().Add(d).UnixNano()) }})
	later.offer(2)
	n.await(t, "the later daemon's devices", func() bool { return n.listedAnew(mark) })
	earlier.status(t, "silent", yielding)
	later.status(t, "agreed", agreed)
	earlier.stop()
	n.SetRegister(standin.RegisterHangs)
	mark = n.Mark()
	n.await(t, "the second registration", func() bool { return n.count(standin.Registering, mark) > 0 })
	began := time.Now()
	later.stop()
	const grace = 10 * time.Second // terminationGracePeriodSeconds
	if asked := time.Unix(0, until.Load()).Sub(began); asked >= grace-time.Second {
		t.Errorf("the daemon asked for %v to end; its pod has %v", asked, grace)
	}
	n.SetRegister(standin.RegisterAnswers)
}
