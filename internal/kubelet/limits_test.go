package kubelet_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// TestPodsOfHeldDevices: a pod has a name and a namespace, or a UID alone.
func TestPodsOfHeldDevices(t *testing.T) {
	t.Parallel()
	for pod, want := range map[string][3]string{
		"ns/p": {"ns", "p", ""}, "with UID 6f7d": {"", "", "6f7d"}, "with UID ": {"", "", ""}, "p": {"p", "", ""}, "": {},
	} {
		namespace, name, uid := kubelet.HeldDevice{Pod: pod}.SplitPod()
		if got := [3]string{namespace, name, uid}; got != want {
			t.Errorf("%q: %q, want %q", pod, got, want)
		}
	}
}

// TestNamesOfSockets: what people read of a resource is short, and resources whose names begin
// alike have different sockets.
func TestNamesOfSockets(t *testing.T) {
	t.Parallel()
	d := newDirectory(t, folder(t))
	kindOf := func(resource string) string {
		kind, _, _ := kubelet.ParseSocketName(filepath.Base(d.NewEndpoint(resource)))
		return kind
	}
	for resource, want := range map[string]string{
		"nvidia.com/gpu": "gpu", "gpu": "gpu", "nvidia.com/12345678": "12345678", "nvidia.com/123456789": "12345678",
	} {
		if name, hash, _ := strings.Cut(kindOf(resource), "-"); name != want || len(hash) != 6 ||
			strings.Contains(hash, "-") {
			t.Errorf("%s: %s, want %s and a hash", resource, kindOf(resource), want)
		}
	}
	if kindOf("nvidia.com/123456789") == kindOf("nvidia.com/12345678x") || kindOf("a.com/gpu") == kindOf("b.com/gpu") {
		t.Error("two resources have the same sockets")
	}
	for name, want := range map[string]string{
		"gpu-device-plugin-gpu-abcdef-000000000a22-1.sock": "gpu-abcdef 000000000a22", // what NewEndpoint makes
		"gpu-device-plugin-k-000000000a22-1.sock":          "k 000000000a22",
		"gpu-device-plugin--000000000a22-1.sock":           " 000000000a22",
		"gpu-device-plugin-000000000a22-1.sock":            "",
		"gpu-device-plugin-k-00000000a22-1.sock":           "",
		"gpu-device-plugin-k-0000000000a22-1.sock":         "",
		"gpu-device-plugin-k-000000000a22-1":               "",
		"other-k-000000000a22-1.sock":                      "",
	} {
		kind, token, ours := kubelet.ParseSocketName(name)
		if got := map[bool]string{true: kind + " " + token}[ours]; got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

// TestRefuses: a socket that is gone, or whose process has ended; not one that listens.
func TestRefuses(t *testing.T) {
	t.Parallel()
	d := newDirectory(t, folder(t))
	listen(t, filepath.Join(d.Path(), "dead.sock"))()
	listen(t, filepath.Join(d.Path(), "live.sock"))
	for name, want := range map[string]bool{"dead.sock": true, "none.sock": true, "live.sock": false} {
		if got := d.Refuses(t.Context(), name); got != want {
			t.Errorf("%s refuses connections: %v", name, got)
		}
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if d.Refuses(ended, "live.sock") {
		t.Error("what nobody has looked at is known to refuse connections")
	}
}

// TestASocketThatHasJustBeenMade: a process that does not listen yet has a second to; one that
// listened before, and refuses, has ended.
func TestASocketThatHasJustBeenMade(t *testing.T) {
	t.Parallel()
	for _, listened := range []bool{false, true} {
		c := &noted{FakeClock: clocktesting.NewFakeClock(time.Now())}
		d := newDirectoryAt(t, folder(t), c)
		path := d.NewEndpoint("nvidia.com/gpu")
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		t.Cleanup(func() { _ = l.Close() })
		if listened { // one connection, which says nothing
			go func() {
				if conn, err := l.Accept(); err == nil {
					_, _ = conn.Close(), l.Close()
				}
			}()
		} else if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		began := c.Now()
		go func() { ended <- d.AwaitEnd(t.Context(), filepath.Base(path)) }()
		for late, over := time.After(patience), false; !over; {
			select {
			case err := <-ended:
				if err != nil {
					t.Error(err)
				}
				over = true
			case <-late:
				t.Fatal("its end is not seen")
			case <-time.After(time.Millisecond):
				if c.HasWaiters() {
					c.Step(askSoon)
				}
			}
		}
		took := c.Since(began)
		if listened && took > listensWithin/2 || !listened && (took < listensWithin || took > 2*listensWithin) {
			t.Errorf("listened before: %v; given up after %v", listened, took)
		}
		for _, pause := range c.pauses {
			if pause != askSoon {
				t.Errorf("listened before: %v; asked again after %v, want %v", listened, pause, askSoon)
			}
		}
	}
}

// TestAForeignServerThatHangs: whether a program of others answers cannot be told, so it is never
// given up.
func TestAForeignServerThatHangs(t *testing.T) {
	t.Parallel()
	c := &noted{FakeClock: clocktesting.NewFakeClock(time.Now())}
	d := newDirectoryAt(t, folder(t), c)
	listen(t, filepath.Join(d.Path(), "nvidia-gpu.sock"))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- d.AwaitEnd(ctx, "nvidia-gpu.sock") }()
	late := time.After(patience)
	for began := c.Now(); c.Since(began) < 3*hungAfter; {
		select {
		case err := <-ended:
			t.Fatalf("it is given up after %v: %v", c.Since(began), err)
		case <-late:
			t.Fatal("it is not asked any more")
		case <-time.After(time.Millisecond):
			if c.HasWaiters() {
				c.Step(askInterval)
			}
		}
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	for _, pause := range c.pauses {
		if pause != askInterval {
			t.Errorf("asked again after %v, want %v", pause, askInterval)
		}
	}
}

// TestPaceOfQuestions: how long none is sent after an answer to a call, and after another question.
// Where Allocate is to follow, none is sent before it for longer.
func TestPaceOfQuestions(t *testing.T) {
	t.Parallel()
	c := &noted{FakeClock: clocktesting.NewFakeClock(time.Now())}
	client := (&accounts{}).client(t, c)
	waits := func(what string, want time.Duration) {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		before := c.timers()
		question := asking(ctx, client)
		for late := time.After(patience); c.timers() == before; {
			select {
			case err := <-question:
				if err != nil || want != 0 {
					t.Errorf("%s: it is sent at once, want a pause of %v: %v", what, want, err)
				}
				return
			case <-late:
				t.Fatalf("%s: nothing happens", what)
			case <-time.After(time.Millisecond / 10):
			}
		}
		cancel()
		if err := <-question; err == nil {
			t.Errorf("%s: it is sent though nobody waits for it", what)
		}
		if got := c.last(); got != want {
			t.Errorf("%s: waits %v, want %v", what, got, want)
		}
	}
	waits("the first", 0)
	waits("the next", listPause)
	c.Step(listPause - 1)
	waits("a moment before its time", 1)
	c.Step(1)
	waits("at its time", 0)
	one, two := client.Allocating(), client.Allocating()
	waits("while kubelet allocates", settleTime)
	one(false)
	c.Step(time.Hour)
	waits("while it goes on", settleTime)
	two(false)
	waits("just after", settleTime)
	c.Step(settleTime - listPause/2)
	waits("some time after", listPause/2)
	c.Step(listPause / 2)
	waits("at last", 0)
	client.Allocating()(false)
	waits("the later time counts", settleTime)
	client.Allocating()(true)
	c.Step(chooseTime - 1)
	waits("a moment before Allocate is waited for no more", 1)
	c.Step(1)
	waits("no Allocate has come", 0)
	client.Allocating()(true)
	waits("before Allocate", settleTime)
	client.Allocating()(false)
	c.Step(settleTime - 1)
	waits("after Allocate", 1)
	c.Step(1)
	waits("once it has settled", 0)
}

// TestStaleAtItsLimits: refused for two minutes, and the readiness probe called within the last
// one.
func TestStaleAtItsLimits(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		refused, probed time.Duration // ago; 0 for never
		want            bool
	}{
		"never refused":           {0, time.Second, false},
		"not for long enough":     {staleAfter - 1, time.Second, false},
		"for long enough":         {staleAfter, time.Second, true},
		"kubelet may be there":    {staleAfter, probedWithin, true},
		"kubelet is not there":    {staleAfter, probedWithin + 1, false},
		"kubelet has never asked": {staleAfter, 0, false},
	} {
		c := clocktesting.NewFakeClock(time.Now())
		d := newDirectoryAt(t, folder(t), c)
		listen(t, kubeletSocket(d))()
		if tt.refused > 0 {
			dial(t, d, c)
		}
		c.Step(tt.refused - tt.probed)
		if tt.probed > 0 {
			d.Probed()
		}
		c.Step(tt.probed)
		if got := stale(t, d); got != tt.want {
			t.Errorf("%s: a watch ends: %v", name, got)
		}
	}
}

// dial has the directory connect to kubelet's socket once.
func dial(t *testing.T, d *kubelet.Directory, c *clocktesting.FakeClock) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = d.Register(ctx, 1, "nvidia.com/gpu", d.NewEndpoint("nvidia.com/gpu"), nil) // there is no such endpoint
	}()
	for late := time.Now().Add(patience); !c.HasWaiters(); { // until the next try
		select {
		case <-ended:
			return
		case <-time.After(time.Millisecond):
		}
		if time.Now().After(late) {
			t.Fatal("kubelet's socket is not dialled")
		}
	}
	cancel()
	<-ended
}

