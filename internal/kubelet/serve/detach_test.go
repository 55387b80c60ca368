package serve_test

import (
	"context"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// lowest looks at how many devices are allocatable until it is stopped, and returns the lowest
// number.
func (n *node) lowest(t *testing.T) (stop func() int) {
	ctx, cancel := context.WithCancel(t.Context())
	least := n.Allocatable(gpu)
	var looking sync.WaitGroup
	looking.Go(func() {
		look := time.NewTicker(100 * time.Microsecond)
		defer look.Stop()
		for ctx.Err() == nil {
			least = min(least, n.Allocatable(gpu))
			<-look.C
		}
	})
	return func() int { cancel(); looking.Wait(); return least }
}

// rollOut starts a daemon beside another one, which ends then, and waits until the new one has
// registered a second time, on 1.36.
func (n *node) rollOut(t *testing.T, v standin.Version, earlier *daemon, devices int) *daemon {
	t.Helper()
	later := n.overlap(t, earlier, devices)
	later.status(t, "agreed", agreed)
	mark := n.Mark()
	earlier.stop()
	if v == standin.V136 {
		n.await(t, "the later daemon again", func() bool { return n.listedAnew(mark) })
	}
	later.status(t, "agreed again", agreed)
	return later
}

// The end of the earlier daemon takes no device away, and kubelet sees the end of the later one.
func TestARollOutTakesNoDeviceAway(t *testing.T) { // not beside other tests: what it measures needs a processor
	bothVersions(t, func(t *testing.T, v standin.Version) {
		n, d := serving(t, v, clock.RealClock{}, 2)
		stop := n.lowest(t)
		for devices := 2; devices <= 4; devices++ {
			mark := n.Mark()
			d = n.rollOut(t, v, d, devices)
			want := 2
			if v == standin.V137 {
				want = 1 // it knows whose stream ends
			}
			if got := n.count(standin.Registered, mark); got != want {
				t.Errorf("kubelet accepted %d registrations, want %d", got, want)
			}
		}
		if least := stop(); least < 2 {
			t.Errorf("%d devices were allocatable", least)
		}
		for _, e := range n.Events(0) {
			if e.Kind == standin.Listed && len(e.Devices) < 2 {
				t.Errorf("the kubelet saw %v", e)
			}
		}
		if sockets := n.sockets(t); len(sockets) != 1 {
			t.Errorf("the sockets are %v, want one", sockets)
		}
		mark := n.Mark()
		d.offer(4, 1)
		n.awaitAllocatable(t, 3)
		lists := slices.DeleteFunc(n.Events(mark), func(e standin.Event) bool { return e.Kind != standin.Listed })
		if len(lists) != 1 {
			t.Errorf("a change came in %d lists, want one: the first stream has none", len(lists))
		}
		_, err := n.Admit(t.Context(), standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 3})
		check(t, err)
		d.stop()
		n.awaitAllocatable(t, 0)
	})
}

// The two streams of a daemon end with each other, so that kubelet does not take the end of one for
// that of the next life's.
func TestALifeAfterTheSecondRegistration(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		n, d := serving(t, v, clock.RealClock{}, 2)
		d = n.rollOut(t, v, d, 2)
		for range 3 {
			mark := n.Mark()
			n.DropStream(gpu)
			n.await(t, "registered again", func() bool { return n.listedAnew(mark) && n.Allocatable(gpu) == 2 })
			d.status(t, "agreed", agreed)
		}
		mark := n.Mark()
		check(t, n.Restart())
		n.await(t, "registered at the new kubelet", func() bool { return n.listedAnew(mark) && n.Allocatable(gpu) == 2 })
		d.status(t, "agreed", agreed)
		_, err := n.Admit(t.Context(), standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 2})
		check(t, err)
	})
}

