package kubelet_test

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

func TestTokensSortAsProcessesStarted(t *testing.T) {
	before := ""
	for range 100 {
		token := kubelet.NewToken()
		if len(token) != 12 || token[:10] < before {
			t.Fatalf("token %s comes after %s", token, before)
		}
		before = token[:10] // the time
	}
}

func TestRivals(t *testing.T) {
	path := folder(t)
	var daemons []*kubelet.Directory
	for range 3 {
		daemons = append(daemons, later(t, path, daemons...))
	}
	var names []string
	for _, d := range daemons {
		for _, resource := range []string{"nvidia.com/gpu", "nvidia.com/gpu", "example.com/gpu", "nvidia.com/mig-1g.10gb",
			"nvidia.com/mig-1g.10gb.me"} {
			endpoint := d.NewEndpoint(resource)
			listen(t, endpoint)
			names = append(names, filepath.Base(endpoint))
		}
	}
	foreign := []string{
		"a" + names[5], "gpu-device-plugin-" + "1.sock", "gpu-device-plugin-gpu-short-1.sock", "gpu-device-plugin-x.sock",
		names[5] + "x",
		"nvidia-gpu.sock",
	}
	slices.Sort(foreign)
	for _, name := range append(foreign, "kubelet.sock") {
		listen(t, filepath.Join(path, name))
	}
	var made []kubelet.Socket
	for _, name := range foreign {
		info, err := os.Lstat(filepath.Join(path, name))
		if err != nil {
			t.Fatal(err)
		}
		made = append(made, kubelet.Socket{name, info.ModTime().UnixNano()})
	}
	if err := os.WriteFile(filepath.Join(path, "a.sock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for i, want := range []kubelet.Peers{
		{Later: slices.Concat(names[5:7], names[10:12]), OtherPlugins: made},
		{Earlier: names[0:2], Later: names[10:12], OtherPlugins: made},
		{Earlier: slices.Concat(names[0:2], names[5:7]), OtherPlugins: made},
	} {
		if diff := cmp.Diff(want, daemons[i].Peers("nvidia.com/gpu")); diff != "" {
			t.Errorf("Peers() of process %d (-want +got):\n%s", i, diff)
		}
	}
	if got := daemons[0].Peers("nvidia.com/mig-1g.10gb").Later; !slices.Equal(got, []string{names[8], names[13]}) {
		t.Errorf("Peers() of a resource whose name begins as another's: %v", got)
	}
}

func TestAwaitEnd(t *testing.T) {
	t.Parallel()
	serve := func(t *testing.T, path string) (stop func()) {
		t.Helper()
		listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		listener.SetUnlinkOnClose(false)
		server := grpc.NewServer(grpc.ConnectionTimeout(100 * time.Millisecond))
		go func() { _ = server.Serve(listener) }()
		t.Cleanup(server.Stop)
		return server.Stop
	}
	tests := map[string]struct {
		foreign bool
		make    func(t *testing.T, path string)
		least   time.Duration // by the clock until it is given up
	}{
		"gone": {make: func(*testing.T, string) {}},
		"a process was killed long ago": {make: func(t *testing.T, path string) { t.Helper(); listen(t, path)() },
			least: listensWithin},
		"another program was killed": {foreign: true, make: func(t *testing.T,
			path string) {
			t.Helper()
			listen(t, path)()
		}, least: listensWithin},
		"hung": {make: func(t *testing.T, path string) { t.Helper(); listen(t, path) },
			least: hungAfter},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := &noted{FakeClock: clocktesting.NewFakeClock(time.Now())}
			d := newDirectoryAt(t, folder(t), c)
			path := d.NewEndpoint("nvidia.com/gpu")
			if test.foreign {
				path = filepath.Join(d.Path(), "nvidia-gpu.sock")
			}
			test.make(t, path)
			began := c.Now()
			ended := make(chan error, 1)
			go func() { ended <- d.AwaitEnd(t.Context(), filepath.Base(path)) }()
			if err := stepped(t, c, hungAfter, ended, 0); err != nil {
				t.Error(err)
			}
			if waited := c.Since(began); waited < test.least {
				t.Errorf("it was given up after %v, want %v at least", waited, test.least)
			}
		})
	}
	for _, name := range []string{"a process of ours", "another program"} {
		t.Run(name+" that lives", func(t *testing.T) {
			t.Parallel()
			c := &noted{FakeClock: clocktesting.NewFakeClock(time.Now())}
			d := newDirectoryAt(t, folder(t), c)
			path := d.NewEndpoint("nvidia.com/gpu")
			if name == "another program" {
				path = filepath.Join(d.Path(), "nvidia-gpu.sock")
			}
			stop := serve(t, path)
			ended := make(chan error, 1)
			go func() { ended <- d.AwaitEnd(t.Context(), filepath.Base(path)) }()
			if err := stepped(t, c, askInterval, ended, 5); !errors.Is(err, errNotEnded) {
				t.Fatalf("AwaitEnd() = %v while it lives", err)
			}
			stop() // and leaves its socket behind
			if err := stepped(t, c, askInterval, ended, 0); err != nil {
				t.Error(err)
			}
		})
	}
	t.Run("ctx ends", func(t *testing.T) {
		t.Parallel()
		d := newDirectory(t, folder(t))
		path := d.NewEndpoint("nvidia.com/gpu")
		serve(t, path)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(50*time.Millisecond, cancel)
		if err := d.AwaitEnd(ctx, filepath.Base(path)); !errors.Is(err, context.Canceled) {
			t.Errorf("AwaitEnd() = %v, want that ctx ended", err)
		}
	})
}

