package serve_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// A roll-out that overtakes the one before ends the later of two daemons, before or after the next
// one has come. The earlier one serves until that does. No device is taken away, and the kubelet
// sees the end of the last one.
func TestARollOutOvertakesTheOneBefore(t *testing.T) { // not beside other tests: what it measures needs a processor
	for name, next := range map[string]bool{"the next one comes afterwards": false, "the next one comes meanwhile": true} {
		t.Run(name, func(t *testing.T) {
			bothVersions(t, func(t *testing.T, v standin.Version) {
				n, first := serving(t, v, clock.RealClock{}, 2)
				stop := n.lowest(t)
				for range 2 {
					later := n.overlap(t, first, 2)
					later.status(t, "agreed", agreed)
					var last *daemon
					if next {
						last = n.startDaemon(t, clock.RealClock{})
					}
					mark := n.Mark()
					var ends sync.WaitGroup
					ends.Go(later.stop)
					if next {
						last.offer(2)
						n.await(t, "the next daemon's devices", func() bool { return n.listedAnew(mark) })
						last.status(t, "agreed", agreed)
					}
					ends.Wait()
					if next {
						last.stop()
					}
					first.status(t, "agreed", agreed)
					_, err := n.Admit(t.Context(), standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 2})
					check(t, err)
					n.Remove("p")
				}
				if least := stop(); least < 2 {
					t.Errorf("%d devices were allocatable", least)
				}
				first.stop()
				n.awaitAllocatable(t, 0)
				if sockets := n.sockets(t); len(sockets) > 0 {
					t.Errorf("the sockets are %v, want none", sockets)
				}
			})
		})
	}
}

// The later of two daemons may end before the earlier one has noticed the socket of the later one.
// The earlier daemon has not stopped sending lists, but the kubelet calls the later one: the
// earlier daemon registers again before the later one ends.
func TestALaterProcessEndsBeforeItIsNoticed(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubelet(t, standin.V136)
	earlier := n.startSet(t, serve.Collaborators{
		Registrar: n.directory(t), Accountant: n.account(t, clock.RealClock{}), Inspector: &inspector{}, Clock: clock.RealClock{},
	})
	earlier.kubelet.Publish(1) // nothing tells this daemon of other sockets
	earlier.offer(2)
	n.awaitAllocatable(t, 2)
	earlier.status(t, "agreed", agreed)
	mark := n.Mark()
	later := n.startDaemon(t, clock.RealClock{})
	later.offer(2)
	n.await(t, "the later daemon's devices", func() bool { return n.listedAnew(mark) })
	earlier.status(t, "unaware of the later one", agreed)
	stop := n.lowest(t)
	mark = n.Mark()
	later.stop()
	if !n.listedAnew(mark) {
		t.Error("the later daemon ended before the earlier one had sent its list again")
	}
	_, err := n.Admit(t.Context(), standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 2})
	check(t, err)
	if least := stop(); least < 2 {
		t.Errorf("%d devices were allocatable", least)
	}
}

// startPaused starts a daemon with two devices whose registrations the test lets continue.
func (n *node) startPaused(t *testing.T, r *pausedRegistrar) *daemon {
	t.Helper()
	d := n.startSetOn(t, serve.Collaborators{Registrar: r, Accountant: n.account(t, clock.RealClock{}),
		Clock: clock.RealClock{}})
	d.offer(2)
	return d
}

// A third daemon may come while the second one registers again for the end of the first: after the
// second one has seen no later daemon, and before the kubelet has a list of that registration. The
// third one registers afterwards, so the second one stays registered until then, without a list.
func TestALaterProcessComesDuringASecondRegistration(t *testing.T) { // not beside other tests: what it measures needs a processor
	for _, last := range []bool{false, true} {
		t.Run(fmt.Sprintf("the last one leaves first %t", last), func(t *testing.T) {
			poll.Until(t, "a round in which the third daemon waits for the second", func() bool {
				return comesDuringASecondRegistration(t, last)
			})
		})
	}
}