// Kubelet sees the end of a daemon also before that has registered again.
func TestADaemonThatEndsBeforeItHasRegisteredAgain(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		n, d := serving(t, v, clock.RealClock{}, 2)
		later := n.overlap(t, d, 3)
		later.status(t, "agreed", agreed)
		d.stop()
		later.stop()
		n.awaitAllocatable(t, 0)
		if sockets := n.sockets(t); len(sockets) > 0 {
			t.Errorf("the sockets are %v, want none", sockets)
		}
	})
}

// A leavingRegistrar counts how often kubelet is to forget a later process.
type leavingRegistrar struct {
	*kubelet.Directory
	asked atomic.Int64
}

func (r *leavingRegistrar) Detach(ctx context.Context, incarnation uint64, name string) error {
	r.asked.Add(1)
	return r.Directory.Detach(ctx, incarnation, name)
}

// A later process of an earlier version would not register again: kubelet must see its end.
func TestALaterProcessThatDoesNotRegisterAgainIsNotForgotten(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		n := newNode(t)
		n.startKubelet(t, v)
		registrar := &leavingRegistrar{Directory: n.directory(t)}
		d := n.startSetOn(t, serve.Collaborators{Registrar: registrar, Accountant: n.account(t, clock.RealClock{}),
			Clock: clock.RealClock{}})
		d.offer(2)
		n.awaitAllocatable(t, 2)
		later := n.later(t)
		check(t, later.Register(t.Context()))
		d.status(t, "silent", yielding)
		n.awaitAllocatable(t, 1)
		mark := n.Mark()
		d.stop()
		if asked := registrar.asked.Load() > 0; n.count(standin.Registering, mark) > 0 || asked != (v == standin.V136) {
			t.Errorf("kubelet saw %v; the later process was asked: %v", n.Events(mark), asked)
		}
		if v == standin.V136 {
			check(t, later.WaitStreams(t.Context(), 0))
			return
		}
		later.Stop()
		n.awaitAllocatable(t, 0)
	})
}

// A later process that is not registered yet is not forgotten either: nothing of it is known. Where
// it does not register for five seconds, it is waited for no longer.
func TestAProcessThatIsNotRegisteredDoesNotPromiseToRegisterAgain(t *testing.T) {
	t.Parallel()
	n, d := serving(t, standin.V136, clock.RealClock{}, 2)
	n.SetRegister(standin.RegisterHangs)
	later := n.startDaemon(t, clock.RealClock{})
	later.offer(2)
	d.status(t, "silent", yielding)
	later.status(t, "registering", func(s serve.Status) bool { return s.Phase == serve.PhaseRegistering })
	mark := n.Mark()
	d.stop()
	if n.count(standin.Refused, mark) > 0 {
		t.Errorf("kubelet saw %v", n.Events(mark))
	}
	mark = n.Mark()
	n.SetRegister(standin.RegisterAnswers)
	n.await(t, "the later one's devices", func() bool { return n.listedAnew(mark) && n.Allocatable(gpu) == 2 })
}

// overlap starts a daemon beside another one, and waits until that is silent.
func (n *node) overlap(t *testing.T, earlier *daemon, devices int) (later *daemon) {
	t.Helper()
	mark := n.Mark()
	later = n.startDaemon(t, clock.RealClock{})
	later.offer(devices)
	n.await(t, "the later daemon's devices", func() bool { return n.listedAnew(mark) && n.Allocatable(gpu) == devices })
	earlier.status(t, "silent", yielding)
	return later
}

// Both daemons of a roll-out may be told to end at the same time. Kubelet sees the end of the later
// one all the same, unless it is so slow that the daemon has ended while it registers: up to 1.36
// it may count the devices then until the next daemon comes.
func TestBothDaemonsOfARollOutEndAtOnce(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		n := newNode(t)
		n.startKubelet(t, v)
		for round := range 20 {
			earlier := n.startDaemon(t, clock.RealClock{})
			earlier.offer(2)
			n.awaitAllocatable(t, 2)
			later := n.overlap(t, earlier, 3)
			mark := n.Mark()
			var ends sync.WaitGroup
			ends.Go(earlier.stop)
			ends.Go(func() {
				timer := time.NewTimer(time.Duration(round%10) * time.Millisecond)
				defer timer.Stop()
				<-timer.C
				later.stop()
			})
			ends.Wait()
			n.await(t, "no device, or a slow registration", func() bool {
				return n.Allocatable(gpu) == 0 || v == standin.V136 && n.count(standin.Refused, mark) > 0
			})
		}
	})
}

