package draplugin_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/draplugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// TestOnlyTheLeadRegisters: a process that does not lead has no socket. When the lead goes over, kubelet's calls go on: those that reach the
// process that led are made by the one that leads, also one that was waiting, and both ways.
func TestOnlyTheLeadRegisters(t *testing.T) {
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
	if answers, err := k.Unprepare(t.Context(), dra.Driver, claim("a")); err != nil || answers["a"].GetError() != "" || prepares["earlier"].isPrepared("a") {
		t.Errorf("Unprepare: %v, %v", answers, err)
	}

	leads["earlier"].Publish(false) // nobody leads, for as long as kubelet waits
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if answers, err := k.Prepare(ctx, dra.Driver, claim("d")); err == nil && answers["d"].GetError() == "" {
		t.Error("a claim was prepared although no process leads")
	}
	if said := later.logged(); strings.Contains(said, "does not answer calls for claims yet") {
		t.Errorf("each call that another process forwards is logged:\n%s", said)
	}
}

// TestACallThatWaitsWhenTheLeadIsHandedOver is made by the process that leads next: its wait ends with the term, before this process knows that
// it does not lead any more.
func TestACallThatWaitsWhenTheLeadIsHandedOver(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	leads := map[string]*feed.Feed[bool]{"earlier": feed.New(true), "later": feed.New(false)}
	ended, again := make(chan struct{}), make(chan struct{})
	first, next := &claims{}, &claims{}
	first.prepare = func(ctx context.Context, _ dra.Claim) error {
		select {
		case <-ended:
			close(again)
			<-ctx.Done() // it waits for the next term
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

// TestTheLeadThatRegisteredBefore registers again where another process has a socket still: that one may be stopped, and kubelet calls the one
// that registered last. Where none has, kubelet calls this one anyway.
func TestTheLeadThatRegisteredBefore(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	k := n.startKubelet(t)
	first, next := feed.New(true), feed.New(false)
	p := n.startProcess(t, draplugin.Options{Claims: n.claims, Reader: n.claims, Leads: first})
	p.awaitRegistered(t)
	first.Publish(false)
	other := n.startProcess(t, draplugin.Options{Claims: &claims{prepare: func(ctx context.Context, _ dra.Claim) error { <-ctx.Done(); return ctx.Err() }},
		Reader: n.claims, Leads: next})
	next.Publish(true)
	other.awaitRegistered(t)
	first.Publish(true) // the other one is stopped, and does not know it
	p.await(t, "it has registered again", func(s draplugin.Status) bool { return s.Registered && s.Registrations == 2 })
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

// TestProcessesThatAreStopped have sockets, where the kernel accepts connections, and they started last. A call is made by the process that
// leads, and does not wait for them.
func TestProcessesThatAreStopped(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubelet(t)
	leads := feed.New(true)
	n.startProcess(t, draplugin.Options{Claims: &claims{}, Reader: n.claims, Leads: leads}).awaitRegistered(t)
	conn, err := grpc.NewClient("unix:"+n.socket(n.sockets(t)[0]), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	leads.Publish(false)
	n.startProcess(t, draplugin.Options{Claims: n.claims, Reader: n.claims, Leads: feed.New(true)}).awaitRegistered(t)
	for range 3 {
		stopped, err := net.Listen("unix", n.socket(kubelet.SocketName("dra", kubelet.NewToken(), 1)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = stopped.Close() })
	}
	answer, err := drav1.NewDRAPluginClient(conn).NodePrepareResources(t.Context(),
		&drav1.NodePrepareResourcesRequest{Claims: []*drav1.Claim{claim("a")}})
	if err != nil || answer.GetClaims()["a"].GetError() != "" || !n.claims.isPrepared("a") {
		t.Errorf("Prepare: %v, %v", answer, err)
	}
}
