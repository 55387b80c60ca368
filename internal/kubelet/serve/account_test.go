package serve_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet/scenario"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/quiet"
)

// A liar is kubelet's account as a test wants it.
type liar struct {
	mu    sync.Mutex
	ids   []string
	err   error
	count int // of answers
}

func (l *liar) say(ids []string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ids, l.err = ids, err
}

func (l *liar) Allocatable(context.Context) (map[string][]string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.count++
	return map[string][]string{gpu: slices.Clone(l.ids)}, l.err
}

func (l *liar) asked() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.count
}

func (*liar) Allocating() (ended func(bool)) { return func(bool) {} }

func (l *liar) Held(context.Context) ([]kubelet.HeldDevice, error) {
	return nil, errors.New("not asked here")
}

func TestALastingDifferenceBeginsANewLifeNowAndThen(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		c := clocktesting.NewFakeClock(time.Now())
		n := newNode(t)
		n.startKubelet(t, v)
		account := &liar{err: errors.New("not yet")}
		d := n.startDaemonWith(t, c, account)
		d.offer(2)
		n.awaitAllocatable(t, 2)

		// An account that cannot be had, or agrees, changes nothing.
		mark := n.Mark()
		askedAgain := func() {
			before := account.asked()
			until(t, c, "asked again", func() bool { return account.asked() > before })
		}
		askedAgain()
		account.say([]string{id(1), id(0), id(0)}, nil)
		askedAgain()
		askedAgain()
		if got := n.Events(mark); len(got) != 0 {
			t.Fatalf("kubelet saw %v while all was well", got)
		}

		// An account that stays wrong: the first new life begins soon, and its stream stays.
		account.say([]string{id(0)}, nil)
		lied := c.Now()
		step := func(d, most time.Duration) { // kubelet and the daemon may be slower than this clock
			if c.Since(lied) < most {
				c.Step(d)
			}
		}
		poll.Until(t, "registered again", func() bool { // before the time has come to register once more
			step(20*time.Millisecond, 4*time.Second)
			return n.count(standin.Registered, mark) > 0
		})
		n.await(t, "a list", func() bool { return n.listedAnew(mark) && n.Allocatable(gpu) == 2 })
		before := n.Mark()
		d.status(t, "registering again did not help", func(s serve.Status) bool {
			step(100*time.Millisecond, 9*time.Second)
			return strings.Contains(s.Problem, "a new registration did not repair this")
		})
		if got := n.Events(before); len(got) != 0 {
			t.Errorf("kubelet saw %v after the first new life", got)
		}
		until(t, c, "registered once more", func() bool { return n.count(standin.Registered, mark) > 1 })
		if lists := n.count(standin.Listed, mark); lists > n.count(standin.Registered, mark) {
			t.Errorf("%d lists in %d lives", lists, n.count(standin.Registered, mark))
		}
	})
}

// TestAListThatWaitsForAnAccount: after a difference no list is sent until its reason is known.
// That a GPU is sick reaches kubelet soon all the same.
func TestAListThatWaitsForAnAccount(t *testing.T) {
	t.Parallel()
	all := []string{id(0), id(1)}
	for name, then := range map[string]func(*liar){
		"the account agrees":          func(l *liar) { l.say(all, nil) },
		"the account is not answered": func(l *liar) { l.say(nil, errors.New("kubelet is busy")) },
		"the account always differs":  func(*liar) {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := clocktesting.NewFakeClock(time.Now())
			n := newNode(t)
			n.startKubelet(t, standin.V137)
			account := &liar{err: errors.New("not yet")}
			d := n.startDaemonWith(t, c, account)
			d.offer(2)
			n.awaitAllocatable(t, 2)
			until(t, c, "asked as seldom as ever", func() bool { return account.asked() >= 10 })
			account.say(all[:1], nil)
			poll.Until(t, "the account differs", func() bool {
				quiet.Wait(time.Second) // the clock does not run ahead of the daemon
				differs := strings.HasPrefix(d.Status()[0].Problem, "the kubelet counts 1")
				if !differs {
					c.Step(30 * time.Second)
				}
				return differs
			})
			quiet.Wait(time.Second)
			d.offer(2, 1)
			quiet.Wait(time.Second)
			if n.Allocatable(gpu) != 2 {
				t.Error("the list was sent before the reason of the difference was known")
			}
			then(account)
			began := c.Now()
			poll.Until(t, "one device is offered", func() bool {
				quiet.Wait(100 * time.Millisecond)
				c.Step(100 * time.Millisecond)
				return n.Allocatable(gpu) == 1 || c.Since(began) > 20*time.Second
			})
			if n.Allocatable(gpu) != 1 {
				t.Errorf("the list was not sent within %v", c.Since(began))
			}
		})
	}
}