// comesDuringASecondRegistration returns false without a result if the second daemon was so slow
// that the third one may have registered first.
func comesDuringASecondRegistration(t *testing.T, lastLeavesFirst bool) bool {
	n, first := serving(t, standin.V136, clock.RealClock{}, 2)
	r := newPausedRegistrar(n.directory(t))
	mark := n.Mark()
	second := n.startPaused(t, r)
	<-r.called
	r.goOn <- struct{}{}
	n.await(t, "the second daemon's devices", func() bool { return n.listedAnew(mark) })
	first.status(t, "silent", yielding)
	second.status(t, "agreed", agreed)
	stop := n.lowest(t)
	first.stop()
	<-r.called // the second daemon has seen no later one
	began := time.Now()
	mark = n.Mark()
	waiting := newPausedRegistrar(n.directory(t))
	close(waiting.goOn)
	third := n.startPaused(t, waiting)
	<-waiting.locks // it listens
	close(r.goOn)
	n.await(t, "two registrations", func() bool { return n.count(standin.Registered, mark) >= 2 })
	if time.Since(began) >= kubelet.LockTimeout {
		second.stop()
		third.stop()
		return false
	}
	third.status(t, "agreed", agreed)
	second.status(t, "silent", yielding)
	if ended := n.count(standin.StreamEnded, mark); ended > 0 {
		t.Errorf("%d streams have ended; kubelet saw %v", ended, n.Events(mark))
	}
	earlier, later := second, third
	if lastLeavesFirst {
		earlier, later = third, second
	}
	earlier.stop()
	later.status(t, "agreed", agreed)
	_, err := n.Admit(t.Context(), standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 2})
	check(t, err)
	if least := stop(); least < 2 {
		t.Errorf("%d devices were allocatable; kubelet saw %v", least, n.Events(mark))
	}
	later.stop()
	n.awaitAllocatable(t, 0)
	return true
}

// slow starts a kubelet 1.36 that takes notice of the end of a stream only after a while.
func slow(t *testing.T) *node {
	t.Helper()
	n := newNode(t)
	n.startKubeletWith(t, standin.Options{Version: standin.V136, SeesEndsAfter: 15 * time.Millisecond})
	return n
}

// A daemon that registers a second time ends the stream of the life before the last. The kubelet
// must not take that for the end of the stream of the new registration.
func TestTheStreamOfAnEarlierLifeEndsBeforeTheNextRegistration(t *testing.T) { // not beside other tests: what it measures needs a processor
	n := slow(t)
	first := n.startDaemon(t, clock.RealClock{})
	first.offer(2)
	n.awaitAllocatable(t, 2)
	later := n.overlap(t, first, 2)
	later.status(t, "agreed", agreed)
	stop := n.lowest(t)
	mark := n.Mark()
	later.stop()
	n.await(t, "two registrations", func() bool { return n.count(standin.Registered, mark) >= 2 })
	n.await(t, "the ends of the two other streams", func() bool { return n.count(standin.StreamEnded, mark) >= 2 })
	first.status(t, "agreed", agreed)
	if least := stop(); least < 2 || n.count(standin.Registered, mark) > 2 {
		t.Errorf("%d devices were allocatable; kubelet saw %v", least, n.Events(mark))
	}
}

// A later daemon may register before the daemon that is about to register a second time ends the
// stream of the life before the last. The kubelet would take that end for the end of the later one,
// so the stream stays open.
func TestTheStreamOfAnEarlierLifeStaysForALaterProcess(t *testing.T) { // not beside other tests: what it measures needs a processor
	n := newNode(t)
	n.startKubelet(t, standin.V136)
	r := newPausedRegistrar(n.directory(t))
	r.lock = make(chan struct{})
	close(r.goOn)
	first := n.startPaused(t, r)
	<-r.locks
	r.lock <- struct{}{}
	n.awaitAllocatable(t, 2)
	overtaken := n.overlap(t, first, 2)
	overtaken.status(t, "agreed", agreed)
	stop := n.lowest(t)
	var end sync.WaitGroup
	end.Go(overtaken.stop)
	<-r.locks // the first daemon registers to serve again
	r.lock <- struct{}{}
	end.Wait()
	<-r.locks // it is about to end its first stream, and to register a second time
	mark := n.Mark()
	last := n.startDaemon(t, clock.RealClock{})
	last.offer(2)
	n.await(t, "the last daemon's devices", func() bool { return n.listedAnew(mark) })
	last.status(t, "agreed", agreed)
	close(r.lock)
	first.status(t, "silent", yielding)
	if ended := n.count(standin.StreamEnded, mark); ended > 0 {
		t.Errorf("%d streams have ended; kubelet saw %v", ended, n.Events(mark))
	}
	mark = n.Mark()
	first.stop()
	n.await(t, "the last daemon again", func() bool { return n.listedAnew(mark) })
	last.status(t, "agreed", agreed)
	if least := stop(); least < 2 {
		t.Errorf("%d devices were allocatable; kubelet saw %v", least, n.Events(mark))
	}
	last.stop()
	n.awaitAllocatable(t, 0)
}

