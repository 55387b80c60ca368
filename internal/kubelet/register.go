package kubelet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// ErrNotRegistered is wrapped by the errors of a Register that certainly did not reach the kubelet.
var ErrNotRegistered = errors.New("not registered")

// Register registers the plugin socket at path endpoint for a resource. The socket must be
// serving already, because the kubelet dials the socket before answering. NewEndpoint of the
// same directory must have returned the path.
//
// In a watched directory, the request goes only to the kubelet of the given incarnation. A
// later kubelet gets a separate Register after Watch has found it.
//
// An error that wraps ErrNotRegistered means that the kubelet never saw the request. After
// any other error the kubelet may have seen the request, and the endpoint must not be
// registered again: the kubelet 1.37 would no longer believe any end of the endpoint's
// stream.
func (d *Directory) Register(
	ctx context.Context, incarnation uint64, resource, endpoint string, options *pluginapi.DevicePluginOptions,
) error {
	// Connect first, and check the endpoint afterwards: a starting kubelet removes all
	// sockets before listening. So the connected kubelet has not removed an endpoint that
	// still exists.
	conn, err := d.dial(ctx)
	if err != nil {
		return fmt.Errorf("%w: dial the kubelet: %w", ErrNotRegistered, err)
	}
	defer func() { _ = conn.Close() }()
	if _, err := os.Lstat(endpoint); err != nil {
		return fmt.Errorf("%w: find our socket: %w", ErrNotRegistered, err)
	}
	// The same holds for the kubelet's socket: the connection is to this kubelet or to an
	// earlier kubelet, already stopped.
	if !d.shows(incarnation) {
		return fmt.Errorf("%w: another kubelet has come", ErrNotRegistered)
	}
	client, err := newClient(conn)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNotRegistered, err)
	}
	defer func() { _ = client.Close() }()
	_, err = pluginapi.NewRegistrationClient(client).Register(ctx, &pluginapi.RegisterRequest{
		Version:      pluginapi.Version,
		Endpoint:     filepath.Base(endpoint),
		ResourceName: resource,
		Options:      options,
	})
	if err != nil {
		return fmt.Errorf("register %s at kubelet: %w", resource, err)
	}
	return nil
}

// The pace of dialling a kubelet that refuses connections. A starting kubelet listens within
// a millisecond of creating its socket. A stopped kubelet refuses until it starts, and then
// creates another socket.
const (
	redialFirst = time.Millisecond
	redialMost  = time.Second
)

// dial connects to the kubelet's socket. It tries until ctx ends, as long as the socket exists and
// no process listens.
func (d *Directory) dial(ctx context.Context) (net.Conn, error) {
	for wait := redialFirst; ; wait = min(2*wait, redialMost) {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", d.socket)
		refused := errors.Is(err, syscall.ECONNREFUSED)
		d.recordDial(refused)
		if !refused {
			return conn, err
		}
		timer := d.clock.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil, err
		case <-timer.C():
		}
	}
}

// newClient returns a client that uses conn. Close of the client closes conn.
func newClient(conn net.Conn) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"), grpc.WithContextDialer(oneConnection(conn)),
		grpc.WithUnaryInterceptor(shortenErrors))
}

// maxErrorText bounds the text of an error from the kubelet, in bytes. The text appears in
// the log at each attempt, and in the status.
const maxErrorText = 1000

// shortenErrors is the interceptor of a client that shortens the errors of the server.
func shortenErrors(
	ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker,
	options ...grpc.CallOption,
) error {
	err := invoke(ctx, method, request, reply, conn, options...)
	if s := status.Convert(err); len(s.Message()) > maxErrorText {
		return status.Error(s.Code(), strings.ToValidUTF8(s.Message()[:maxErrorText], "")+"...")
	}
	return err
}

// oneConnection returns a dialer that hands out conn once and never connects again, so that
// a request reaches only the checked kubelet.
func oneConnection(conn net.Conn) func(context.Context, string) (net.Conn, error) {
	once := make(chan net.Conn, 1)
	once <- conn
	return func(context.Context, string) (net.Conn, error) {
		select {
		case conn := <-once:
			return conn, nil
		default:
			return nil, net.ErrClosed
		}
	}
}
