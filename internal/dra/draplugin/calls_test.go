package draplugin_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// TestErrors: an error of a claim is in the claim's answer, and does not affect the other claims of
// the call.
func TestErrors(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.claims.uids = map[string]string{"again": "other"}
	n.claims.read = func(_ context.Context, name string) error {
		if name == "away" {
			return errors.New("ask the API server: connection refused")
		}
		return nil
	}
	n.claims.prepare = func(_ context.Context, c dra.Claim) error {
		switch c.UID {
		case "unhealthy":
			return errors.New("GPU gpu-0 is Unhealthy: XID 79; remedy: reset")
		case "cut":
			return errors.New("nvidia-smi: Ung\u00fcltig"[:16])
		case "panics":
			panic("index out of range")
		}
		return nil
	}
	k := n.startKubelet(t)
	d := n.start(t, nil)
	d.awaitRegistered(t)
	want := map[string]string{
		"good": "", "other": "", "away": "read the claim: ask the API server: connection refused",
		"again":     "its UID is other, and not again",
		"unhealthy": "GPU gpu-0 is Unhealthy: XID 79; remedy: reset",
		"cut":       "nvidia-smi: Ung\uFFFD",
		"panics":    "the driver failed; its log has the reason",
	}
	if diff := cmp.Diff(want, prepare(t, k, "good", "other", "away", "again", "unhealthy", "cut", "panics")); diff != "" {
		t.Errorf("answers (-want +got):\n%s", diff)
	}
	n.claims.read = nil
	if said := prepare(t, k, "away"); said["away"] != "" {
		t.Errorf("once the API server is back: %q", said)
	}
}

// TestUnprepareWithoutAPIServer: the call reads no claim.
func TestUnprepareWithoutAPIServer(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	k := n.startKubelet(t)
	n.start(t, nil).awaitRegistered(t)
	prepare(t, k, "a", "b")
	n.claims.read = func(context.Context, string) error {
		t.Error("a claim was read")
		return errors.New("away")
	}
	answers, err := k.Unprepare(t.Context(), dra.Driver, claim("a"), claim("b"), claim("never"))
	if err != nil || len(answers) != 3 || n.claims.isPrepared("a") || n.claims.isPrepared("b") {
		t.Error(err, answers)
	}
	for uid, a := range answers {
		if a.GetError() != "" {
			t.Errorf("%s: %s", uid, a.GetError())
		}
	}
}