// Two daemons may leave for the same later one. The registration by which the second has the
// kubelet forget the later daemon begins when the kubelet has seen the end of the first: it would
// take that for the end of the later one.
func TestTwoDaemonsLeaveForALaterOne(t *testing.T) { // not beside other tests: what it measures needs a processor
	n := slow(t)
	first := n.startDaemon(t, clock.RealClock{})
	first.offer(2)
	n.awaitAllocatable(t, 2)
	second := n.overlap(t, first, 2)
	last := n.overlap(t, second, 2)
	last.status(t, "agreed", agreed)
	stop := n.lowest(t)
	mark := n.Mark()
	var ends sync.WaitGroup
	ends.Go(first.stop)
	ends.Go(second.stop)
	ends.Wait()
	n.await(t, "the last daemon again", func() bool { return n.listedAnew(mark) })
	last.status(t, "agreed", agreed)
	left := false
	for _, e := range n.Events(mark) {
		switch e.Kind {
		case standin.Refused:
			left = true
		case standin.StreamEnded:
			left = false
		case standin.Registering:
			if left {
				t.Error("a registration began before the kubelet had seen the end of the process that has left")
			}
		default:
		}
	}
	if least := stop(); least < 2 {
		t.Errorf("%d devices were allocatable; kubelet saw %v", least, n.Events(mark))
	}
}

// A daemon may end while the kubelet still writes its checkpoint for the list of that daemon. The
// kubelet sees the end of the stream later then, so the daemon stays until the list is taken in, for
// five seconds at most. A daemon without another one does not wait.
func TestADaemonEndsBeforeItsListIsTakenIn(t *testing.T) {
	t.Parallel()
	n, first := serving(t, standin.V136, clock.RealClock{}, 2)
	var checkpoint checkpoint
	mark := n.Mark()
	later := n.startSetOn(t, serve.Collaborators{Accountant: n.account(t, clock.RealClock{}), Clock: clock.RealClock{},
		CheckpointVersion: checkpoint.read})
	later.offer(2)
	n.await(t, "the later daemon's devices", func() bool { return n.listedAnew(mark) })
	first.status(t, "silent", yielding)
	mark = checkpoint.stop(t, n, later)
	if n.count(standin.Refused, mark) != 1 || n.Allocatable(gpu) != 2 {
		t.Errorf("kubelet saw %v", n.Events(mark))
	}
	alone := n.startSetOn(t, serve.Collaborators{Accountant: n.account(t, clock.RealClock{}), Clock: clock.RealClock{},
		CheckpointVersion: func() string { return "the same" }})
	alone.offer(2)
	first.status(t, "silent again", yielding)
	alone.status(t, "agreed", agreed)
	first.stop()
	began := time.Now()
	alone.stop()
	if took := time.Since(began); took > 4*time.Second {
		t.Errorf("the last daemon ended after %v", took)
	}
	n.awaitAllocatable(t, 0)
}

// TestAKubeletThatNoticesEndsLate: up to 1.36 it takes the end of a stream for the end of the
// registration that followed meanwhile, whose end it notices late again. After sixteen such ends, one
// registration waits, and stays.
func TestAKubeletThatNoticesEndsLate(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubeletWith(t, standin.Options{Version: standin.V136, SeesEndsAfter: 1500 * time.Millisecond})
	d := n.startDaemon(t, clock.RealClock{})
	d.offer(2)
	n.awaitAllocatable(t, 2)
	n.DropStream(gpu)
	n.await(t, "one registration, and the ends of all others noticed", func() bool {
		ended := n.count(standin.StreamEnded, 0)
		return ended > 0 && n.count(standin.Registered, 0) == ended+1 && n.Allocatable(gpu) == 2
	})
	if all := n.count(standin.Registered, 0); all > 20 {
		t.Errorf("%d registrations; kubelet saw %v", all, n.Events(0))
	}
}
