package draplugin_test

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/draplugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// TestOnlyLeaderRegisters: a process that does not lead has no socket. After a hand-over, calls of
// the kubelet to the previous leader are forwarded to the new leader, including waiting calls, in
// both directions.
func TestOnlyLeaderRegisters(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	waits := make(chan struct{})
	leads := map[string]*feed.Feed[bool]{"earlier": feed.New(true), "later": feed.New(false)}
	prepares := map[string]*claims{}
	for name, leads := range leads {
		c := &claims{}
		c.prepare = func(ctx context.Context, claim dra.Claim) error {
			if claim.UID == "waits" && name == "earlier" {
				close(waits)
				for leading, changed := leads.Latest(); leading; leading, changed = leads.Latest() {
					select {
					case <-changed:
					case <-ctx.Done():
						return ctx.Err()
					}
				}
			}
			if !leads.Value() {
				return errors.New("this process does not lead")
			}
			return nil
		}
		prepares[name] = c
	}
	k := n.startKubelet(t)
	earlier := n.startProcess(t, draplugin.Options{Claims: prepares["earlier"], Reader: n.claims, Leads: leads["earlier"]})
	earlier.awaitRegistered(t)
	later := n.startProcess(t, draplugin.Options{Claims: prepares["later"], Reader: n.claims, Leads: leads["later"]})
	if said := prepare(t, k, "a"); said["a"] != "" || !prepares["earlier"].isPrepared("a") {
		t.Errorf("before: %q", said)
	}
	if len(n.sockets(t)) != 1 {
		t.Errorf("a process that does not lead has a socket: %v", n.sockets(t))
	}

	waiting := make(chan map[string]string, 1)
	go func() { waiting <- prepare(t, k, "waits") }()
	<-waits
	leads["earlier"].Publish(false) // nobody leads: calls wait
	early := make(chan map[string]string, 1)
	go func() { early <- prepare(t, k, "early") }()
	leads["later"].Publish(true)
	for uid, answer := range map[string]chan map[string]string{"waits": waiting, "early": early} {
		if said := <-answer; said[uid] != "" || !prepares["later"].isPrepared(uid) {
			t.Errorf("%s: %q", uid, said)
		}
	}
	later.awaitRegistered(t)
	if said := prepare(t, k, "b"); said["b"] != "" || !prepares["later"].isPrepared("b") {
		t.Errorf("after: %q", said)
	}

	leads["later"].Publish(false)
	leads["earlier"].Publish(true)
	if said := prepare(t, k, "c"); said["c"] != "" || !prepares["earlier"].isPrepared("c") {
		t.Errorf("the lead went back, and kubelet asks the later process: %q", said)
	}
	if answers, err := k.Unprepare(t.Context(), dra.Driver, claim("a")); err != nil || answers["a"].GetError() != "" ||
		prepares["earlier"].isPrepared("a") {
		t.Errorf("Unprepare: %v, %v", answers, err)
	}

	leads["earlier"].Publish(false) // nobody leads, for as long as kubelet waits
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if answers, err := k.Prepare(ctx, dra.Driver, claim("d")); err == nil && answers["d"].GetError() == "" {
		t.Error("a claim was prepared although no process leads")
	}
	logged := func(what string) int { return strings.Count(earlier.logged()+later.logged(), what) }
	poll.Until(t, "the process that kubelet called says that it failed",
		func() bool { return logged("A call for a claim failed") > 0 })
	if times := logged("does not answer calls for claims yet"); times > 1 {
		t.Errorf("each call that another process forwards is logged: %d", times)
	}
}

// TestWaitingCallDuringHandOver: the new leader makes the call. The wait ends with the
// tenure, before the process knows that it has lost the lead.
func TestWaitingCallDuringHandOver(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	leads := map[string]*feed.Feed[bool]{"earlier": feed.New(true), "later": feed.New(false)}
	ended, again := make(chan struct{}), make(chan struct{})
	first, next := &claims{}, &claims{}
	first.prepare = func(ctx context.Context, _ dra.Claim) error {
		select {
		case <-ended:
			close(again)
			<-ctx.Done() // waits for the next tenure
			return ctx.Err()
		default:
			close(ended)
			return dra.ErrEnded
		}
	}
	k := n.startKubelet(t)
	n.startProcess(t, draplugin.Options{Claims: first, Reader: n.claims, Leads: leads["earlier"]}).awaitRegistered(t)
	n.startProcess(t, draplugin.Options{Claims: next, Reader: n.claims, Leads: leads["later"]})
	answer := make(chan map[string]string, 1)
	go func() { answer <- prepare(t, k, "a") }()
	select {
	case <-again: // it still leads: the tasks of the term end
	case said := <-answer:
		t.Fatalf("Prepare while the lead is handed over: %q", said)
	}
	leads["earlier"].Publish(false)
	leads["later"].Publish(true)
	if said := <-answer; said["a"] != "" || !next.isPrepared("a") {
		t.Errorf("Prepare: %q", said)
	}
}

