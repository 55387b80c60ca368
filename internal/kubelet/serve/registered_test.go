package serve_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/quiet"
)

func TestOneRegistrationForEachKubelet(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		n := newNode(t)
		// Kubelet's account is not asked: it would have us register again with a kubelet that is slow to
		// take a list in.
		d := n.startDaemonWith(t, clock.RealClock{}, &liar{err: errors.New("not here")})
		d.offer(8) // before any kubelet
		n.startKubelet(t, v)
		n.await(t, "a list", func() bool { return n.count(standin.Listed, 0) > 0 })
		for range 10 {
			mark := n.Mark()
			check(t, n.Restart())
			n.await(t, "a list", func() bool { return n.count(standin.Listed, mark) > 0 && n.Allocatable(gpu) == 8 })
			if got := n.count(standin.Registering, mark); got != 1 {
				t.Errorf("%d registrations at the new kubelet, want 1", got)
			}
			if got := n.count(standin.Listed, mark); got != 1 {
				t.Errorf("%d lists at the new kubelet, want 1", got)
			}
		}
	})
}

// TestRegistrationComesBack does to the registration whatever can happen to it, and then gives out
// a device.
func TestRegistrationComesBack(t *testing.T) {
	t.Parallel()
	harm := map[string]func(t *testing.T, n *node){
		"kubelet restarts": func(t *testing.T, n *node) { check(t, n.Restart()) },
		"kubelet is slow to come back": func(t *testing.T, n *node) {
			n.Stop()
			check(t, n.Wipe())
			check(t, n.Resume())
		},
		"kubelet.sock is created again": func(t *testing.T, n *node) { check(t, n.RecreateSocket()) },
		"the directory is replaced":     func(t *testing.T, n *node) { check(t, n.ReplaceDirectory()); check(t, n.Restart()) },
		"the directory is wiped":        func(t *testing.T, n *node) { check(t, n.Wipe()); check(t, n.RecreateSocket()) },
		"kubelet ends the stream":       func(_ *testing.T, n *node) { n.DropStream(gpu) },
		"our socket is removed": func(t *testing.T, n *node) {
			for _, name := range n.sockets(t) {
				check(t, os.Remove(filepath.Join(n.dir, name)))
			}
		},
		"register is refused for a while": func(t *testing.T, n *node) {
			n.SetRegister(standin.RegisterRefuses)
			mark := n.Mark()
			n.DropStream(gpu)
			n.await(t, "refused", func() bool { return n.count(standin.Refused, mark) >= 2 })
			n.SetRegister(standin.RegisterAnswers)
		},
		"register is unanswered until kubelet restarts": func(t *testing.T, n *node) {
			n.SetRegister(standin.RegisterHangs)
			mark := n.Mark()
			n.DropStream(gpu)
			n.await(t, "asked", func() bool { return n.count(standin.Registering, mark) >= 1 })
			n.Stop()
			n.SetRegister(standin.RegisterAnswers)
			check(t, n.Resume())
		},
	}
	for name, harm := range harm {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bothVersions(t, func(t *testing.T, v standin.Version) {
				n, _ := serving(t, v, clock.RealClock{}, 8)
				mark := n.Mark()
				harm(t, n)
				n.await(t, "registered again", func() bool { return n.listedAnew(mark) && n.Allocatable(gpu) == 8 })
				got, err := n.Admit(t.Context(), standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 2})
				if err != nil || len(got.IDs) != 2 {
					t.Errorf("Admit() = %v, %v; want two devices", got, err)
				}
				if endpoints := distinct(n.Events(0)); len(endpoints) != n.count(standin.Registering, 0) {
					t.Errorf("%d registrations with %d socket names", n.count(standin.Registering, 0), len(endpoints))
				}
				n.await(t, "the socket of the last life alone", func() bool { return len(n.sockets(t)) == 1 })
			})
		})
	}
}

func distinct(events []standin.Event) map[string]bool {
	endpoints := map[string]bool{}
	for _, e := range events {
		if e.Kind == standin.Registering {
			endpoints[e.Endpoint] = true
		}
	}
	return endpoints
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Kubelet 1.36 ends whatever the resource has when a stream ends, and that may be a registration
// whose stream has not begun: it is answered, and never asked for its list.
func TestAKubeletThatHangsUpBeforeTheListIsRegisteredWithAgain(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		// A life that does not see that kubelet hung up waits 15 s for its stream.
		poll.Once(t, "it is registered again", 12*time.Second, func() {
			n := newNode(t)
			n.startKubelet(t, v)
			n.SetRegister(standin.RegisterHangsUp)
			n.startDaemon(t, clock.RealClock{}).offer(8)
			n.await(t, "hung up", func() bool { return n.count(standin.Registered, 0) > 0 })
			n.SetRegister(standin.RegisterAnswers)
			n.awaitAllocatable(t, 8)
		})
	})
}