// TestAListThatWaitsForAnotherProgram: where another program has registered since, its end is
// waited for, also when the account is not answered.
func TestAListThatWaitsForAnotherProgram(t *testing.T) {
	t.Parallel()
	c := clocktesting.NewFakeClock(time.Now())
	n := newNode(t)
	n.startKubelet(t, standin.V137)
	account := &liar{ids: []string{id(0), id(1)}}
	d := n.startDaemonWith(t, c, account)
	d.offer(2)
	n.awaitAllocatable(t, 2)
	until(t, c, "asked as seldom as ever", func() bool { return account.asked() >= 10 })
	theirs := n.startAnother(t)
	account.say([]string{"theirs"}, nil)
	step := func() {
		quiet.Wait(100 * time.Millisecond) // the clock does not run ahead of the daemon
		c.Step(100 * time.Millisecond)
	}
	poll.Until(t, "the account differs", func() bool {
		differs := strings.HasPrefix(d.Status()[0].Problem, "the kubelet counts 1")
		if !differs {
			step()
		}
		return differs
	})
	account.say(nil, errors.New("kubelet is busy"))
	mark := n.Mark()
	d.offer(2, 1)
	for began := c.Now(); c.Since(began) < 3*time.Second; {
		step()
	}
	if got := n.Events(mark); len(got) != 0 {
		t.Errorf("kubelet saw %v beside the other plugin", got)
	}
	theirs.Stop()
	until(t, c, "our devices again", func() bool { return n.listedAnew(mark) && n.Allocatable(gpu) == 1 })
}

// Kubelet 1.36 that has none of the devices any more has stopped the endpoint: a list would change
// what it shows, and nothing else. A kubelet that takes a list in on a busy node counts nothing
// meanwhile, and is not registered with again.
func TestAKubeletThatHasNothingIsRegisteredWithAgain(t *testing.T) {
	t.Parallel()
	c := clocktesting.NewFakeClock(time.Now())
	n := newNode(t)
	n.startKubelet(t, standin.V136)
	account := &liar{ids: []string{id(1), id(0)}}
	d := n.startDaemonWith(t, c, account)
	d.offer(2)
	n.awaitAllocatable(t, 2)
	d.status(t, "agreed", func(s serve.Status) bool { c.Step(20 * time.Millisecond); return s.Agreed })
	mark := n.Mark()
	account.say(nil, nil)
	d.offer(3)
	n.awaitAllocatable(t, 3)
	d.status(t, "different", func(s serve.Status) bool { c.Step(20 * time.Millisecond); return s.Problem != "" })
	account.say([]string{id(0), id(1), id(2)}, nil)
	d.status(t, "agreed", func(s serve.Status) bool { c.Step(20 * time.Millisecond); return s.Agreed })
	if n.count(standin.Registering, mark) > 0 {
		t.Errorf("kubelet saw %v while it took the list in", n.Events(mark))
	}
	mark = n.Mark()
	account.say(nil, nil)
	until(t, c, "registered again", func() bool { return n.count(standin.Registering, mark) > 0 })
	if first := n.Events(mark)[0]; first.Kind == standin.Listed {
		t.Errorf("kubelet saw %v first, want no list before the registration", first)
	}
}

// startAnother starts a foreign plugin that registers the resource with one device of its own,
// "theirs", and waits until kubelet has that.
func (n *node) startAnother(t *testing.T) *scenario.Plugin {
	t.Helper()
	p, err := scenario.StartPlugin(n.dir, "nvidia-gpu.sock", gpu, scenario.Script{})
	check(t, err)
	t.Cleanup(p.Stop)
	p.Send(&device{ID: "theirs", Health: pluginapi.Healthy})
	check(t, p.Register(t.Context()))
	n.awaitAllocatable(t, 1)
	return p
}