// TestLeaderRegistersAgain: the leader registers again while another process still has a
// socket, because the process may be paused, and the kubelet calls the last to register. Without
// such a socket, the kubelet calls the leader anyway.
func TestLeaderRegistersAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	k := n.startKubelet(t)
	first, next := feed.New(true), feed.New(false)
	p := n.startProcess(t, draplugin.Options{Claims: n.claims, Reader: n.claims, Leads: first})
	p.awaitRegistered(t)
	first.Publish(false)
	other := n.startProcess(t, draplugin.Options{Claims: &claims{prepare: func(ctx context.Context,
		_ dra.Claim) error {
		<-ctx.Done()
		return ctx.Err()
	}},
		Reader: n.claims, Leads: next})
	next.Publish(true)
	other.awaitRegistered(t)
	first.Publish(true) // the other process is paused, and does not know
	p.await(t, "it has registered again", func(s draplugin.Status) bool { return s.Registered && s.Registrations == 2 })
	awaitCalled(t, k)
	if said := prepare(t, k, "a"); said["a"] != "" || !n.claims.isPrepared("a") {
		t.Errorf("Prepare: %q", said)
	}
	next.Publish(false)
	other.stop()
	first.Publish(false)
	first.Publish(true)
	if said := prepare(t, k, "b"); said["b"] != "" || p.Status().Value().Registrations != 2 {
		t.Errorf("Prepare: %q; %+v", said, p.Status().Value())
	}
}

// TestNoCallLostDuringReregistration: the kubelet calls the first socket until it is
// connected to a later socket.
func TestNoCallLostDuringReregistration(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	c, leads := clocktesting.NewFakeClock(time.Now()), feed.New(true)
	p := n.startProcess(t, draplugin.Options{Claims: n.claims, Reader: n.claims, Leads: leads, Clock: c})
	poll.Until(t, "a socket", func() bool { return len(n.sockets(t)) == 1 })
	first := n.sockets(t)[0]
	n.register(t, first)
	other := kubelet.SocketName("dra", kubelet.NewToken(), 1)
	looks := n.listen(t, other)
	leads.Publish(false)
	before := looks()
	stepUntil(t, c, "it has seen that it does not lead", func() bool { return looks() > before+2 })
	leads.Publish(true)
	var second string
	poll.Until(t, "another socket of the process", func() bool {
		for _, name := range n.sockets(t) {
			if name != first && name != other {
				second = name
			}
		}
		return second != ""
	})
	n.prepareBy(t, first, "not registered")
	n.register(t, second)
	p.await(t, "it has registered again", func(s draplugin.Status) bool { return s.Registered && s.Registrations == 2 })
	c.Step(5 * time.Second)
	n.prepareBy(t, first, "not connected")
	n.dial(t, second).Connect()
	stepUntil(t, c, "the first socket is gone", func() bool { return !slices.Contains(n.sockets(t), first) })
	n.prepareBy(t, second, "connected")
	if status := p.Status().Value(); !status.Registered || status.Registrations != 2 {
		t.Errorf("%+v", status)
	}
}

// listen creates a socket like another process's, which accepts connections. It returns the number
// of accepted connections.
func (n *node) listen(t *testing.T, name string) (accepted func() int) {
	t.Helper()
	l, err := net.Listen("unix", n.socket(name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	var count atomic.Int64
	go func() {
		for conn, err := l.Accept(); err == nil; conn, err = l.Accept() {
			_ = conn.Close()
			count.Add(1)
		}
	}()
	return func() int { return int(count.Load()) }
}

// register registers the driver with a socket, as kubelet does, without the connection for calls.
func (n *node) register(t *testing.T, socket string) {
	t.Helper()
	client := registerapi.NewRegistrationClient(n.dial(t, socket))
	// A new socket may refuse connections for a moment.
	if _, err := client.GetInfo(t.Context(), &registerapi.InfoRequest{}, grpc.WaitForReady(true)); err != nil {
		t.Fatal(err)
	}
	if _, err := client.NotifyRegistrationStatus(t.Context(),
		&registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
		t.Fatal(err)
	}
}

// prepareBy has a claim prepared through a new connection to a socket.
func (n *node) prepareBy(t *testing.T, socket, uid string) {
	t.Helper()
	answer, err := drav1.NewDRAPluginClient(n.dial(t, socket)).NodePrepareResources(t.Context(),
		&drav1.NodePrepareResourcesRequest{Claims: []*drav1.Claim{claim(uid)}})
	if err != nil || answer.GetClaims()[uid].GetError() != "" || !n.claims.isPrepared(uid) {
		t.Errorf("Prepare, %s: %v, %v", uid, answer, err)
	}
}

// dial returns a connection to a socket in the folder, until the test ends.
func (n *node) dial(t *testing.T, socket string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+n.socket(socket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// TestPausedProcesses: paused processes have sockets, where the kernel accepts connections,
// and started last. The leader makes a call without waiting for them.
func TestPausedProcesses(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubelet(t)
	leads := feed.New(true)
	n.startProcess(t, draplugin.Options{Claims: &claims{}, Reader: n.claims, Leads: leads}).awaitRegistered(t)
	first := n.sockets(t)[0]
	leads.Publish(false)
	n.startProcess(t, draplugin.Options{Claims: n.claims, Reader: n.claims, Leads: feed.New(true)}).awaitRegistered(t)
	for range 3 {
		stopped, err := net.Listen("unix", n.socket(kubelet.SocketName("dra", kubelet.NewToken(), 1)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = stopped.Close() })
	}
	n.prepareBy(t, first, "a")
}
