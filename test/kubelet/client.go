package kubelet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// dialTimeout is how long kubelet tries to connect to a plugin, inside Register.
const dialTimeout = 10 * time.Second

// client is kubelet's side of one plugin socket.
type client struct {
	m        *manager
	resource string
	path     string
	drop     context.CancelFunc         // ends the ListAndWatch stream, and nothing else
	api      v1beta1.DevicePluginClient // set by dial

	conn      *grpc.ClientConn // set by dial; guarded by m.mu
	streaming bool             // guarded by m.mu
}

// connect is kubelet's work for a Register call: dial, ask for the options, take the endpoint into
// use and start the stream. The client is known before it is connected; on 1.36 the end of an older
// stream can therefore hit it.
func (m *manager) connect(ctx context.Context, resource, path string) error {
	stream, drop := context.WithCancel(m.ctx)
	c := &client{m: m, resource: resource, path: path, drop: drop}
	m.addClient(c)
	if err := c.connect(ctx); err != nil {
		m.removeClient(resource, path)
		drop()
		return err // like kubelet's, the connection stays open if it was the options or the path that was at fault
	}
	if mode, _ := m.gate.look(); mode == RegisterHangsUp {
		m.removeClient(resource, path)
		c.close()
		m.disconnected(resource, path)
		m.log.add(Event{Kind: Registered, Resource: resource, Endpoint: path})
		return nil
	}
	m.mu.Lock()
	c.streaming = true
	m.mu.Unlock()
	m.log.add(Event{Kind: Registered, Resource: resource, Endpoint: path})
	m.streams.Go(func() {
		err := c.listAndWatch(stream)
		ended := time.Now()
		select {
		case <-m.ctx.Done():
		case <-time.After(m.seesEndsAfter):
		}
		if m.ctx.Err() != nil {
			return // the process has ended; there is nobody to take notice
		}
		if found := m.findClient(resource, path); found != nil {
			m.removeClient(resource, found.path)
			found.close()
			m.disconnected(resource, found.path)
		}
		m.log.add(Event{Time: ended, Kind: StreamEnded, Resource: resource, Endpoint: path, Err: err})
	})
	return nil
}

func (c *client) connect(ctx context.Context) error {
	if err := c.dial(ctx); err != nil {
		return fmt.Errorf("failed to dial device plugin: %w", err)
	}
	options, err := c.api.GetDevicePluginOptions(ctx, &v1beta1.Empty{})
	if err != nil {
		return errors.New("failed to get device plugin options: " + err.Error()) // its code is lost, as with kubelet
	}
	return c.m.connected(c, options)
}

// dial connects, trying again until the time is over, as kubelet's blocking dial does.
func (c *client) dial(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	conn, err := grpc.NewClient("passthrough:///plugin",
		grpc.WithAuthority("localhost"),
		grpc.WithUserAgent(c.m.version.userAgent()),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", c.path) // as a URL a path with % is another one
		}))
	if err != nil {
		return err
	}
	conn.Connect()
	for state := conn.GetState(); state != connectivity.Ready; state = conn.GetState() {
		if !conn.WaitForStateChange(ctx, state) {
			_ = conn.Close() // it was never up
			return ctx.Err()
		}
	}
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	c.conn, c.api = conn, v1beta1.NewDevicePluginClient(conn)
	c.m.conns[c] = struct{}{}
	return nil
}

// listAndWatch takes in lists until the stream ends. Messages over gRPC's default of 4 MiB end it.
func (c *client) listAndWatch(ctx context.Context) error {
	stream, err := c.api.ListAndWatch(ctx, &v1beta1.Empty{})
	if err != nil {
		return err
	}
	for {
		response, err := stream.Recv()
		if err != nil {
			return err
		}
		c.m.list(c, time.Now(), response.GetDevices())
	}
}

// close closes the connection, if there is one yet.
func (c *client) close() {
	c.m.mu.Lock()
	conn := c.conn
	c.conn = nil
	delete(c.m.conns, c)
	c.m.mu.Unlock()
	c.drop()
	if conn != nil {
		_ = conn.Close() // fails only when closed already
	}
}

// The three functions below are kubelet's table of clients: in 1.36 one a resource, in 1.37 one a
// resource and socket path.

func (m *manager) addClient(c *client) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.version == V136 {
		m.clients[c.resource] = nil
	}
	m.clients[c.resource] = append(m.clients[c.resource], c)
}

func (m *manager) removeClient(resource, path string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.clients[resource] = slices.DeleteFunc(m.clients[resource], func(c *client) bool {
		return m.version == V136 || c.path == path
	})
}

func (m *manager) findClient(resource, path string) *client {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.clients[resource] {
		if m.version == V136 || c.path == path {
			return c
		}
	}
	return nil
}

// dropStreams ends every ListAndWatch stream of a resource, and returns how many there were.
func (m *manager) dropStreams(resource string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	dropped := 0
	for c := range m.conns {
		if c.resource == resource && c.streaming {
			c.drop()
			dropped++
		}
	}
	return dropped
}
