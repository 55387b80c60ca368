package kubelet

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/stats"
	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	healthv1alpha1 "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	drav1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

const (
	pluginPoll    = 50 * time.Millisecond // kubelet's loop takes 1 s
	pluginTimeout = 10 * time.Second      // of the connection for a registration
	pluginCall    = 45 * time.Second      // of a call of a DRA driver
)

// PluginsOptions say what kubelet knows of plugins.
type PluginsOptions struct {
	// Dir is the folder of the sockets for registration.
	Dir string
	// Services are those that kubelet knows; nil for those of kubelet 1.37. Kubelet 1.36 has no health v1, 1.33 has no DRA v1.
	Services []string
}

// Plugins is a stand-in for kubelet's plugin manager and for what calls DRA drivers: it registers the drivers whose sockets are in a
// folder, keeps a connection to each, calls the newest one that is connected, and forgets a driver when its socket is removed. The health
// of all devices of a driver is forgotten when any stream ends. It keeps nothing of claims.
type Plugins struct {
	options PluginsOptions
	end     context.CancelFunc
	tasks   sync.WaitGroup

	mu      sync.Mutex // guards all following fields
	refuse  string
	plugins []*plugin // in the order of registration
	failed  map[string]time.Time
	health  map[string]*healthv1.DeviceHealth
	reports int
}

// A plugin is a registered driver.
type plugin struct {
	name, socket string // of the driver; of the registration
	beta         bool   // has DRA v1beta1 alone
	conn         *grpc.ClientConn
	cancel       context.CancelFunc
	connected    bool // guarded by Plugins.mu
	kubelet      *Plugins
}

// StartPlugins starts a kubelet. The caller ends it with Stop.
func StartPlugins(o PluginsOptions) *Plugins {
	if o.Services == nil {
		o.Services = []string{drav1.DRAPluginService, drav1beta1.DRAPluginService,
			healthv1.DRAResourceHealthService, healthv1alpha1.DRAResourceHealthService}
	}
	ctx, end := context.WithCancel(context.Background())
	p := &Plugins{options: o, end: end, failed: map[string]time.Time{}, health: map[string]*healthv1.DeviceHealth{}}
	p.tasks.Go(func() {
		ticker := time.NewTicker(pluginPoll)
		defer ticker.Stop()
		for ctx.Err() == nil {
			p.reconcile(ctx)
			select {
			case <-ctx.Done():
			case <-ticker.C:
			}
		}
	})
	return p
}

// Stop ends kubelet as a kill does: its connections close, and nobody is told.
func (p *Plugins) Stop() {
	p.end()
	p.mu.Lock()
	plugins := p.plugins
	p.plugins = nil
	p.mu.Unlock()
	for _, plugin := range plugins {
		plugin.cancel()
		_ = plugin.conn.Close()
	}
	p.tasks.Wait()
}

// Refuse has registrations refused with a message from now on; none if it is empty.
func (p *Plugins) Refuse(message string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refuse = message
}

// Registered returns the names of the sockets of the registered drivers, in the order of their registration.
func (p *Plugins) Registered() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var names []string
	for _, plugin := range p.plugins {
		names = append(names, filepath.Base(plugin.socket))
	}
	return names
}

// Health returns what was told of a device; nil if nothing is known.
func (p *Plugins) Health(device string) *healthv1.DeviceHealth {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.health[device]
}

// HealthReports returns how many reports of health have come.
func (p *Plugins) HealthReports() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.reports
}

// Prepare calls a driver as for the sandbox of a pod with these claims. It returns the answers by UID.
func (p *Plugins) Prepare(
	ctx context.Context, driver string, claims ...*drav1.Claim,
) (map[string]*drav1.NodePrepareResourceResponse, error) {
	client, err := p.client(driver)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, pluginCall)
	defer cancel()
	answer, err := client.NodePrepareResources(ctx, &drav1.NodePrepareResourcesRequest{Claims: claims})
	return answer.GetClaims(), err
}

// Unprepare is the same for claims that no pod uses any more.
func (p *Plugins) Unprepare(
	ctx context.Context, driver string, claims ...*drav1.Claim,
) (map[string]*drav1.NodeUnprepareResourceResponse, error) {
	client, err := p.client(driver)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, pluginCall)
	defer cancel()
	answer, err := client.NodeUnprepareResources(ctx, &drav1.NodeUnprepareResourcesRequest{Claims: claims})
	return answer.GetClaims(), err
}

// client returns the newest plugin of a driver that is connected, and without one the newest.
func (p *Plugins) client(driver string) (drav1.DRAPluginClient, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var found *plugin
	for _, plugin := range p.plugins {
		if plugin.name == driver && (found == nil || plugin.connected || !found.connected) {
			found = plugin
		}
	}
	switch {
	case found == nil:
		return nil, fmt.Errorf("DRA driver %s is not registered", driver)
	case found.beta:
		return drav1beta1.V1Beta1ClientWrapper{DRAPluginClient: drav1beta1.NewDRAPluginClient(found.conn)}, nil
	}
	return drav1.NewDRAPluginClient(found.conn), nil
}

