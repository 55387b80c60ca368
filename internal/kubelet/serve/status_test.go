package serve_test

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// status waits until the status of the one resource is as it should be.
func (d *daemon) status(t *testing.T, what string, ok func(serve.Status) bool) {
	t.Helper()
	poll.Until(t, what, func() bool {
		all := d.Status()
		return len(all) == 1 && ok(all[0])
	})
}

func TestStatusSaysHowFarAResourceIs(t *testing.T) {
	t.Parallel()
	c := clocktesting.NewFakeClock(time.Now())
	n := newNode(t)
	account := &liar{err: errors.New("not yet")}
	d := n.startDaemonWith(t, c, account)
	d.offer(2)
	d.status(t, "waiting for kubelet", func(s serve.Status) bool { return s.Phase == serve.PhaseNoKubelet && !s.Agreed })

	n.startKubelet(t, standin.V137)
	n.SetRegister(standin.RegisterRefuses)
	d.status(t, "refused, in kubelet's words", func(s serve.Status) bool {
		c.Step(time.Second)
		return s.Phase == serve.PhaseRegistering && strings.Contains(s.Problem, "register refused, as the test asked")
	})
	n.SetRegister(standin.RegisterAnswers)
	d.status(t, "serving", func(s serve.Status) bool {
		c.Step(time.Second)
		return s.Phase == serve.PhaseServing && s.Problem == "" && !s.Agreed
	})

	account.say([]string{id(0), id(1)}, nil)
	d.status(t, "agreed", func(s serve.Status) bool {
		c.Step(time.Second)
		return s.Phase == serve.PhaseServing && s.Agreed && s.Problem == ""
	})
	account.say([]string{id(0)}, nil)
	d.status(t, "different", func(s serve.Status) bool {
		c.Step(time.Second)
		return !s.Agreed && strings.Contains(s.Problem, "kubelet counts 1 healthy devices, and the list has 2")
	})
	account.say([]string{id(0)}, nil)
	d.offer(1)
	d.status(t, "one device departs", func(s serve.Status) bool {
		return len(s.Retiring) == 1 && s.Retiring[0].ID == id(1) && s.Retiring[0].Reason != ""
	})
}

// A nowhere is a Registrar that can be told to name endpoints at which nobody can listen.
type nowhere struct {
	serve.Registrar
	is atomic.Bool
}

func (n *nowhere) NewEndpoint(resource string) string {
	if n.is.Load() {
		return "/nowhere/a.sock"
	}
	return n.Registrar.NewEndpoint(resource)
}

// TestStatusOfAServerThatCannotListen: it does not serve, although the one before it did.
func TestStatusOfAServerThatCannotListen(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubelet(t, standin.V137)
	registrar := &nowhere{Registrar: n.directory(t)}
	d := n.startSetOn(t, serve.Collaborators{
		Registrar: registrar, Accountant: n.account(t, clock.RealClock{}), Clock: clock.RealClock{},
	})
	d.offer(2)
	d.status(t, "serving", func(s serve.Status) bool { return s.Phase == serve.PhaseServing })
	registrar.is.Store(true)
	if err := n.Restart(); err != nil {
		t.Fatal(err)
	}
	d.status(t, "not serving, with the reason", func(s serve.Status) bool {
		return s.Phase == serve.PhaseRegistering && !s.Agreed && strings.Contains(s.Problem, "listen beside the kubelet's socket")
	})
	registrar.is.Store(false)
	d.status(t, "serving again", func(s serve.Status) bool { return s.Phase == serve.PhaseServing && s.Problem == "" })
}
