package draplugin

import (
	"context"
	"errors"
	"net"

	"google.golang.org/grpc"
	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	healthv1alpha1 "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	drav1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// register registers the services of a life. The kubelet uses the first supported version of
// each.
func (l *life) register(server *grpc.Server) {
	registerapi.RegisterRegistrationServer(server, &registrar{life: l})
	node, health := &service{Plugin: l.Plugin, log: l.log}, &health{Plugin: l.Plugin, closing: l.closing}
	drav1.RegisterDRAPluginServer(server, node)
	drav1beta1.RegisterDRAPluginServer(server, drav1beta1.V1ServerWrapper{DRAPluginServer: node})
	healthv1.RegisterDRAResourceHealthServer(server, health)
	healthv1alpha1.RegisterDRAResourceHealthServer(server, healthv1.V1ServerWrapper{Server: health})
}

// A registrar answers the kubelet's plugin manager.
type registrar struct {
	registerapi.UnsafeRegistrationServer
	life *life
}

// GetInfo returns the driver's name, and says that this socket serves all calls.
func (r *registrar) GetInfo(ctx context.Context, _ *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	if c, ok := kubelet.PeerConn(ctx).(*conn); ok {
		r.life.set(func(state *registration) {
			if !c.registration && !c.closed {
				c.registration = true
				state.connected--
			}
		})
	}
	return &registerapi.PluginInfo{
		Type: registerapi.DRAPlugin, Name: r.life.o.Driver, Endpoint: r.life.path, SupportedVersions: []string{
			drav1.DRAPluginService, drav1beta1.DRAPluginService,
			healthv1.DRAResourceHealthService, healthv1alpha1.DRAResourceHealthService,
		},
	}, nil
}

// NotifyRegistrationStatus receives the result of the registration. After a failure the life ends,
// because the kubelet waits longer and longer before it retries the same socket.
func (r *registrar) NotifyRegistrationStatus(
	_ context.Context, status *registerapi.RegistrationStatus,
) (*registerapi.RegistrationStatusResponse, error) {
	if status.GetPluginRegistered() {
		r.life.log.Info("The kubelet registered the driver")
		r.life.set(func(state *registration) { state.registered, state.disconnected = true, false })
		r.life.change(func(s *Status) { s.Registrations++ })
	} else {
		r.life.end(errors.New("the kubelet refused to register the driver: " + status.GetError()))
	}
	return &registerapi.RegistrationStatusResponse{}, nil
}

// A listener tracks the accepted connections. The kubelet opens one connection for the
// registration only, and a lasting connection for everything else. The end of the lasting
// connection shows that the kubelet stopped. Kubelets before 1.34 open the lasting
// connection with the first call.
type listener struct {
	*net.UnixListener
	life *life
}

func (l listener) Accept() (net.Conn, error) {
	accepted, err := l.UnixListener.Accept()
	if err != nil {
		return nil, err
	}
	return &conn{Conn: accepted, life: l.life}, nil
}

// A conn is an accepted connection. It counts after the first data from the other end; the
// kubelet sends data at once. Other processes of this program only connect, to test whether
// this process runs.
type conn struct {
	net.Conn
	life    *life
	hasData bool // data was received; used by Read only

	counts, registration, closed bool // guarded by life.mu
}

func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 && !c.hasData {
		c.hasData = true
		c.life.set(func(state *registration) {
			if !c.closed {
				c.counts = true
				state.connected++
				state.disconnected = false
			}
		})
	}
	return n, err
}

func (c *conn) Close() error {
	err := c.Conn.Close()
	c.life.set(func(state *registration) {
		if c.counts && !c.registration && !c.closed {
			state.connected--
			state.disconnected = state.registered && state.connected == 0
		}
		c.closed = true
	})
	return err
}

// RemoteAddr implements net.Conn.
func (c *conn) RemoteAddr() net.Addr { return kubelet.PeerAddr(c.Conn.RemoteAddr(), c) }
