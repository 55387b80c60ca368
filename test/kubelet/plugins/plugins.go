// Package plugins is a stand-in for kubelet's plugin manager and for what calls DRA drivers, on
// real sockets, for tests: it registers the drivers whose sockets are in a folder, keeps a
// connection to each, calls the newest one that is connected, and forgets a driver when its socket
// is removed. The health of all devices of a driver is forgotten when any stream ends. It keeps
// nothing of claims.
//
// It is beside package kubelet, and not in it: kubelets before 1.37 do not have all of the API that
// it needs.
//
// Only tests and the programs below test/ may import it; it knows nothing of the daemon.
package plugins

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

// Options say what kubelet knows of plugins.
type Options struct {
	// Dir is the folder of the sockets for registration.
	Dir string
	// Services are those that kubelet knows; nil for those of kubelet 1.37. Kubelet 1.36 has no health
	// v1, 1.33 has no DRA v1.
	Services []string
}

// A Kubelet is one between its start and its end. Its methods may be called by several goroutines.
type Kubelet struct {
	options Options
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
	connected    bool // guarded by Kubelet.mu
	kubelet      *Kubelet
}

// Start starts a kubelet. The caller ends it with Stop.
func Start(o Options) *Kubelet {
	if o.Services == nil {
		o.Services = []string{drav1.DRAPluginService, drav1beta1.DRAPluginService,
			healthv1.DRAResourceHealthService, healthv1alpha1.DRAResourceHealthService}
	}
	ctx, end := context.WithCancel(context.Background())
	k := &Kubelet{options: o, end: end, failed: map[string]time.Time{}, health: map[string]*healthv1.DeviceHealth{}}
	k.tasks.Go(func() {
		ticker := time.NewTicker(pluginPoll)
		defer ticker.Stop()
		for ctx.Err() == nil {
			k.reconcile(ctx)
			select {
			case <-ctx.Done():
			case <-ticker.C:
			}
		}
	})
	return k
}

// Stop ends kubelet as a kill does: its connections close, and nobody is told.
func (k *Kubelet) Stop() {
	k.end()
	k.mu.Lock()
	plugins := k.plugins
	k.plugins = nil
	k.mu.Unlock()
	for _, plugin := range plugins {
		plugin.cancel()
		_ = plugin.conn.Close()
	}
	k.tasks.Wait()
}

// Refuse has registrations refused with a message from now on; none if it is empty.
func (k *Kubelet) Refuse(message string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.refuse = message
}

// Registered returns the names of the sockets of the registered drivers, in the order of their
// registration.
func (k *Kubelet) Registered() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	var names []string
	for _, plugin := range k.plugins {
		names = append(names, filepath.Base(plugin.socket))
	}
	return names
}

// Health returns what was told of a device; nil if nothing is known.
func (k *Kubelet) Health(device string) *healthv1.DeviceHealth {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.health[device]
}

// HealthReports returns how many reports of health have come.
func (k *Kubelet) HealthReports() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.reports
}

// Prepare calls a driver as for the sandbox of a pod with these claims. It returns the answers by
// UID.
func (k *Kubelet) Prepare(
	ctx context.Context, driver string, claims ...*drav1.Claim,
) (map[string]*drav1.NodePrepareResourceResponse, error) {
	client, err := k.client(driver)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, pluginCall)
	defer cancel()
	answer, err := client.NodePrepareResources(ctx, &drav1.NodePrepareResourcesRequest{Claims: claims})
	return answer.GetClaims(), err
}

// Unprepare is the same for claims that no pod uses any more.
func (k *Kubelet) Unprepare(
	ctx context.Context, driver string, claims ...*drav1.Claim,
) (map[string]*drav1.NodeUnprepareResourceResponse, error) {
	client, err := k.client(driver)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, pluginCall)
	defer cancel()
	answer, err := client.NodeUnprepareResources(ctx, &drav1.NodeUnprepareResourcesRequest{Claims: claims})
	return answer.GetClaims(), err
}

// Called returns the name of the socket by whose registration a driver is called now; empty if
// there is none.
func (k *Kubelet) Called(driver string) string {
	if called := k.called(driver); called != nil {
		return filepath.Base(called.socket)
	}
	return ""
}

// called returns the newest plugin of a driver that is connected, and without one the newest.
func (k *Kubelet) called(driver string) (called *plugin) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, plugin := range k.plugins {
		if plugin.name == driver && (called == nil || plugin.connected || !called.connected) {
			called = plugin
		}
	}
	return called
}

