package kubelet_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

func TestEndpointsAreNeverTheSame(t *testing.T) {
	path := folder(t)
	first, second := newDirectory(t, path), newDirectory(t, path)
	seen := map[string]bool{}
	for range 100 {
		for _, d := range []*kubelet.Directory{first, second} {
			endpoint := d.NewEndpoint("nvidia.com/mig-1g.10gb.me")
			if seen[endpoint] || filepath.Dir(endpoint) != path {
				t.Fatalf("NewEndpoint() = %s", endpoint)
			}
			seen[endpoint] = true
			if len(filepath.Base(endpoint)) > maxSocketName {
				t.Fatalf("%s is longer than %d bytes", endpoint, maxSocketName)
			}
		}
	}
	name := filepath.Base(first.NewEndpoint("nvidia.com/gpu"))
	if !first.Ours(name) || second.Ours(name) || first.Ours("nvidia-gpu.sock") {
		t.Errorf("Ours(%s) is not true for its maker alone", name)
	}
}

func TestSocketPaths(t *testing.T) {
	tests := map[string]struct{ socket, problem string }{
		"default":  {"/var/lib/kubelet/device-plugins/kubelet.sock", ""},
		"relative": {"kubelet.sock", "must be absolute"},
		"longest":  {"/" + strings.Repeat("d", statefile.MaxSocketPath-maxSocketName-2) + "/kubelet.sock", ""},
		"too long": {"/" + strings.Repeat("d", statefile.MaxSocketPath-maxSocketName+5) + "/kubelet.sock", "7 bytes shorter"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := kubelet.NewDirectory(test.socket, nil)
			if test.problem == "" && err != nil || test.problem != "" &&
				(err == nil || !strings.Contains(err.Error(), test.problem)) {
				t.Errorf("NewDirectory() = %v, want %q", err, test.problem)
			}
		})
	}
}

// TestADirectoryThatCannotBeUsed: the error says what to do.
func TestADirectoryThatCannotBeUsed(t *testing.T) {
	path := folder(t)
	if err := os.WriteFile(filepath.Join(path, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"": "", "none": "Start the kubelet, mount the directory",
		"file": "is not a directory"} {
		err := newDirectory(t, filepath.Join(path, name)).Check()
		if (err != nil) != (want != "") || err != nil && (!errors.Is(err, kubelet.ErrNoDirectory) ||
			!strings.Contains(err.Error(), want)) {
			t.Errorf("Check() of %q = %v, want %q", name, err, want)
		}
	}
}

// registry is a kubelet's Registration service that answers as told.
type registry struct {
	pluginapi.UnimplementedRegistrationServer
	requests chan *pluginapi.RegisterRequest
	err      error
}

func (r *registry) Register(_ context.Context, request *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	r.requests <- request
	return &pluginapi.Empty{}, r.err
}

func TestRegister(t *testing.T) {
	path := filepath.Join(folder(t), "100%d") // a path may have a %
	if err := os.Mkdir(path, 0o750); err != nil {
		t.Fatal(err)
	}
	d := newDirectory(t, path)
	endpoint := d.NewEndpoint("nvidia.com/gpu")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	register := func() error { return d.Register(ctx, 1, "nvidia.com/gpu", endpoint, &pluginapi.DevicePluginOptions{}) }

	if err := register(); !errors.Is(err, kubelet.ErrNotRegistered) {
		t.Errorf("without kubelet: Register() = %v, want ErrNotRegistered", err)
	}
	listener, err := net.Listen("unix", filepath.Join(d.Path(), "kubelet.sock"))
	if err != nil {
		t.Fatal(err)
	}
	service := &registry{requests: make(chan *pluginapi.RegisterRequest, 10)}
	server := grpc.NewServer()
	pluginapi.RegisterRegistrationServer(server, service)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)

	if err := register(); !errors.Is(err, kubelet.ErrNotRegistered) || len(service.requests) != 0 {
		t.Errorf("without our socket: Register() = %v after %d requests, want ErrNotRegistered after none", err,
			len(service.requests))
	}
	if err := os.WriteFile(endpoint, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := register(); err != nil {
		t.Fatalf("Register() = %v", err)
	}
	got := <-service.requests
	if got.GetVersion() != "v1beta1" || got.GetEndpoint() != filepath.Base(endpoint) ||
		got.GetResourceName() != "nvidia.com/gpu" {
		t.Errorf("kubelet saw %v", got)
	}
	watch(t, d)("kubelet", incarnation(1))
	err = d.Register(ctx, 2, "nvidia.com/gpu", endpoint, &pluginapi.DevicePluginOptions{})
	if !errors.Is(err, kubelet.ErrNotRegistered) || len(service.requests) != 0 {
		t.Errorf("another kubelet: Register() = %v after %d requests, want ErrNotRegistered after none", err,
			len(service.requests))
	}
	service.err = errors.New("not today")
	if err := register(); err == nil || errors.Is(err, kubelet.ErrNotRegistered) ||
		!strings.Contains(err.Error(), "not today") {
		t.Errorf("refused: Register() = %v, want kubelet's words", err)
	}
	service.err = errors.New(strings.Repeat("x", 100_000))
	if err := register(); err == nil || len(err.Error()) > 1100 || !strings.HasSuffix(err.Error(), "xxx...") {
		t.Errorf("refused at length: Register() = %v, want the beginning of kubelet's words", err)
	}
}
