package kubelet_test

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// A later process is told that this one leaves, and says that it registers again, or not.
type laterProcess struct {
	pluginapi.UnimplementedDevicePluginServer
	again, soon bool
	told        chan bool
}

func (l *laterProcess) GetDevicePluginOptions(
	ctx context.Context, _ *pluginapi.Empty,
) (*pluginapi.DevicePluginOptions, error) {
	l.told <- kubelet.LeavingToken(ctx) != ""
	switch {
	case l.again:
		kubelet.WillReregister(ctx)
	case l.soon:
		kubelet.WillRegister(ctx)
	}
	return &pluginapi.DevicePluginOptions{}, nil
}

// A refusing kubelet connects to what registers, and asks for its options, as kubelet does.
type refusingKubelet struct {
	pluginapi.UnimplementedRegistrationServer
	dir   string
	asked chan error // what was answered
}

func (k *refusingKubelet) Register(ctx context.Context, r *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	client, err := grpc.NewClient("unix://"+filepath.Join(k.dir, r.GetEndpoint()),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer client.Close()
	_, err = pluginapi.NewDevicePluginClient(client).GetDevicePluginOptions(ctx, &pluginapi.Empty{})
	k.asked <- err
	if err != nil {
		return nil, errors.New("failed to get device plugin options")
	}
	return &pluginapi.Empty{}, nil
}

func TestLeave(t *testing.T) {
	path := folder(t)
	us := newDirectory(t, path)
	hung := later(t, path, us)
	d := later(t, path, hung)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	leave := func() error { return us.Detach(ctx, 1, "nvidia.com/gpu") }
	serve := func(endpoint string, register func(*grpc.Server)) {
		t.Helper()
		listener, err := net.Listen("unix", endpoint)
		if err != nil {
			t.Fatal(err)
		}
		server := grpc.NewServer()
		register(server)
		go func() { _ = server.Serve(listener) }()
		t.Cleanup(server.Stop)
	}
	if err := leave(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without another process: %v", err)
	}
	newest := &laterProcess{told: make(chan bool, 10)}
	serve(d.NewEndpoint("nvidia.com/gpu"), func(s *grpc.Server) { pluginapi.RegisterDevicePluginServer(s, newest) })
	refusing := &refusingKubelet{dir: path, asked: make(chan error, 10)}
	serve(filepath.Join(path, "kubelet.sock"), func(s *grpc.Server) { pluginapi.RegisterRegistrationServer(s, refusing) })
	if err := leave(); err == nil || !strings.Contains(err.Error(), "does not say that it registers again") ||
		!<-newest.told || len(refusing.asked) > 0 {
		t.Errorf("a later process of an earlier version: %v, and kubelet has %d registrations", err, len(refusing.asked))
	}
	newest.soon = true
	if err := leave(); !errors.Is(err, kubelet.ErrNotYet) || !<-newest.told || len(refusing.asked) > 0 {
		t.Errorf("a later process that registers soon: %v, and kubelet has %d registrations", err, len(refusing.asked))
	}
	newest.again = true
	before, err := os.ReadDir(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := leave(); err != nil || !<-newest.told || len(refusing.asked) != 1 {
		t.Fatalf("a later process that registers again: %v, and kubelet has %d registrations", err, len(refusing.asked))
	}
	if err := <-refusing.asked; err == nil {
		t.Error("kubelet was told options")
	}
	if after, err := os.ReadDir(path); err != nil || len(after) != len(before) {
		t.Errorf("there are %d files, and were %d: %v", len(after), len(before), err)
	}
	socket, err := net.Listen("unix", hung.NewEndpoint("nvidia.com/gpu"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = socket.Close() })
	within, end := context.WithTimeout(ctx, 6*tellTimeout)
	defer end()
	if err := us.Detach(within, 1, "nvidia.com/gpu"); err != nil || !<-newest.told || <-refusing.asked == nil {
		t.Errorf("a process between the two hangs: %v", err)
	}
	watch(t, us)("kubelet", incarnation(1))
	if err := us.Detach(ctx, 2, "nvidia.com/gpu"); !errors.Is(err, kubelet.ErrNotRegistered) ||
		!strings.Contains(err.Error(), "have the kubelet forget") {
		t.Errorf("another kubelet: %v", err)
	}
	if kubelet.LeavingToken(t.Context()) != "" {
		t.Error("a call without the header says that a process leaves")
	}
}

// Without a later process, an earlier one is asked: the one that started last of those that have
// not been killed.
func TestLeaveToAnEarlierProcess(t *testing.T) {
	path := folder(t)
	first := newDirectory(t, path)
	second := later(t, path, first)
	us := later(t, path, second)
	asked := map[string]*laterProcess{}
	serve := func(name, endpoint string) (kill func()) {
		t.Helper()
		listener, err := net.Listen("unix", endpoint)
		if err != nil {
			t.Fatal(err)
		}
		listener.(*net.UnixListener).SetUnlinkOnClose(false) // a process that is killed leaves its socket
		server := grpc.NewServer()
		asked[name] = &laterProcess{soon: true, told: make(chan bool, 10)}
		pluginapi.RegisterDevicePluginServer(server, asked[name])
		go func() { _ = server.Serve(listener) }()
		t.Cleanup(server.Stop)
		return server.Stop
	}
	serve("first", first.NewEndpoint("nvidia.com/gpu"))
	kill := serve("second", second.NewEndpoint("nvidia.com/gpu"))
	for _, want := range []string{"second", "first"} {
		if err := us.Detach(t.Context(), 1, "nvidia.com/gpu"); !errors.Is(err, kubelet.ErrNotYet) ||
			len(asked[want].told) != 1 {
			t.Errorf("Leave() = %v, and the %s process was asked %d times, want once", err, want, len(asked[want].told))
		}
		kill()
	}
	if n := len(asked["second"].told); n != 1 {
		t.Errorf("the second process was asked %d times", n)
	}
}

func TestKeepsOneClient(t *testing.T) {
	for userAgent, want := range map[string]bool{
		"grpc-go/1.79.3":                true, // 1.36.3
		"grpc-go/1.9.0":                 true,
		"grpc-go/1.81.1-dev":            true,
		"grpc-go/1.82.1":                false, // 1.37.0
		"grpc-go/1.100.0":               false,
		"grpc-go/2.1.0":                 false,
		"grpc-go/1.79.3 grpc-go/1.85.0": true, // the first is the program's own
		"another/1.0.0":                 false,
		"":                              false,
	} {
		if got := kubelet.KeepsOneClient(userAgent); got != want {
			t.Errorf("KeepsOneClient(%q) = %v, want %v", userAgent, got, want)
		}
	}
}