func TestStoppingRemovesOurSocketsAndSaysNothing(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		n := newNode(t)
		n.startKubelet(t, v)
		other, err := net.Listen("unix", filepath.Join(n.dir, "nvidia-gpu.sock"))
		check(t, err)
		t.Cleanup(func() { _ = other.Close() })
		d := n.startDaemon(t, clock.RealClock{})
		d.offer(8)
		n.awaitAllocatable(t, 8)
		mark := n.Mark()
		d.stop()
		if left := n.sockets(t); !slices.Equal(left, []string{"nvidia-gpu.sock"}) {
			t.Errorf("sockets left: %v, want the other plugin's", left)
		}
		n.await(t, "the end of the stream", func() bool { return n.count(standin.StreamEnded, mark) > 0 })
		if n.count(standin.Listed, mark) != 0 {
			t.Error("the daemon sent a list on its way out")
		}
	})
}

func TestOurSocketIsMissedThoughNobodySaidThatItWasThere(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		c := clocktesting.NewFakeClock(time.Now())
		n := newNode(t)
		n.startKubelet(t, v)
		d := n.startSet(t, serve.Collaborators{Registrar: n.directory(t), Accountant: &liar{err: errors.New("not here")},
			Clock: c})
		d.kubelet.Publish(1) // and no more
		d.offer(2)
		n.awaitAllocatable(t, 2)
		mark := n.Mark()
		for _, name := range n.sockets(t) {
			check(t, os.Remove(filepath.Join(n.dir, name)))
		}
		d.sockets.Publish(nil) // as before
		until(t, c, "registered again", func() bool { return n.count(standin.Registered, mark) > 0 })
	})
}

// A stuckInspector does not come back until it is released, whatever its context says.
type stuckInspector struct{ began, release chan struct{} }

func (i stuckInspector) Inspect(context.Context, []resource.Device) error {
	close(i.began)
	<-i.release
	return nil
}

func TestACallThatNeverEndsHoldsNothingUp(t *testing.T) {
	t.Parallel()
	ends := map[string]func(n *node, d *daemon){
		"the daemon stops":      func(_ *node, d *daemon) { d.stop() },
		"kubelet drops streams": func(n *node, _ *daemon) { n.DropStream(gpu) },
	}
	for name, end := range ends {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.startKubelet(t, standin.V137)
			stuck := stuckInspector{began: make(chan struct{}), release: make(chan struct{})}
			d := n.startSet(t, serve.Collaborators{Registrar: n.directory(t), Accountant: &liar{err: errors.New("not here")},
				Inspector: stuck, Clock: clock.RealClock{}})
			d.kubelet.Publish(1)
			d.Apply(oneGPU(), serve.Options{Edits: asEnvironment.Edits, Inspect: true}, 1)
			n.awaitAllocatable(t, 1)
			admitted := make(chan error, 1)
			go func() {
				_, err := n.Admit(context.Background(), standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 1})
				admitted <- err
			}()
			<-stuck.began
			mark := n.Mark()
			end(n, d)
			n.await(t, "the end of the stream", func() bool { return n.count(standin.StreamEnded, mark) > 0 })
			if name != "the daemon stops" {
				n.await(t, "registered again", func() bool { return n.count(standin.Listed, mark) > 0 })
			}
			close(stuck.release)
			if err := <-admitted; err == nil {
				t.Error("the container started")
			}
		})
	}
}

func TestARetiredResourceThatReturnsWaitsForTheEndOfItsStream(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		c := clocktesting.NewFakeClock(time.Now())
		n := newNode(t)
		n.startKubelet(t, v)
		d := n.startDaemonWith(t, c, &liar{err: errors.New("not here")})
		d.offerUnder(1, 2)
		n.awaitAllocatable(t, 2)
		// From here on the clock is no faster than kubelet, whose time is the real one.
		inTime := func(what string, done func() bool) {
			poll.Until(t, what, func() bool { c.Step(time.Millisecond); return done() })
		}
		for epoch := uint64(2); epoch < 6; epoch += 2 {
			mark := n.Mark()
			d.Apply(resource.Plan{}, asEnvironment, epoch)
			until(t, c, "emptied", func() bool { return d.listed() == 0 })
			inTime("retired", func() bool { return len(d.Status()) == 0 })
			d.offerUnder(epoch+1, 2)
			inTime("offered again", func() bool { return n.Allocatable(gpu) == 2 })
			n.await(t, "the end of the old stream", func() bool { return n.count(standin.StreamEnded, mark) > 0 })
			events := n.Events(mark)
			ended := slices.IndexFunc(events, standin.Is(standin.StreamEnded, gpu))
			again := slices.IndexFunc(events, standin.Is(standin.Registering, gpu))
			if events[again].Time.Before(events[ended].Time) {
				t.Fatalf("registered before the end of the old stream: %v", events)
			}
		}
	})
}

