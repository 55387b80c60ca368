package scenario

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Script says what a Plugin answers. The zero value wants to be asked for nothing, and allocates
// whatever it is asked for.
type Script struct {
	Options  *v1beta1.DevicePluginOptions // the answer to GetDevicePluginOptions; SetOptions changes it
	Hang     bool                         // GetDevicePluginOptions does not answer
	Refuse   bool                         // GetDevicePluginOptions answers with an error
	Allocate func(ids []string) (*v1beta1.AllocateResponse, error)
	Prefer   func(*v1beta1.ContainerPreferredAllocationRequest) ([]string, error)
	PreStart func(ids []string) error
}

// A Plugin is a device plugin on a socket of its own that does what it is told. It is no model for
// a real one: it looks after nothing.
type Plugin struct {
	v1beta1.UnimplementedDevicePluginServer

	dir, name, resource string
	script              Script
	listener            *net.UnixListener
	server              *grpc.Server
	serving             sync.WaitGroup

	mu      sync.Mutex // guards all following fields
	options *v1beta1.DevicePluginOptions
	list    *v1beta1.ListAndWatchResponse
	end     bool // the streams end
	streams int
	calls   []string
	changed chan struct{}
}

// StartPlugin serves a plugin on the socket dir/name, in place of one that was killed. It has no
// list until Send is called. The caller ends it with Stop.
func StartPlugin(dir, name, resource string, script Script) (*Plugin, error) {
	path := filepath.Join(dir, name)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("start plugin: %w", err)
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("start plugin: %w", err)
	}
	p := &Plugin{
		dir: dir, name: name, resource: resource, script: script, options: script.Options, listener: listener,
		server: grpc.NewServer(grpc.WaitForHandlers(true)), changed: make(chan struct{}),
	}
	v1beta1.RegisterDevicePluginServer(p.server, p)
	p.serving.Go(func() { _ = p.server.Serve(listener) })
	return p, nil
}

// Stop ends the plugin as a clean exit would: all connections break, and the socket file goes.
func (p *Plugin) Stop() {
	p.server.Stop()
	p.serving.Wait()
}

// Kill ends the plugin as a kill of its process would: the socket file stays.
func (p *Plugin) Kill() {
	p.listener.SetUnlinkOnClose(false)
	p.Stop()
}

// Register registers the plugin with the kubelet that listens in its directory.
func (p *Plugin) Register(ctx context.Context) error {
	return p.RegisterWith(ctx, func(*v1beta1.RegisterRequest) {})
}

// RegisterWith is Register with a request that was edited.
func (p *Plugin) RegisterWith(ctx context.Context, edit func(*v1beta1.RegisterRequest)) error {
	socket := "unix://" + filepath.Join(p.dir, "kubelet.sock")
	conn, err := grpc.NewClient(socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("register: %w", err)
	}
	defer conn.Close()
	request := &v1beta1.RegisterRequest{Version: v1beta1.Version, Endpoint: p.name, ResourceName: p.resource}
	edit(request)
	if _, err := v1beta1.NewRegistrationClient(conn).Register(ctx, request); err != nil {
		return fmt.Errorf("register: %w", err)
	}
	return nil
}

// Send makes devices the list, and sends it on every stream that there is or will be.
func (p *Plugin) Send(devices ...*v1beta1.Device) {
	p.change(func() { p.list = &v1beta1.ListAndWatchResponse{Devices: devices} })
}

// SetOptions changes the answer to GetDevicePluginOptions.
func (p *Plugin) SetOptions(o *v1beta1.DevicePluginOptions) { p.change(func() { p.options = o }) }

// EndStreams ends the streams that there are, from the plugin's side, and returns when none is
// left.
func (p *Plugin) EndStreams(ctx context.Context) error {
	p.change(func() { p.end = true })
	err := p.wait(ctx, func() bool { return p.streams == 0 })
	p.change(func() { p.end = false })
	return err
}

// WaitStreams waits until the plugin has n streams.
func (p *Plugin) WaitStreams(ctx context.Context, n int) error {
	return p.wait(ctx, func() bool { return p.streams == n })
}

// Calls returns the names of the calls that the plugin was given, in order.
func (p *Plugin) Calls() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.calls)
}

// ForgetCalls empties what Calls returns.
func (p *Plugin) ForgetCalls() { p.change(func() { p.calls = nil }) }

// ListAndWatch sends the list, and each newer one.
func (p *Plugin) ListAndWatch(_ *v1beta1.Empty, stream grpc.ServerStreamingServer[v1beta1.ListAndWatchResponse]) error {
	p.called("ListAndWatch")
	p.change(func() { p.streams++ })
	defer p.change(func() { p.streams-- })
	var sent *v1beta1.ListAndWatchResponse
	for {
		p.mu.Lock()
		list, end, changed := p.list, p.end, p.changed
		p.mu.Unlock()
		if end {
			return nil
		}
		if list != sent {
			if err := stream.Send(list); err != nil {
				return err
			}
			sent = list
		}
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-changed:
		}
	}
}

// GetDevicePluginOptions answers with the options as they are now.
func (p *Plugin) GetDevicePluginOptions(ctx context.Context, _ *v1beta1.Empty) (*v1beta1.DevicePluginOptions, error) {
	p.called("GetDevicePluginOptions")
	if p.script.Hang {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if p.script.Refuse {
		return nil, errors.New("the options are refused, as the test asked")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.options == nil {
		return &v1beta1.DevicePluginOptions{}, nil
	}
	return p.options, nil
}

// GetPreferredAllocation does what the script says.
func (p *Plugin) GetPreferredAllocation(
	_ context.Context, request *v1beta1.PreferredAllocationRequest,
) (*v1beta1.PreferredAllocationResponse, error) {
	p.called("GetPreferredAllocation")
	response := &v1beta1.PreferredAllocationResponse{}
	for _, container := range request.GetContainerRequests() {
		ids, err := p.script.Prefer(container)
		if err != nil {
			return nil, err
		}
		answer := &v1beta1.ContainerPreferredAllocationResponse{DeviceIDs: ids}
		response.ContainerResponses = append(response.ContainerResponses, answer)
	}
	return response, nil
}

// Allocate does what the script says, or names itself in the environment.
func (p *Plugin) Allocate(_ context.Context, request *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	p.called("Allocate")
	if p.script.Allocate != nil {
		return p.script.Allocate(request.GetContainerRequests()[0].GetDevicesIds())
	}
	response := &v1beta1.AllocateResponse{}
	for range request.GetContainerRequests() {
		response.ContainerResponses = append(response.ContainerResponses, &v1beta1.ContainerAllocateResponse{
			Envs: map[string]string{"SERVED_BY": p.name},
		})
	}
	return response, nil
}

// PreStartContainer does what the script says.
func (p *Plugin) PreStartContainer(
	_ context.Context, request *v1beta1.PreStartContainerRequest,
) (*v1beta1.PreStartContainerResponse, error) {
	p.called("PreStartContainer")
	if p.script.PreStart != nil {
		if err := p.script.PreStart(request.GetDevicesIds()); err != nil {
			return nil, err
		}
	}
	return &v1beta1.PreStartContainerResponse{}, nil
}

func (p *Plugin) called(name string) { p.change(func() { p.calls = append(p.calls, name) }) }

func (p *Plugin) change(do func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	do()
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *Plugin) wait(ctx context.Context, done func() bool) error {
	for {
		p.mu.Lock()
		ready, changed := done(), p.changed
		p.mu.Unlock()
		if ready {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for plugin %s: %w", p.name, context.Cause(ctx))
		case <-changed:
		}
	}
}