// A foreign plugin registers the resource after us, with devices of its own.
func TestAnotherProgramThatRegisteredLastServes(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		n, d := serving(t, v, clock.RealClock{}, 2)
		d.status(t, "agreed", func(s serve.Status) bool { return s.Agreed })
		mark := n.Mark()
		theirs := n.startAnother(t)
		d.status(t, "silent", func(s serve.Status) bool { return s.Phase == serve.PhaseOtherPlugin })
		d.offer(2, 1)
		d.offer(3)
		if _, err := n.Admit(t.Context(), standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 1}); err != nil {
			t.Errorf("a pod is refused: %v", err)
		}
		n.Remove("p")
		for _, e := range n.Events(mark) {
			if e.Kind == standin.Listed && len(e.Devices) != 1 ||
				e.Kind == standin.Registering && filepath.Base(e.Endpoint) != "nvidia-gpu.sock" {
				t.Errorf("kubelet saw %v beside the other plugin", e)
			}
		}
		mark = n.Mark()
		theirs.Stop()
		n.await(t, "our devices again", func() bool { return n.listedAnew(mark) && n.Allocatable(gpu) == 3 })
		_, err := n.Admit(t.Context(), standin.Container{Pod: "q", Name: "c", Resource: gpu, Count: 3})
		check(t, err)
	})
}

// askedAccount does something while kubelet is asked what it counts.
type askedAccount struct {
	serve.Accountant
	once atomic.Pointer[func()]
}

func (a *askedAccount) Allocatable(ctx context.Context) (map[string][]string, error) {
	if do := a.once.Swap(nil); do != nil {
		(*do)()
	}
	return insist(func() (map[string][]string, error) { return a.Accountant.Allocatable(ctx) })
}

// The answer to a question may show the devices of a program that has registered since the question
// began.
func TestAnotherProgramMayRegisterWhileKubeletIsAsked(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		c := clocktesting.NewFakeClock(time.Now())
		n := newNode(t)
		n.startKubelet(t, v)
		account := &askedAccount{Accountant: n.account(t, c)}
		d := n.startDaemonWith(t, c, account)
		d.offer(2)
		n.awaitAllocatable(t, 2)
		until(t, c, "agreed", func() bool { return slices.ContainsFunc(d.Status(), func(s serve.Status) bool { return s.Agreed }) })
		mark := n.Mark()
		register := func() { n.startAnother(t) }
		account.once.Store(&register)
		until(t, c, "silent", func() bool {
			return slices.ContainsFunc(d.Status(), func(s serve.Status) bool { return s.Phase == serve.PhaseOtherPlugin })
		})
		if again := n.count(standin.Registering, mark); again != 1 {
			t.Errorf("%d registrations, want that of the other plugin", again)
		}
	})
}

// A foreign plugin that comes again under the name of its socket serves again. Its devices of the
// first time are departing then, which gives our list reasons to be sent again.
func TestAnotherProgramThatRegistersAgainServesAgain(t *testing.T) {
	t.Parallel()
	for _, end := range []string{"stopped", "killed"} {
		t.Run(end, func(t *testing.T) {
			t.Parallel()
			bothVersions(t, func(t *testing.T, v standin.Version) {
				n, d := serving(t, v, clock.RealClock{}, 2)
				for round := range 3 {
					d.status(t, "agreed", agreed)
					theirs := n.startAnother(t)
					mark := n.Mark()
					d.status(t, "silent", func(s serve.Status) bool { return s.Phase == serve.PhaseOtherPlugin })
					pod := fmt.Sprint("p", round)
					got, err := n.Admit(t.Context(), standin.Container{Pod: pod, Name: "c", Resource: gpu, Count: 1})
					if err != nil || got.IDs[0] != "theirs" {
						t.Errorf("round %d: a pod gets %v: %v", round, got.IDs, err)
					}
					n.Remove(pod) // kubelet's checkpoint goes on naming it
					for _, e := range n.Events(mark) {
						if e.Kind == standin.Listed && len(e.Devices) != 1 {
							t.Errorf("round %d: kubelet saw %v beside the other plugin", round, e)
						}
					}
					mark = n.Mark()
					if end == "killed" {
						theirs.Kill()
					} else {
						theirs.Stop()
					}
					n.await(t, "our devices again", func() bool { return n.listedAnew(mark) && n.Allocatable(gpu) == 2 })
				}
			})
		})
	}
}

