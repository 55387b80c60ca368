package kubelet

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
)

func TestTokensSortAsProcessesStarted(t *testing.T) {
	before := ""
	for range 100 {
		token := NewToken()
		if len(token) != tokenLength || token[:timeLength] < before {
			t.Fatalf("token %s comes after %s", token, before)
		}
		before = token[:timeLength]
	}
	if base32(31, 1) != "v" || base32(32, 3) != "010" || base32(9, 2) >= base32(10, 2) {
		t.Error("numbers do not sort as their texts")
	}
}

func TestRivals(t *testing.T) {
	path := folder(t)
	var daemons []*Directory
	for _, token := range []string{"000000000a22", "000000000b22", "000000000c22"} {
		d := newDirectory(t, path)
		d.token = token
		daemons = append(daemons, d)
	}
	var names []string
	for _, d := range daemons {
		for _, resource := range []string{"nvidia.com/gpu", "nvidia.com/gpu", "example.com/gpu", "nvidia.com/mig-1g.10gb", "nvidia.com/mig-1g.10gb.me"} {
			endpoint := d.NewEndpoint(resource)
			listen(t, endpoint)
			names = append(names, filepath.Base(endpoint))
		}
	}
	foreign := []string{
		"a" + names[5], "gpu-device-plugin-" + "1.sock", "gpu-device-plugin-gpu-short-1.sock", "gpu-device-plugin-x.sock", names[5] + "x",
		"nvidia-gpu.sock",
	}
	slices.Sort(foreign)
	for _, name := range append(foreign, "kubelet.sock") {
		listen(t, filepath.Join(path, name))
	}
	var made []Socket
	for _, name := range foreign {
		info, err := os.Lstat(filepath.Join(path, name))
		if err != nil {
			t.Fatal(err)
		}
		made = append(made, Socket{name, info.ModTime().UnixNano()})
	}
	if err := os.WriteFile(filepath.Join(path, "a.sock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for i, want := range []Rivals{
		{Later: slices.Concat(names[5:7], names[10:12]), Foreign: made},
		{Earlier: names[0:2], Later: names[10:12], Foreign: made},
		{Earlier: slices.Concat(names[0:2], names[5:7]), Foreign: made},
	} {
		if diff := cmp.Diff(want, daemons[i].Rivals("nvidia.com/gpu")); diff != "" {
			t.Errorf("Rivals() of process %d (-want +got):\n%s", i, diff)
		}
	}
	if got := daemons[0].Rivals("nvidia.com/mig-1g.10gb").Later; !slices.Equal(got, []string{names[8], names[13]}) {
		t.Errorf("Rivals() of a resource whose name begins as another's: %v", got)
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
		step    time.Duration // of the clock; 0 means the real one
	}{
		"gone":                          {make: func(*testing.T, string) {}},
		"a process was killed long ago": {make: func(t *testing.T, path string) { t.Helper(); listen(t, path)() }},
		"another program was killed":    {foreign: true, make: func(t *testing.T, path string) { t.Helper(); listen(t, path)() }},
		"hung":                          {make: func(t *testing.T, path string) { t.Helper(); listen(t, path) }, step: hungAfter / 2},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDirectory(t, folder(t))
			path := d.NewEndpoint("nvidia.com/gpu")
			if test.foreign {
				path = filepath.Join(d.Path(), "nvidia-gpu.sock")
			}
			test.make(t, path)
			if test.step > 0 {
				c := clocktesting.NewFakeClock(time.Now())
				d.clock = c
				began := c.Now()
				defer func() {
					if waited := c.Since(began); waited < hungAfter {
						t.Errorf("a server that does not answer was given up after %v", waited)
					}
				}()
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				go func() {
					for ctx.Err() == nil {
						if c.HasWaiters() {
							c.Step(test.step)
						}
						select {
						case <-ctx.Done():
						case <-time.After(time.Millisecond):
						}
					}
				}()
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if err := d.AwaitEnd(ctx, filepath.Base(path)); err != nil {
				t.Error(err)
			}
		})
	}
	for _, name := range []string{"a process of ours", "another program"} {
		t.Run(name+" that lives", func(t *testing.T) {
			t.Parallel()
			d := newDirectory(t, folder(t))
			path := d.NewEndpoint("nvidia.com/gpu")
			if name == "another program" {
				path = filepath.Join(d.Path(), "nvidia-gpu.sock")
			}
			stop := serve(t, path)
			ended := make(chan error, 1)
			go func() { ended <- d.AwaitEnd(t.Context(), filepath.Base(path)) }()
			select {
			case err := <-ended:
				t.Fatalf("AwaitEnd() = %v while it lives", err)
			case <-time.After(1500 * time.Millisecond):
			}
			stop() // and leaves its socket behind
			select {
			case err := <-ended:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(patience):
				t.Fatal("its end is not seen")
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
	us := newDirectory(t, path)
	us.token = "000000000c22"
	answer := false
	call := func() error {
		return us.CallEarlier(t.Context(), "nvidia.com/gpu", func(ctx context.Context, earlier pluginapi.DevicePluginClient) error {
			options, err := earlier.GetDevicePluginOptions(ctx, &pluginapi.Empty{})
			answer = options.GetPreStartRequired()
			return err
		})
	}
	if err := call(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without an earlier one: %v", err)
	}
	dead := newDirectory(t, path)
	dead.token = "000000000922"
	listen(t, dead.NewEndpoint("nvidia.com/gpu"))()
	if err := call(); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("with an earlier one that has ended: %v", err)
	}
	for token, answer := range map[string]bool{"000000000a22": false, "000000000b22": true, "000000000d22": false} {
		d := newDirectory(t, path)
		d.token = token
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