// client returns a client of the plugin of a driver that is called now.
func (k *Kubelet) client(driver string) (drav1.DRAPluginClient, error) {
	called := k.called(driver)
	switch {
	case called == nil:
		return nil, fmt.Errorf("DRA driver %s is not registered", driver)
	case called.beta:
		return drav1beta1.V1Beta1ClientWrapper{DRAPluginClient: drav1beta1.NewDRAPluginClient(called.conn)}, nil
	}
	return drav1.NewDRAPluginClient(called.conn), nil
}

// reconcile registers the plugins whose sockets came, and forgets those whose sockets went.
func (k *Kubelet) reconcile(ctx context.Context) {
	var sockets []string
	entries, _ := os.ReadDir(k.options.Dir) // it may come yet
	for _, e := range entries {
		if e.Type()&fs.ModeSocket != 0 {
			sockets = append(sockets, filepath.Join(k.options.Dir, e.Name()))
		}
	}
	k.mu.Lock()
	var gone []*plugin
	k.plugins = slices.DeleteFunc(k.plugins, func(plugin *plugin) bool {
		if slices.Contains(sockets, plugin.socket) {
			return false
		}
		gone = append(gone, plugin)
		return true
	})
	var found []string
	for _, socket := range sockets {
		known := slices.ContainsFunc(k.plugins, func(plugin *plugin) bool { return plugin.socket == socket })
		if !known && time.Since(k.failed[socket]) > time.Second {
			found = append(found, socket)
		}
	}
	k.mu.Unlock()
	for _, plugin := range gone {
		plugin.cancel()
		_ = plugin.conn.Close()
	}
	for _, socket := range found {
		if err := k.register(ctx, socket); err != nil {
			k.mu.Lock()
			k.failed[socket] = time.Now()
			k.mu.Unlock()
		}
	}
}

// register registers the plugin with a socket.
func (k *Kubelet) register(ctx context.Context, socket string) error {
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
	k.mu.Lock()
	refuse := k.refuse
	k.mu.Unlock()
	if refuse == "" && info.GetType() != registerapi.DRAPlugin {
		refuse = "no handler registered for plugin type " + info.GetType()
	}
	var added *plugin
	if refuse == "" {
		if added, err = k.add(socket, info); err != nil {
			refuse = err.Error()
		}
	}
	_, err = client.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: refuse == "",
		Error: refuse})
	if err != nil && added != nil {
		k.forget(added)
	}
	if refuse != "" {
		err = errors.Join(err, errors.New(refuse))
	}
	return err
}

// add takes in a plugin, and connects to it at once.
func (k *Kubelet) add(socket string, info *registerapi.PluginInfo) (*plugin, error) {
	knows := func(service string) bool {
		return slices.Contains(k.options.Services, service) && slices.Contains(info.GetSupportedVersions(), service)
	}
	added := &plugin{name: info.GetName(), socket: socket, beta: !knows(drav1.DRAPluginService), kubelet: k}
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
	k.mu.Lock()
	k.plugins = append(k.plugins, added)
	k.mu.Unlock()
	switch {
	case knows(healthv1.DRAResourceHealthService):
		k.tasks.Go(func() { k.follow(ctx, healthv1.NewDRAResourceHealthClient(conn)) })
	case knows(healthv1alpha1.DRAResourceHealthService):
		k.tasks.Go(func() {
			k.follow(ctx, healthv1.V1Alpha1ClientWrapper{Client: healthv1alpha1.NewDRAResourceHealthClient(conn)})
		})
	}
	conn.Connect()
	return added, nil
}

func (k *Kubelet) forget(gone *plugin) {
	k.mu.Lock()
	k.plugins = slices.DeleteFunc(k.plugins, func(plugin *plugin) bool { return plugin == gone })
	k.mu.Unlock()
	gone.cancel()
	_ = gone.conn.Close()
}

// follow keeps what a plugin tells of health until ctx ends.
func (k *Kubelet) follow(ctx context.Context, client healthv1.DRAResourceHealthClient) {
	for ctx.Err() == nil {
		stream, err := client.NodeWatchResources(ctx, &healthv1.NodeWatchResourcesRequest{})
		for err == nil {
			var report *healthv1.NodeWatchResourcesResponse
			if report, err = stream.Recv(); err == nil {
				k.mu.Lock()
				k.reports++
				for _, d := range report.GetDevices() {
					k.health[d.GetDevice().GetDeviceName()] = d
				}
				k.mu.Unlock()
			}
		}
		k.mu.Lock()
		clear(k.health)
		k.mu.Unlock()
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