// Another program registers the same devices after us, and ends. On kubelet 1.36, nobody is asked
// for devices from then on, although kubelet lists what we send.
func TestAListThatIsSentAsAnotherProgramEndsHidesNothing(t *testing.T) {
	t.Parallel()
	for _, end := range []string{"stopped", "killed"} {
		t.Run(end, func(t *testing.T) {
			t.Parallel()
			bothVersions(t, func(t *testing.T, v standin.Version) {
				n := newNode(t)
				n.startKubelet(t, v)
				account := &countedAccount{Accountant: n.account(t, clock.RealClock{})}
				d := n.startDaemonWith(t, clock.RealClock{}, account)
				d.offer(2)
				d.status(t, "agreed", agreed)
				theirs, err := scenario.StartPlugin(n.dir, "nvidia-gpu.sock", gpu, scenario.Script{})
				check(t, err)
				t.Cleanup(theirs.Stop)
				mark := n.Mark()
				theirs.Send(&device{ID: id(0), Health: pluginapi.Healthy}, &device{ID: id(1), Health: pluginapi.Healthy})
				check(t, theirs.Register(t.Context()))
				n.await(t, "their list", func() bool { return n.count(standin.Listed, mark) > 0 })
				compared := account.compared.Load()
				poll.Until(t, "their socket was seen", func() bool { return account.compared.Load() >= compared+2 })
				mark = n.Mark()
				if end == "killed" {
					theirs.Kill()
				} else {
					theirs.Stop()
				}
				n.await(t, "the end of their stream", func() bool { return n.count(standin.StreamEnded, mark) > 0 })
				d.offer(2, 1)
				n.awaitAllocatable(t, 1)
				pod := standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 1}
				poll.Until(t, "a pod that gets a device", func() bool {
					_, err := n.Admit(t.Context(), pod)
					return err == nil
				})
			})
		})
	}
}

func TestTheAccountIsComparedAtOnceWhenAnotherSocketDisappears(t *testing.T) {
	t.Parallel()
	c := clocktesting.NewFakeClock(time.Now())
	n := newNode(t)
	n.startKubelet(t, standin.V137)
	sibling := n.foreign(t)
	account := &liar{ids: []string{id(1), id(0)}}
	d := n.startDaemonWith(t, c, account)
	d.offer(2)
	n.awaitAllocatable(t, 2)
	poll.Until(t, "seen", func() bool { return slices.Contains(d.sockets.Value(), "nvidia-gpu.sock") })
	// By the tenth time, half a minute lies between one comparison and the next.
	until(t, c, "compared as seldom as it ever is", func() bool { return account.asked() >= 10 })

	mark, removed := n.Mark(), c.Now()
	account.say([]string{id(0)}, nil)
	check(t, os.Remove(sibling))
	poll.Until(t, "noticed", func() bool { return !slices.Contains(d.sockets.Value(), "nvidia-gpu.sock") })
	poll.Until(t, "registered again", func() bool {
		if c.Since(removed) < 3*time.Second { // a second of difference, and two waits for a busy kubelet
			c.Step(10 * time.Millisecond)
		}
		return n.count(standin.Registering, mark) > 0
	})
}

// foreign makes a socket of a program that left it behind, and returns its path.
func (n *node) foreign(t *testing.T) string {
	t.Helper()
	path := filepath.Join(n.dir, "nvidia-gpu.sock")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	check(t, err)
	listener.SetUnlinkOnClose(false)
	t.Cleanup(func() { _ = listener.Close() })
	return path
}

func TestWithoutAnAccountTheEndOfALaterServerBeginsANewLife(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubelet(t, standin.V137)
	c := clocktesting.NewFakeClock(time.Now())
	account := &liar{err: errors.New("no PodResources here")}
	d := n.startDaemonWith(t, c, account)
	d.offer(2)
	until(t, c, "asked as seldom as every 800 ms", func() bool { return account.asked() >= 4 })
	sibling := n.foreign(t)
	poll.Until(t, "seen", func() bool { return slices.Contains(d.sockets.Value(), "nvidia-gpu.sock") })
	asked, came := account.asked(), c.Now()
	poll.Until(t, "kubelet is asked soon", func() bool {
		if c.Since(came) < 500*time.Millisecond {
			c.Step(10 * time.Millisecond)
		}
		return account.asked() > asked
	})
	mark := n.Mark()
	check(t, os.Remove(sibling))
	until(t, c, "registered again", func() bool { return n.listedAnew(mark) })
}