// A refusedRegistrar counts the calls that did not reach kubelet.
type refusedRegistrar struct {
	*kubelet.Directory
	refused atomic.Int64
}

func (r *refusedRegistrar) Register(
	ctx context.Context, incarnation uint64, name, endpoint string, o *pluginapi.DevicePluginOptions,
) error {
	err := r.Directory.Register(ctx, incarnation, name, endpoint, o)
	if errors.Is(err, kubelet.ErrNotRegistered) {
		r.refused.Add(1)
	}
	return err
}

func TestAKubeletIsRegisteredWithOnceHoweverLateItIsSeen(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		n := newNode(t)
		n.startKubelet(t, v)
		registrar := &refusedRegistrar{Directory: n.directory(t)}
		d := n.startSet(t, serve.Collaborators{Registrar: registrar, Accountant: &liar{err: errors.New("not here")},
			Clock: clock.RealClock{}})
		seen := feed.New(uint64(0))
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan error, 1)
		go func() { ended <- registrar.Watch(ctx, seen, d.sockets) }()
		t.Cleanup(func() { cancel(); check(t, <-ended) })
		poll.Until(t, "seen", func() bool { return seen.Value() == 1 })
		d.kubelet.Publish(1)
		d.offer(2)
		n.awaitAllocatable(t, 2)

		mark := n.Mark()
		check(t, n.Restart())
		poll.Until(t, "tried", func() bool { return registrar.refused.Load() > 1 || n.count(standin.Registering, mark) > 0 })
		if n.count(standin.Registering, mark) > 0 {
			t.Error("registered with a kubelet that was not seen yet")
		}
		poll.Until(t, "seen", func() bool { return seen.Value() > 1 })
		d.kubelet.Publish(seen.Value())
		n.await(t, "registered again", func() bool { return n.listedAnew(mark) && n.Allocatable(gpu) == 2 })
		if got := n.count(standin.Registering, mark); got != 1 {
			t.Errorf("%d registrations at the new kubelet, want 1", got)
		}
	})
}

// TestWhatProvesARegistration: the kubelet counted the devices, gave one away, or kept the stream
// for a second. The next registration begins at once then, and after a pause otherwise.
func TestWhatProvesARegistration(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		counts, gives, compared bool
		lasts                   time.Duration
		proven                  bool
	}{
		"nothing":                    {},
		"a second":                   {lasts: time.Second, proven: true},
		"the kubelet gave one away":  {gives: true, proven: true},
		"the kubelet counts them":    {compared: true, counts: true, proven: true},
		"the kubelet counts another": {compared: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := clocktesting.NewFakeClock(time.Now())
			n := newNode(t)
			n.startKubelet(t, standin.V137)
			account := &liar{err: errors.New("not here")}
			d := n.startDaemonWith(t, c, account)
			d.offer(1)
			n.awaitAllocatable(t, 1)
			d.status(t, "serving", func(s serve.Status) bool { return s.Phase == serve.PhaseServing })
			began, asked := c.Now(), account.asked()
			if tt.gives {
				_, err := n.client(t).Allocate(t.Context(), allocate(id(0)))
				check(t, err)
			}
			if tt.compared { // soon, because the socket of another program has come
				account.say([]string{"another"}, nil)
				if tt.counts {
					account.say([]string{id(0)}, nil)
				}
				n.foreign(t)
			}
			c.Step(tt.lasts)
			poll.Until(t, "the account is compared", func() bool {
				if compared := !tt.compared || account.asked() > asked; compared {
					return true
				}
				if c.Since(began) < 900*time.Millisecond {
					c.Step(time.Millisecond)
				}
				return false
			})
			mark, dropped := n.Mark(), c.Now()
			n.DropStream(gpu)
			quiet.Wait(time.Second) // the end is seen before the clock goes on
			poll.Until(t, "registered again", func() bool {
				if c.Since(dropped) < 10*time.Second {
					c.Step(10 * time.Millisecond)
				}
				return n.listedAnew(mark)
			})
			if proven := !strings.Contains(d.log(), "Will try again"); proven != tt.proven {
				t.Errorf("the registration has worked: %v, want %v; the log:\n%s", proven, tt.proven, d.log())
			}
		})
	}
}