// A promisingServer is a server of a later process that promises to register again, and is killed
// before.
type promisingServer struct {
	pluginapi.UnimplementedDevicePluginServer
	list *pluginapi.ListAndWatchResponse
}

func (*promisingServer) GetDevicePluginOptions(
	ctx context.Context, _ *pluginapi.Empty,
) (*pluginapi.DevicePluginOptions, error) {
	if kubelet.LeavingToken(ctx) != "" {
		kubelet.WillReregister(ctx)
	}
	return &pluginapi.DevicePluginOptions{}, nil
}

func (p *promisingServer) ListAndWatch(_ *pluginapi.Empty,
	stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	if err := stream.Send(p.list); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

// Of three processes, the first has kubelet forget the last, which is killed then. The one between
// has the same list: it must not take kubelet's account for a proof that kubelet goes by it.
func TestAProcessBetweenServesWhenAForgottenOneIsKilled(t *testing.T) {
	t.Parallel()
	n, first := serving(t, standin.V136, clock.RealClock{}, 2)
	between := n.overlap(t, first, 2)
	mark := n.Mark()
	_, kill := n.startPromising(t)
	n.await(t, "the last one's devices", func() bool { return n.listedAnew(mark) })
	between.status(t, "silent", yielding)
	first.stop()
	mark = n.Mark()
	kill()
	n.await(t, "a registration of the one between", func() bool { return n.listedAnew(mark) && n.Allocatable(gpu) == 2 })
	between.status(t, "agreed", agreed)
	_, err := n.Admit(t.Context(), standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 2})
	check(t, err)
}

// startPromising registers a promisingServer with two devices. The test makes the calls by which it
// leaves.
func (n *node) startPromising(t *testing.T) (leave func(context.Context) error, kill func()) {
	t.Helper()
	directory := n.directory(t)
	incarnation, moved := feed.New(uint64(0)), feed.New([]string(nil))
	ctx, cancel := context.WithCancel(t.Context())
	watched := make(chan error, 1)
	go func() { watched <- directory.Watch(ctx, incarnation, moved) }()
	t.Cleanup(func() { cancel(); check(t, <-watched) })
	poll.Until(t, "kubelet is seen", func() bool { return incarnation.Value() != 0 })
	endpoint := directory.NewEndpoint(gpu)
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: endpoint, Net: "unix"})
	check(t, err)
	listener.SetUnlinkOnClose(false)
	server := grpc.NewServer()
	last := &promisingServer{list: &pluginapi.ListAndWatchResponse{
		Devices: []*device{{ID: id(0), Health: pluginapi.Healthy}, {ID: id(1), Health: pluginapi.Healthy}}}}
	pluginapi.RegisterDevicePluginServer(server, last)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	check(t, directory.Register(t.Context(), incarnation.Value(), gpu, endpoint, &pluginapi.DevicePluginOptions{}))
	return func(ctx context.Context) error { return directory.Detach(ctx, incarnation.Value(), gpu) }, server.Stop
}

