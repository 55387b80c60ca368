package kubelet_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// TestASocketThatRefusesForLong: the socket of a kubelet that is down refuses connections, and so
// does one behind a stale mount.
func TestASocketThatRefusesForLong(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		before, during bool // kubelet calls the readiness probe
		ends           bool
	}{
		"kubelet is there":           {before: true, during: true, ends: true},
		"kubelet is down":            {before: true},
		"kubelet never called":       {},
		"kubelet calls at last only": {during: true, ends: true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := clocktesting.NewFakeClock(time.Now())
			d := newDirectoryAt(t, folder(t), c)
			listen(t, kubeletSocket(d))()
			if test.before {
				d.Probed()
				c.Step(2 * probedWithin)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended, registered := make(chan error, 1), make(chan struct{})
			go func() { ended <- d.Watch(ctx, feed.New(uint64(0)), feed.New([]string(nil))) }()
			go func() {
				defer close(registered)
				_ = d.Register(ctx, 1, "nvidia.com/gpu", d.NewEndpoint("nvidia.com/gpu"), &pluginapi.DevicePluginOptions{})
			}()
			began := c.Now()
			deadline := time.After(patience)
			for c.Since(began) < 10*time.Minute {
				if test.during {
					d.Probed()
				}
				if c.HasWaiters() {
					c.Step(time.Second)
				}
				select {
				case err := <-ended:
					if !test.ends || !errors.Is(err, kubelet.ErrNoDirectory) ||
						!strings.Contains(err.Error(), "a filesystem was mounted over") {
						t.Errorf("Watch() = %v", err)
					}
					if waited := c.Since(began); waited < staleAfter {
						t.Errorf("it ended after %v", waited)
					}
					cancel()
					<-registered
					return
				case <-deadline:
					t.Fatal("the watch goes on")
				case <-time.After(time.Millisecond):
				}
			}
			cancel()
			if err := <-ended; err != nil || test.ends {
				t.Errorf("Watch() = %v at the end of ten minutes", err)
			}
			<-registered
		})
	}
}

func TestARefusalEndsWithAConnectionOrAnotherSocket(t *testing.T) {
	c := clocktesting.NewFakeClock(time.Now())
	d := newDirectoryAt(t, folder(t), c)
	want := func(what string, want bool) {
		t.Helper()
		d.Probed() // kubelet is there
		if got := stale(t, d); got != want {
			t.Errorf("%s: the directory is stale: %v", what, got)
		}
	}
	socket, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Bind(socket, &unix.SockaddrUnix{Name: kubeletSocket(d)}); err != nil { // it refuses
		t.Fatal(err)
	}
	dial(t, d, c)
	c.Step(staleAfter)
	dial(t, d, c) // is no new beginning
	want("after two minutes of refusals", true)
	if err := unix.Listen(socket, 1); err != nil {
		t.Fatal(err)
	}
	dial(t, d, c)
	if err := unix.Close(socket); err != nil { // it refuses again
		t.Fatal(err)
	}
	want("after a connection", false)
	dial(t, d, c)
	c.Step(staleAfter - 1)
	want("some time after it", false)
	c.Step(1)
	want("two minutes after it", true)
	if err := os.Rename(kubeletSocket(d), kubeletSocket(d)+".old"); err != nil {
		t.Fatal(err)
	}
	listen(t, kubeletSocket(d))
	want("with another socket", false)
}

func TestSocketsOfProcessesThatEndedAreRemoved(t *testing.T) {
	t.Parallel()
	path := folder(t)
	c := clocktesting.NewFakeClock(time.Now())
	d, other := newDirectoryAt(t, path, c), newDirectory(t, path)
	dead, live, own := other.NewEndpoint("nvidia.com/gpu"), other.NewEndpoint("nvidia.com/mig-1g.10gb"), d.NewEndpoint("nvidia.com/gpu")
	foreign, older := filepath.Join(path, "nvidia-gpu.sock"), filepath.Join(path, "gpu-device-plugin-gpu-abc-1.sock")
	for _, socket := range []string{dead, own, foreign, older, kubeletSocket(d)} {
		listen(t, socket)()
	}
	listen(t, live)
	sockets := feed.New([]string(nil))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- d.Watch(ctx, feed.New(uint64(0)), sockets) }()
	began := c.Now()
	poll.Until(t, "the dead one has gone", func() bool {
		if c.HasWaiters() && c.Since(began) < 3*lookRarely {
			c.Step(time.Second)
		}
		names := sockets.Value() // nil until the directory was read for the first time
		return len(names) > 0 && !slices.Contains(names, filepath.Base(dead))
	})
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	want := []string{filepath.Base(older), filepath.Base(live), filepath.Base(own), filepath.Base(foreign)}
	slices.Sort(want)
	if got := sockets.Value(); !slices.Equal(got, want) {
		t.Errorf("left are %v, want %v", got, want)
	}
}

// TestThePauseBetweenDials: a kubelet that refuses connections is dialled after 1 ms, 2 ms and so
// on, and once a second at last.
func TestThePauseBetweenDials(t *testing.T) {
	t.Parallel()
	c := &noted{FakeClock: clocktesting.NewFakeClock(time.Now())}
	d := newDirectoryAt(t, folder(t), c)
	listen(t, kubeletSocket(d))()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = d.Register(ctx, 1, "nvidia.com/gpu", d.NewEndpoint("nvidia.com/gpu"), nil)
	}()
	poll.Until(t, "kubelet is dialled again", func() bool {
		if c.timers() < 13 {
			c.Step(time.Second)
		}
		return c.timers() >= 13
	})
	cancel()
	<-ended
	want := time.Millisecond
	for i, pause := range c.pauses[:13] {
		if pause != want {
			t.Errorf("pause %d is %v, want %v", i, pause, want)
		}
		want = min(2*want, time.Second)
	}
}

// A noted clock notes the timers that were made.
type noted struct {
	*clocktesting.FakeClock
	mu     sync.Mutex
	pauses []time.Duration
}

func (c *noted) NewTimer(d time.Duration) clock.Timer {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pauses = append(c.pauses, d)
	return c.FakeClock.NewTimer(d)
}

// last returns the duration of the last timer.
func (c *noted) last() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pauses[len(c.pauses)-1]
}

func (c *noted) timers() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.pauses)
}
