package draplugin

import (
	"context"
	"errors"

	"google.golang.org/grpc"
	"google.golang.org/grpc/stats"
	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	healthv1alpha1 "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	drav1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
)

// register registers the services of a life: kubelet takes the first version of each that it knows.
func (l *life) register(server *grpc.Server) {
	registerapi.RegisterRegistrationServer(server, &registrar{life: l})
	node, health := &service{Plugin: l.Plugin, log: l.log}, &health{Plugin: l.Plugin, closing: l.closing}
	drav1.RegisterDRAPluginServer(server, node)
	drav1beta1.RegisterDRAPluginServer(server, drav1beta1.V1ServerWrapper{DRAPluginServer: node})
	healthv1.RegisterDRAResourceHealthServer(server, health)
	healthv1alpha1.RegisterDRAResourceHealthServer(server, healthv1.V1ServerWrapper{Server: health})
}

// A registrar answers kubelet's plugin manager.
type registrar struct {
	registerapi.UnsafeRegistrationServer
	life *life
}

// GetInfo says what the driver is, and that all is served by this socket.
func (r *registrar) GetInfo(ctx context.Context, _ *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	if c, ok := ctx.Value(connectionKey{}).(*connection); ok {
		r.life.set(func(state *registration) { state.forRegistration(c) })
	}
	return &registerapi.PluginInfo{
		Type: registerapi.DRAPlugin, Name: dra.Driver, Endpoint: r.life.path, SupportedVersions: []string{
			drav1.DRAPluginService, drav1beta1.DRAPluginService,
			healthv1.DRAResourceHealthService, healthv1alpha1.DRAResourceHealthService,
		},
	}, nil
}

// NotifyRegistrationStatus is told whether kubelet registered the driver. If it did not, the life ends: kubelet waits longer and longer
// until it tries the same socket again.
func (r *registrar) NotifyRegistrationStatus(
	_ context.Context, status *registerapi.RegistrationStatus,
) (*registerapi.RegistrationStatusResponse, error) {
	if status.GetPluginRegistered() {
		r.life.log.Info("Kubelet registered the driver")
		r.life.set(func(state *registration) { state.done, state.left = true, false })
		r.life.change(func(s *Status) { s.Registrations++ })
	} else {
		r.life.end(errors.New("kubelet refused to register the driver: " + status.GetError()))
	}
	return &registerapi.RegistrationStatusResponse{}, nil
}

// connections keeps account of the connections of a life. Kubelet has one for the registration alone, which it closes then, and one for all
// else, which it opens at once and keeps: its end shows that kubelet ended. Kubelets before 1.34 open that one with the first call.
type connections life

// A connection is an open one.
type connection struct {
	registration bool // kubelet's for the registration
	ended        bool
}

type connectionKey struct{}

// TagConn gives a connection to the contexts of its calls.
func (c *connections) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context {
	return context.WithValue(ctx, connectionKey{}, &connection{})
}

// HandleConn takes in a connection, or its end.
func (c *connections) HandleConn(ctx context.Context, s stats.ConnStats) {
	connection, ok := ctx.Value(connectionKey{}).(*connection)
	if !ok {
		return
	}
	(*life)(c).set(func(state *registration) {
		if _, began := s.(*stats.ConnBegin); began {
			state.connected++
			state.left = false
			return
		}
		state.end(connection)
	})
}

// TagRPC does nothing.
func (c *connections) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// HandleRPC does nothing.
func (c *connections) HandleRPC(context.Context, stats.RPCStats) {}

// forRegistration takes a connection out of those by which kubelet calls the driver.
func (r *registration) forRegistration(c *connection) {
	if !c.registration && !c.ended {
		c.registration = true
		r.connected--
	}
}

// end takes out a connection that ended.
func (r *registration) end(c *connection) {
	c.ended = true
	if !c.registration {
		r.connected--
		r.left = r.done && r.connected == 0
	}
}