// The earlier process may be killed at each step of its end: the later one serves, and kubelet sees
// its end.
func TestTheEarlierProcessIsKilledAsItLeaves(t *testing.T) {
	t.Parallel()
	for name, forgotten := range map[string]bool{"it has told the later one": false,
		"kubelet has forgotten the later one": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.startKubelet(t, standin.V136)
			leave, kill := n.startPromising(t)
			n.awaitAllocatable(t, 2)
			later := n.startDaemon(t, clock.RealClock{})
			later.offer(2)
			later.status(t, "agreed", agreed)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			mark := n.Mark()
			if forgotten {
				check(t, leave(ctx))
			} else {
				n.SetRegister(standin.RegisterHangs)
				left := make(chan error, 1)
				go func() { left <- leave(ctx) }()
				n.await(t, "a registration", func() bool { return n.count(standin.Registering, mark) > 0 })
				cancel()
				if err := <-left; err == nil {
					t.Error("kubelet has answered")
				}
				n.SetRegister(standin.RegisterAnswers)
			}
			kill()
			n.await(t, "the later one again", func() bool { return n.listedAnew(mark) && n.Allocatable(gpu) == 2 })
			later.status(t, "agreed again", agreed)
			_, err := n.Admit(t.Context(), standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 2})
			check(t, err)
			later.stop()
			n.awaitAllocatable(t, 0)
		})
	}
}

// Kubelet does not see that a forgotten process is killed. The next one that starts serves, and
// kubelet sees the end of that.
func TestAForgottenProcessIsKilled(t *testing.T) {
	t.Parallel()
	n, earlier := serving(t, standin.V136, clock.RealClock{}, 2)
	mark := n.Mark()
	_, kill := n.startPromising(t)
	n.await(t, "the later one's devices", func() bool { return n.listedAnew(mark) })
	earlier.status(t, "silent", yielding)
	earlier.stop()
	kill()
	mark = n.Mark()
	next := n.startDaemon(t, clock.RealClock{})
	next.offer(2)
	n.await(t, "the next one's devices", func() bool { return n.listedAnew(mark) && n.Allocatable(gpu) == 2 })
	next.status(t, "agreed", agreed)
	_, err := n.Admit(t.Context(), standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 2})
	check(t, err)
	next.stop()
	n.awaitAllocatable(t, 0)
}

// overlapping returns a node of kubelet 1.36 on which a later daemon serves the two devices of an
// earlier one.
func overlapping(t *testing.T) (n *node, earlier, later *daemon) {
	t.Helper()
	n, earlier = serving(t, standin.V136, clock.RealClock{}, 2)
	later = n.overlap(t, earlier, 2)
	later.status(t, "agreed", agreed)
	return n, earlier, later
}

// A later daemon may be killed while the kubelet connects to it. The kubelet has forgotten the earlier one
// then, which resumes without a registration: the kubelet notices its end all the same.
func TestALaterProcessIsKilledWhileItRegisters(t *testing.T) {
	t.Parallel()
	for name, resumes := range map[string]bool{"the earlier one resumes": true, "the earlier one ends at once": false} {
		t.Run(name, func(t *testing.T) {
			bothVersions(t, func(t *testing.T, v standin.Version) {
				n, earlier := serving(t, v, clock.RealClock{}, 2)
				earlier.status(t, "agreed", agreed)
				mark := n.Mark()
				n.registerInVain(t, func() { earlier.status(t, "silent", yielding) })
				if resumes {
					earlier.status(t, "agreed again", agreed)
				}
				if got := n.count(standin.Registering, mark); got != 1 {
					t.Errorf("%d registrations, want that of the later process; kubelet saw %v", got, n.Events(mark))
				}
				earlier.stop()
				n.awaitAllocatable(t, 0)
				if got, want := n.count(standin.Registered, mark), map[standin.Version]int{standin.V136: 1}[v]; got != want {
					t.Errorf("%d registrations at the end, want %d; kubelet saw %v", got, want, n.Events(mark))
				}
			})
		})
	}
}

// registerInVain registers the socket of a later process, which is gone after the kubelet's call for the
// options has failed. Before the registration it calls listening.
func (n *node) registerInVain(t *testing.T, listening func()) {
	t.Helper()
	directory := n.directory(t)
	endpoint := directory.NewEndpoint(gpu)
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: endpoint, Net: "unix"})
	check(t, err)
	server := grpc.NewServer() // without a service, so that the call fails
	go func() { _ = server.Serve(listener) }()
	defer server.Stop()
	listening()
	if err := directory.Register(t.Context(), 0, gpu, endpoint, nil); err == nil {
		t.Error("the kubelet has accepted a server without a service")
	}
}