// TestSideBySide: a slow claim keeps no other waiting, and no call for itself: the claim can be
// given back.
func TestSideBySide(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	slow, began := make(chan struct{}), make(chan struct{})
	n.claims.prepare = func(_ context.Context, c dra.Claim) error {
		if c.UID == "slow" {
			close(began)
			<-slow
		}
		return nil
	}
	k := n.startKubelet(t)
	n.start(t, nil).awaitRegistered(t)
	ended := make(chan error, 1)
	go func() {
		answers, err := k.Prepare(t.Context(), dra.Driver, claim("slow"))
		if text := answers["slow"].GetError(); text != "" {
			err = errors.New(text)
		}
		ended <- err
	}()
	<-began
	for _, uid := range []string{"a", "b", "c"} {
		if said := prepare(t, k, uid); said[uid] != "" {
			t.Error(said)
		}
	}
	if answers, err := k.Unprepare(t.Context(), dra.Driver, claim("slow")); err != nil ||
		answers["slow"].GetError() != "" {
		t.Errorf("Unprepare beside it: %v, %v", answers, err)
	}
	select {
	case err := <-ended:
		t.Errorf("the slow claim was answered: %v", err)
	default:
	}
	close(slow)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestCallsFinish: a stopping process finishes its calls as long as the kubelet waits, but not
// longer.
func TestCallsFinish(t *testing.T) {
	t.Parallel()
	for name, finishes := range map[string]bool{"in time": true, "too late": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			release, began := make(chan struct{}), make(chan struct{})
			n.claims.prepare = func(ctx context.Context, _ dra.Claim) error {
				close(began)
				select {
				case <-release:
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			k := n.startKubelet(t)
			c := clocktesting.NewFakeClock(time.Now())
			d := n.start(t, c)
			stepUntil(t, c, "registered", func() bool { return d.Status().Value().Registered })
			answer := make(chan error, 1)
			go func() {
				answers, err := k.Prepare(t.Context(), dra.Driver, claim("slow"))
				if text := answers["slow"].GetError(); text != "" {
					err = errors.New(text)
				}
				answer <- err
			}()
			<-began
			ended := make(chan struct{})
			go func() {
				d.stop()
				close(ended)
			}()
			stopped := c.Now()
			stepUntil(t, c, "most of the time to finish is over", func() bool { return c.Since(stopped) > 44*time.Second })
			if len(answer) > 0 {
				t.Fatal("the call has ended early")
			}
			if finishes {
				close(release)
			} else {
				stepUntil(t, c, "the end of the call", func() bool { return len(answer) > 0 })
			}
			if err := <-answer; (err == nil) != finishes {
				t.Errorf("the call is answered: %v", err)
			}
			<-ended
		})
	}
}

// TestKubeletGoesDuringPrepare: the call ends, and the next kubelet's call for the claim is
// answered.
func TestKubeletGoesDuringPrepare(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	began := make(chan context.Context, 10)
	first := atomic.Bool{}
	n.claims.prepare = func(ctx context.Context, _ dra.Claim) error {
		if first.CompareAndSwap(false, true) {
			began <- ctx
			<-ctx.Done()
			return context.Cause(ctx)
		}
		return nil
	}
	k := n.startKubelet(t)
	d := n.start(t, nil)
	d.awaitRegistered(t)
	ended := make(chan error, 1)
	go func() {
		_, err := k.Prepare(t.Context(), dra.Driver, claim("a"))
		ended <- err
	}()
	<-began
	k.Stop()
	if err := <-ended; err == nil || !strings.Contains(err.Error(), "clos") && !strings.Contains(err.Error(), "cancel") {
		t.Errorf("the call of the kubelet that ended: %v", err)
	}
	k = n.startKubelet(t)
	poll.Until(t, "the claim is prepared", func() bool {
		answers, err := k.Prepare(t.Context(), dra.Driver, claim("a"))
		return err == nil && answers["a"].GetError() == ""
	})
}

// TestStopsWithStreams: a stopped driver ends the stream of health itself.
func TestStopsWithStreams(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	d := n.start(t, nil)
	poll.Until(t, "a socket", func() bool { return len(n.sockets(t)) == 1 })
	conn, err := grpc.NewClient("unix:"+n.socket(n.sockets(t)[0]),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	stream, err := healthv1.NewDRAResourceHealthClient(conn).NodeWatchResources(
		// the file is there before somebody listens
		t.Context(), &healthv1.NodeWatchResourcesRequest{}, grpc.WaitForReady(true))
	if err == nil {
		_, err = stream.Recv()
	}
	if err != nil {
		t.Fatal(err)
	}
	d.stop()
	for err == nil {
		_, err = stream.Recv()
	}
	if !errors.Is(err, io.EOF) {
		t.Errorf("the stream ended with %v", err)
	}
}

// TestStopsAfterCalls: a stopped driver still answers the current call.
func TestStopsAfterCalls(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	began, goOn := make(chan struct{}), make(chan struct{})
	n.claims.prepare = func(context.Context, dra.Claim) error {
		close(began)
		<-goOn
		return nil
	}
	k := n.startKubelet(t)
	d := n.start(t, nil)
	d.awaitRegistered(t)
	answered := make(chan string, 1)
	go func() {
		answers, err := k.Prepare(t.Context(), dra.Driver, claim("a"))
		answered <- fmt.Sprint(err, answers["a"].GetError())
	}()
	<-began
	var stopped sync.WaitGroup
	stopped.Go(d.stop)
	poll.Until(t, "the driver accepts no connections", func() bool {
		for _, name := range n.sockets(t) {
			if conn, err := net.Dial("unix", n.socket(name)); err == nil {
				_ = conn.Close()
				return false
			}
		}
		return true
	})
	if len(n.sockets(t)) != 1 {
		t.Error("the socket's file is gone, so that kubelet forgets the driver, while a call is being answered")
	}
	close(goOn)
	if said := <-answered; said != "<nil>" {
		t.Errorf("the call was answered with %s", said)
	}
	stopped.Wait()
	if left := n.sockets(t); len(left) > 0 {
		t.Errorf("the driver left %q", left)
	}
}