// reconcile registers the plugins whose sockets came, and forgets those whose sockets went.
func (p *Plugins) reconcile(ctx context.Context) {
	var sockets []string
	entries, _ := os.ReadDir(p.options.Dir) // it may come yet
	for _, e := range entries {
		if e.Type()&fs.ModeSocket != 0 {
			sockets = append(sockets, filepath.Join(p.options.Dir, e.Name()))
		}
	}
	p.mu.Lock()
	var gone []*plugin
	p.plugins = slices.DeleteFunc(p.plugins, func(plugin *plugin) bool {
		if slices.Contains(sockets, plugin.socket) {
			return false
		}
		gone = append(gone, plugin)
		return true
	})
	var found []string
	for _, socket := range sockets {
		known := slices.ContainsFunc(p.plugins, func(plugin *plugin) bool { return plugin.socket == socket })
		if !known && time.Since(p.failed[socket]) > time.Second {
			found = append(found, socket)
		}
	}
	p.mu.Unlock()
	for _, plugin := range gone {
		plugin.cancel()
		_ = plugin.conn.Close()
	}
	for _, socket := range found {
		if err := p.register(ctx, socket); err != nil {
			p.mu.Lock()
			p.failed[socket] = time.Now()
			p.mu.Unlock()
		}
	}
}

// register registers the plugin with a socket.
func (p *Plugins) register(ctx context.Context, socket string) error {
	ctx, cancel := context.WithTimeout(ctx, pluginTimeout)
	defer cancel()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	client := registerapi.NewRegistrationClient(conn)
	info, err := client.GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil {
		return err
	}
	p.mu.Lock()
	refuse := p.refuse
	p.mu.Unlock()
	if refuse == "" && info.GetType() != registerapi.DRAPlugin {
		refuse = "no handler registered for plugin type " + info.GetType()
	}
	var added *plugin
	if refuse == "" {
		if added, err = p.add(socket, info); err != nil {
			refuse = err.Error()
		}
	}
	_, err = client.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: refuse == "", Error: refuse})
	if err != nil && added != nil {
		p.forget(added)
	}
	if refuse != "" {
		err = errors.Join(err, errors.New(refuse))
	}
	return err
}

// add takes in a plugin, and connects to it at once.
func (p *Plugins) add(socket string, info *registerapi.PluginInfo) (*plugin, error) {
	knows := func(service string) bool {
		return slices.Contains(p.options.Services, service) && slices.Contains(info.GetSupportedVersions(), service)
	}
	added := &plugin{name: info.GetName(), socket: socket, beta: !knows(drav1.DRAPluginService), kubelet: p}
	if added.beta && !knows(drav1beta1.DRAPluginService) {
		return nil, fmt.Errorf("none of the services %q is known", info.GetSupportedVersions())
	}
	conn, err := grpc.NewClient("unix:"+info.GetEndpoint(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithStatsHandler(added))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	added.conn, added.cancel = conn, cancel
	p.mu.Lock()
	p.plugins = append(p.plugins, added)
	p.mu.Unlock()
	switch {
	case knows(healthv1.DRAResourceHealthService):
		p.tasks.Go(func() { p.follow(ctx, healthv1.NewDRAResourceHealthClient(conn)) })
	case knows(healthv1alpha1.DRAResourceHealthService):
		p.tasks.Go(func() {
			p.follow(ctx, healthv1.V1Alpha1ClientWrapper{Client: healthv1alpha1.NewDRAResourceHealthClient(conn)})
		})
	}
	conn.Connect()
	return added, nil
}

func (p *Plugins) forget(gone *plugin) {
	p.mu.Lock()
	p.plugins = slices.DeleteFunc(p.plugins, func(plugin *plugin) bool { return plugin == gone })
	p.mu.Unlock()
	gone.cancel()
	_ = gone.conn.Close()
}

// follow keeps what a plugin tells of health until ctx ends.
func (p *Plugins) follow(ctx context.Context, client healthv1.DRAResourceHealthClient) {
	for ctx.Err() == nil {
		stream, err := client.NodeWatchResources(ctx, &healthv1.NodeWatchResourcesRequest{})
		for err == nil {
			var report *healthv1.NodeWatchResourcesResponse
			if report, err = stream.Recv(); err == nil {
				p.mu.Lock()
				p.reports++
				for _, d := range report.GetDevices() {
					p.health[d.GetDevice().GetDeviceName()] = d
				}
				p.mu.Unlock()
			}
		}
		p.mu.Lock()
		clear(p.health)
		p.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-time.After(pluginPoll): // kubelet waits for 5 s
		}
	}
}

// TagConn does nothing.
func (*plugin) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn notes whether the plugin is connected, and connects again.
func (p *plugin) HandleConn(_ context.Context, s stats.ConnStats) {
	_, began := s.(*stats.ConnBegin)
	p.kubelet.mu.Lock()
	p.connected = began
	p.kubelet.mu.Unlock()
	if !began {
		go p.conn.Connect() // not in the callback, where gRPC has locks
	}
}

// TagRPC does nothing.
func (*plugin) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// HandleRPC does nothing.
func (*plugin) HandleRPC(context.Context, stats.RPCStats) {}