// A second registration that fails costs nothing: kubelet goes on with the first, whose server
// answers.
func TestASecondRegistrationFails(t *testing.T) {
	t.Parallel()
	n, earlier, later := overlapping(t)
	earlier.stop()
	n.SetRegister(standin.RegisterRefuses)
	mark := n.Mark()
	n.await(t, "two refusals", func() bool { return n.count(standin.Refused, mark) >= 2 })
	_, err := n.Admit(t.Context(), standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 1})
	check(t, err)
	n.SetRegister(standin.RegisterAnswers)
	n.await(t, "the later daemon again", func() bool { return n.listedAnew(mark) && n.Allocatable(gpu) == 2 })
	later.status(t, "agreed", agreed)
	later.stop()
	n.awaitAllocatable(t, 0)
}

// A daemon may end while it waits to try its second registration once more: kubelet sees its end
// all the same.
func TestADaemonEndsBetweenTwoAttemptsToRegisterAgain(t *testing.T) {
	t.Parallel()
	n, earlier, later := overlapping(t)
	earlier.stop()
	n.SetRegister(standin.RegisterRefuses)
	mark := n.Mark()
	// the next pause is half a second
	n.await(t, "seven refusals", func() bool { return n.count(standin.Refused, mark) >= 7 })
	n.SetRegister(standin.RegisterAnswers)
	later.stop()
	n.awaitAllocatable(t, 0)
	if sockets := n.sockets(t); len(sockets) > 0 {
		t.Errorf("the sockets are %v, want none", sockets)
	}
}

// A daemon may end while the kubelet does not know it and needs a second for a registration, also
// during its second registration: the kubelet notices the end all the same, because the daemon waits
// for the answer.
func TestADaemonEndsWhileRegistrationsTakeLong(t *testing.T) {
	t.Parallel()
	for name, during := range map[string]bool{"before its second registration": false, "during it": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, earlier := serving(t, standin.V136, clock.RealClock{}, 2)
			extended := make(chan time.Duration, 10)
			mark := n.Mark()
			later := n.startSetOn(t, serve.Collaborators{Accountant: n.account(t, clock.RealClock{}),
				Clock: clock.RealClock{}, ExtendEnd: func(d time.Duration) { extended <- d }})
			later.offer(2)
			n.await(t, "the later daemon's devices", func() bool { return n.listedAnew(mark) })
			earlier.status(t, "silent", yielding)
			later.status(t, "agreed", agreed)
			earlier.stop()
			n.SetRegister(standin.RegisterHangs)
			mark = n.Mark()
			if during {
				n.await(t, "the second registration", func() bool { return n.count(standin.Registering, mark) > 0 })
			}
			stopped := make(chan struct{})
			go func() { later.stop(); close(stopped) }()
			select {
			case d := <-extended:
				if d < 5*time.Second {
					t.Errorf("the daemon needs %v to end", d)
				}
				time.AfterFunc(time.Second, func() { n.SetRegister(standin.RegisterAnswers) })
				<-stopped
			case <-stopped:
				t.Fatal("the daemon does not wait for the kubelet")
			}
			n.awaitAllocatable(t, 0)
			if got := n.count(standin.Registering, mark); got != 1 {
				t.Errorf("%d registrations, want 1; kubelet saw %v", got, n.Events(mark))
			}
			if sockets := n.sockets(t); len(sockets) > 0 {
				t.Errorf("the sockets are %v, want none", sockets)
			}
		})
	}
}

// A checkpoint is that of a kubelet that writes it when a test says so.
type checkpoint struct{ asked, version atomic.Int64 }

// read returns the version, and counts how often it was read.
func (c *checkpoint) read() string {
	c.asked.Add(1)
	return strconv.FormatInt(c.version.Load(), 10)
}