// stale reports whether a look at the directory finds that it is not the one that the node uses.
func stale(t *testing.T, d *kubelet.Directory) bool {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- d.Watch(ctx, feed.New(uint64(0)), feed.New([]string(nil))) }()
	alive := make(chan struct{})
	go func() {
		defer close(alive)
		_ = d.Alive(ctx) // it has looked, or the watch has ended
	}()
	var err error
	select {
	case err = <-ended:
		cancel()
		<-alive
	case <-alive:
		cancel()
		err = <-ended
	}
	if err != nil && !errors.Is(err, kubelet.ErrNoDirectory) {
		t.Errorf("Watch() = %v", err)
	}
	return err != nil
}

// TestWithNoticesNothingIsDoneEachSecond: the directory is looked at, and swept, every five
// seconds.
func TestWithNoticesNothingIsDoneEachSecond(t *testing.T) {
	t.Parallel()
	path := folder(t)
	c := clocktesting.NewFakeClock(time.Now())
	d, other := newDirectoryAt(t, path, c), newDirectory(t, path)
	dead := other.NewEndpoint("nvidia.com/gpu")
	listen(t, dead)()
	watch(t, d)
	rounds := func() {
		t.Helper()
		for range 100 { // it waits by the clock then
			if err := d.Alive(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	rounds()
	c.Step(lookRarely - lookInterval)
	rounds()
	if _, err := os.Lstat(dead); err != nil {
		t.Errorf("the directory was swept after %v: %v", lookRarely-lookInterval, err)
	}
	c.Step(lookInterval)
	for late := time.Now().Add(patience); ; rounds() {
		if _, err := os.Lstat(dead); err != nil {
			return
		}
		if time.Now().After(late) {
			t.Fatalf("the directory was not swept after %v", lookRarely)
		}
	}
}

// A counted listener counts connections that are open.
type counted struct {
	net.Listener
	open atomic.Int32
}

func (l *counted) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil {
		l.open.Add(1)
		conn = &countedConn{Conn: conn, closed: sync.OnceFunc(func() { l.open.Add(-1) })}
	}
	return conn, err
}

type countedConn struct {
	net.Conn
	closed func()
}

func (c *countedConn) Close() error {
	c.closed()
	return c.Conn.Close()
}

// TestACallLeavesNoConnection: the earlier server could not end while one is open.
func TestACallLeavesNoConnection(t *testing.T) {
	t.Parallel()
	path := folder(t)
	earlier := newDirectory(t, path)
	us := later(t, path, earlier)
	inner, err := net.Listen("unix", earlier.NewEndpoint("nvidia.com/gpu"))
	if err != nil {
		t.Fatal(err)
	}
	listener, server := &counted{Listener: inner}, grpc.NewServer()
	pluginapi.RegisterDevicePluginServer(server, options{answer: true})
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	for range 3 {
		err := us.CallEarlier(t.Context(), "nvidia.com/gpu", func(ctx context.Context, c pluginapi.DevicePluginClient) error {
			_, err := c.GetDevicePluginOptions(ctx, &pluginapi.Empty{})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	poll.Until(t, "no connection is open after three calls", func() bool { return listener.open.Load() == 0 })
}
