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

// ErrNotRegistered is wrapped by the errors of a Register that certainly did not reach kubelet.
var ErrNotRegistered = errors.New("not registered")

// Register registers the plugin socket at path endpoint, which must be serving already, for
// resource: kubelet dials it before it answers. The directory must be the one that NewEndpoint gave
// the path for.
//
// If the directory is watched, the request goes to the kubelet of the given incarnation only. A
// kubelet that came later gets its own Register once it was seen.
//
// An error that wraps ErrNotRegistered means that kubelet never saw the request. After any other
// error it may have, and the endpoint must not be used for a second one: kubelet 1.37 would take no
// end of its stream for real any more.
func (d *Directory) Register(
	ctx context.Context, incarnation uint64, resource, endpoint string, options *pluginapi.DevicePluginOptions,
) error {
	// The connection is made first, and the endpoint looked at after: a kubelet that starts removes
	// all sockets before it listens, so an endpoint that is still there now was not removed by the
	// kubelet at the other end.
	conn, err := d.dial(ctx)
	if err != nil {
		return fmt.Errorf("%w: dial kubelet: %w", ErrNotRegistered, err)
	}
	defer func() { _ = conn.Close() }()
	if _, err := os.Lstat(endpoint); err != nil {
		return fmt.Errorf("%w: find our socket: %w", ErrNotRegistered, err)
	}
	// So is kubelet's socket: the connection is to this one or to one before it, which answers no
	// more.
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

// The pace at which a kubelet that refuses connections is dialled again. A kubelet that starts
// listens within a millisecond of making its socket; one that is down refuses until it starts, and
// then makes another socket.
const (
	redialFirst = time.Millisecond
	redialMost  = time.Second
)

// dial connects to kubelet's socket. It tries until ctx ends for as long as the socket is there and
// nobody listens.
func (d *Directory) dial(ctx context.Context) (net.Conn, error) {
	for wait := redialFirst; ; wait = min(2*wait, redialMost) {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", d.socket)
		refused := errors.Is(err, syscall.ECONNREFUSED)
		d.dialled(refused)
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

// newClient returns a client that uses conn, and closes it.
func newClient(conn net.Conn) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"), grpc.WithContextDialer(oneConnection(conn)),
		grpc.WithUnaryInterceptor(shortenErrors))
}

// maxErrorText bounds the text of an error of kubelet's, in bytes. It is logged at each try, and
// stands in status.
const maxErrorText = 1000

// shortenErrors is the interceptor of a client that shortens the errors of the server.
func shortenErrors(
	ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption,
) error {
	err := invoke(ctx, method, request, reply, conn, options...)
	if s := status.Convert(err); len(s.Message()) > maxErrorText {
		return status.Error(s.Code(), strings.ToValidUTF8(s.Message()[:maxErrorText], "")+"...")
	}
	return err
}

// oneConnection returns a dialer that hands out conn once, and no second connection, so that a
// request goes to the kubelet that was looked at or to none.
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