var errNotEnded = errors.New("it has not ended")

// stepped steps the clock whenever somebody waits by it, until what is awaited has ended, and
// returns how. With a number of pauses, it returns errNotEnded after these.
func stepped(t *testing.T, c *noted, step time.Duration, ended <-chan error, pauses int) error {
	t.Helper()
	before := c.timers()
	for late := time.After(patience); pauses == 0 || c.timers() < before+pauses; {
		select {
		case err := <-ended:
			return err
		case <-late:
			t.Fatal("nothing happens any more")
		case <-time.After(time.Millisecond):
			if c.HasWaiters() {
				c.Step(step)
			}
		}
	}
	return errNotEnded
}

// options answers GetDevicePluginOptions.
type options struct {
	pluginapi.UnimplementedDevicePluginServer
	answer bool
}

func (o options) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{PreStartRequired: o.answer}, nil
}

func TestTheLastEarlierServerIsCalled(t *testing.T) {
	path := folder(t)
	dead := newDirectory(t, path)
	first := later(t, path, dead)
	second := later(t, path, first)
	us := later(t, path, second)
	answer := false
	call := func() error {
		return us.CallEarlier(t.Context(), "nvidia.com/gpu", func(ctx context.Context,
			earlier pluginapi.DevicePluginClient) error {
			options, err := earlier.GetDevicePluginOptions(ctx, &pluginapi.Empty{})
			answer = options.GetPreStartRequired()
			return err
		})
	}
	if err := call(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without an earlier one: %v", err)
	}
	listen(t, dead.NewEndpoint("nvidia.com/gpu"))()
	if err := call(); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("with an earlier one that has ended: %v", err)
	}
	for d, answer := range map[*kubelet.Directory]bool{first: false, second: true, later(t, path, us): false} {
		listener, err := net.Listen("unix", d.NewEndpoint("nvidia.com/gpu"))
		if err != nil {
			t.Fatal(err)
		}
		server := grpc.NewServer()
		pluginapi.RegisterDevicePluginServer(server, options{answer: answer})
		go func() { _ = server.Serve(listener) }()
		t.Cleanup(server.Stop)
	}
	if err := call(); err != nil || !answer {
		t.Errorf("the call went to another server: %v, %v", answer, err)
	}
}
