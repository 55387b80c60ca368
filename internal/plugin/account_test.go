package plugin_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
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

func (l *liar) Held(context.Context) ([]kubelet.HeldDevice, error) {
	return nil, errors.New("not asked here")
}

func TestALastingMismatchBeginsANewLife(t *testing.T) {
	t.Parallel()
	c := clocktesting.NewFakeClock(time.Now())
	n := newNode(t)
	n.startKubelet(t, standin.V137)
	account := &liar{err: errors.New("not yet")}
	n.startDaemonWith(t, c, account).offer(2)
	n.awaitAllocatable(t, 2)

	// An account that cannot be had, or agrees, changes nothing.
	mark := n.Mark()
	askedAgain := func() {
		before := account.asked()
		until(t, c, "asked again", func() bool { return account.asked() > before })
	}
	askedAgain()
	account.say([]string{id(1), id(0)}, nil)
	askedAgain()
	askedAgain()
	if got := n.Events(mark); len(got) != 0 {
		t.Fatalf("kubelet saw %v while all was well", got)
	}
	account.say([]string{id(0)}, nil)
	askedAgain()
	n.await(t, "sent again", func() bool { return n.count(standin.Listed, mark) > 0 })
	if n.count(standin.Registering, mark) != 0 {
		t.Error("registered again before the list was sent again")
	}
	until(t, c, "registered again", func() bool { return n.count(standin.Registered, mark) > 0 })
}

// Kubelet 1.36 that has none of the devices any more has stopped the endpoint: a list would change what it shows, and
// nothing else.
func TestAKubeletThatHasNothingIsRegisteredWithAgain(t *testing.T) {
	t.Parallel()
	c := clocktesting.NewFakeClock(time.Now())
	n := newNode(t)
	n.startKubelet(t, standin.V136)
	account := &liar{ids: []string{id(1), id(0)}}
	n.startDaemonWith(t, c, account).offer(2)
	n.awaitAllocatable(t, 2)
	until(t, c, "asked", func() bool { return account.asked() > 0 })
	mark := n.Mark()
	account.say(nil, nil)
	until(t, c, "registered again", func() bool { return n.count(standin.Registering, mark) > 0 })
	if first := n.Events(mark)[0]; first.Kind == standin.Listed {
		t.Errorf("kubelet saw %v first, want no list before the registration", first)
	}
}

func TestTheAccountIsComparedAtOnceWhenAnotherSocketDisappears(t *testing.T) {
	t.Parallel()
	c := clocktesting.NewFakeClock(time.Now())
	n := newNode(t)
	n.startKubelet(t, standin.V137)
	account := &liar{ids: []string{id(1), id(0)}}
	d := n.startDaemonWith(t, c, account)
	d.offer(2)
	n.awaitAllocatable(t, 2)
	sibling := filepath.Join(n.dir, "nvidia-gpu.sock")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: sibling, Net: "unix"})
	check(t, err)
	listener.SetUnlinkOnClose(false)
	t.Cleanup(func() { _ = listener.Close() })
	eventually(t, "seen", func() bool { return slices.Contains(d.presence.Value().Sockets, "nvidia-gpu.sock") })
	// By the tenth time, half a minute lies between one comparison and the next.
	until(t, c, "compared as seldom as it ever is", func() bool { return account.asked() == 10 })

	mark, removed := n.Mark(), c.Now()
	account.say([]string{id(0)}, nil)
	check(t, os.Remove(sibling))
	eventually(t, "sent again", func() bool {
		if c.Since(removed) < time.Second {
			c.Step(10 * time.Millisecond)
		}
		return n.count(standin.Listed, mark) > 0
	})
	if n.count(standin.Registering, mark) != 0 {
		t.Error("registered again for another's socket")
	}
}

func TestWithoutAnAccountTheListIsSentAgainWhenAnotherSocketDisappears(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubelet(t, standin.V137)
	sibling := filepath.Join(n.dir, "nvidia-gpu.sock")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: sibling, Net: "unix"})
	check(t, err)
	listener.SetUnlinkOnClose(false)
	t.Cleanup(func() { _ = listener.Close() })
	d := n.startDaemonWith(t, clock.RealClock{}, &liar{err: errors.New("no PodResources here")})
	d.offer(2)
	n.await(t, "a list", func() bool { return n.count(standin.Listed, 0) > 0 })
	eventually(t, "seen", func() bool { return slices.Contains(d.presence.Value().Sockets, "nvidia-gpu.sock") })
	mark := n.Mark()
	check(t, os.Remove(sibling))
	n.await(t, "sent again", func() bool { return n.count(standin.Listed, mark) > 0 })
	if n.count(standin.Registering, mark) != 0 {
		t.Error("registered again for another's socket")
	}
}