// stop ends a daemon whose list the kubelet has not taken in, and returns the mark from before. The
// kubelet takes the list in while the daemon waits for that.
func (c *checkpoint) stop(t *testing.T, n *node, d *daemon) (mark int) {
	t.Helper()
	mark = n.Mark()
	before := c.asked.Load()
	stopped := make(chan struct{})
	go func() { d.stop(); close(stopped) }()
	poll.Until(t, "the daemon looks whether its list is taken in", func() bool { return c.asked.Load() > before+10 })
	if events := n.Events(mark); len(events) > 0 {
		t.Errorf("kubelet saw %v before it had taken in the list", events)
	}
	c.version.Add(1)
	<-stopped
	return mark
}

// A daemon with a kept stream that ends while the kubelet processes its list waits for that: the kubelet
// would take the end of the kept stream for the end of the daemon, and count the devices afterwards.
func TestADaemonWithAKeptStreamEndsBeforeItsListIsTakenIn(t *testing.T) {
	t.Parallel()
	poll.Until(t, "a round in which the stream is kept", func() bool { return awaitsKubelet(t) })
}

// awaitsKubelet returns false without a result if the earlier daemon was so slow that the later one has
// no kept stream.
func awaitsKubelet(t *testing.T) bool {
	n, earlier := serving(t, standin.V136, clock.RealClock{}, 2)
	var checkpoint checkpoint
	mark := n.Mark()
	later := n.startSetOn(t, serve.Collaborators{Accountant: n.account(t, clock.RealClock{}), Clock: clock.RealClock{},
		CheckpointVersion: checkpoint.read})
	later.offer(2)
	n.await(t, "the later daemon's devices", func() bool { return n.listedAnew(mark) })
	earlier.status(t, "silent", yielding)
	mark = n.Mark()
	earlier.stop()
	n.await(t, "the later daemon's second list", func() bool { return n.listedAnew(mark) })
	if !strings.Contains(earlier.log(), "The kubelet ignores the end of the stream") {
		return false
	}
	later.status(t, "agreed", agreed)
	checkpoint.stop(t, n, later)
	n.awaitAllocatable(t, 0)
	return true
}

// The earlier daemon of a roll-out waits for a busy kubelet, which would take its end for the end of the
// later one otherwise.
func TestABusyKubeletRefusesWhatItIsToForget(t *testing.T) {
	t.Parallel()
	n, earlier, _ := overlapping(t)
	stop := n.lowest(t)
	n.SetRegister(standin.RegisterHangs)
	mark := n.Mark()
	ended := make(chan struct{})
	go func() { earlier.stop(); close(ended) }()
	n.await(t, "the registration that is to fail", func() bool { return n.count(standin.Registering, mark) > 0 })
	time.AfterFunc(time.Second, func() { n.SetRegister(standin.RegisterAnswers) })
	<-ended
	n.await(t, "the later daemon's devices", func() bool { return n.listedAnew(mark) })
	if least := stop(); least < 2 {
		t.Errorf("%d devices were allocatable; kubelet saw %v", least, n.Events(mark))
	}
}

// Kubelet may need longer to refuse a registration than the process lives that sent it: the later
// one serves all the same.
func TestKubeletRefusesLate(t *testing.T) {
	t.Parallel()
	n, earlier, later := overlapping(t)
	n.SetRegister(standin.RegisterIsLate)
	mark := n.Mark()
	earlier.stop()
	n.await(t, "a registration of each", func() bool { return n.count(standin.Registering, mark) >= 2 })
	n.SetRegister(standin.RegisterAnswers)
	n.await(t, "a refusal, and the later daemon's devices", func() bool {
		return n.count(standin.Refused, mark) > 0 && n.listedAnew(mark) && n.Allocatable(gpu) == 2
	})
	later.status(t, "agreed", agreed)
	_, err := n.Admit(t.Context(), standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 2})
	check(t, err)
}
