package serve

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// connections are the open connections of one listener. They show when kubelet has closed its
// connection. A life closes the other ones itself, because gRPC waits for a connection that sends
// nothing when the server stops.
type connections struct {
	mu      sync.Mutex // guards all following fields
	open    map[*conn]struct{}
	kubelet *conn         // the first connection on which a call was made: only kubelet knows the socket then
	gone    chan struct{} // closed when kubelet's connection is
	closing bool          // new connections are closed at once
}

func newConnections() *connections {
	return &connections{open: map[*conn]struct{}{}, gone: make(chan struct{})}
}

// called records that a call was made. ctx is that of the call.
func (c *connections) called(ctx context.Context) {
	from, ok := kubelet.PeerConn(ctx).(*conn)
	c.mu.Lock()
	defer c.mu.Unlock()
	if !ok || c.kubelet != nil {
		return
	}
	c.kubelet = from
	if _, open := c.open[c.kubelet]; !open {
		close(c.gone)
	}
}

// kubeletClosed returns a channel that is closed once kubelet's connection was closed; never if
// kubelet makes no call.
func (c *connections) kubeletClosed() <-chan struct{} { return c.gone }

// left returns a channel that is closed once no connection of kubelet's is open: at once if there
// never was one.
func (c *connections) left() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.kubelet != nil {
		return c.gone
	}
	none := make(chan struct{})
	close(none)
	return none
}

// close closes the open connections but kubelet's, and those to come.
func (c *connections) close() {
	c.mu.Lock()
	c.closing = true
	var closing []*conn
	for conn := range c.open {
		if conn != c.kubelet {
			closing = append(closing, conn)
		}
	}
	c.mu.Unlock()
	for _, conn := range closing {
		_ = conn.Close() // it fails only when it is closed already
	}
}

// add takes in a new connection, and reports false where it has to be closed.
func (c *connections) add(conn *conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing {
		return false
	}
	c.open[conn] = struct{}{}
	return true
}

func (c *connections) remove(conn *conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, open := c.open[conn]; open && conn == c.kubelet {
		close(c.gone)
	}
	delete(c.open, conn)
}

// A listener keeps account of the connections that it accepts. Close ends the accepting alone: the
// socket stays until release.
type listener struct {
	*net.UnixListener
	connections *connections
	logger      klog.Logger
	failing     bool        // the last attempt to accept failed
	closed      atomic.Bool // Close was called
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		accepted, err := l.UnixListener.Accept()
		if err != nil && l.closed.Load() {
			return nil, net.ErrClosed
		}
		if err != nil {
			if !l.failing { // gRPC tries again, up to once a second
				l.logger.Info("Cannot accept a connection of kubelet's; trying again", "reason", err.Error())
			}
			l.failing = true
			return nil, err
		}
		l.failing = false
		c := &conn{Conn: accepted, connections: l.connections}
		if l.connections.add(c) {
			return c, nil
		}
		_ = accepted.Close()
	}
}

func (l *listener) Close() error {
	l.closed.Store(true)
	return l.SetDeadline(time.Unix(1, 0))
}

// release closes the socket and removes its file.
func (l *listener) release() { _ = l.UnixListener.Close() } // it fails only when it is closed already

// A conn is an accepted connection. gRPC closes it as soon as the other end did.
type conn struct {
	net.Conn
	connections *connections
}

func (c *conn) Close() error {
	err := c.Conn.Close()
	c.connections.remove(c)
	return err
}

// RemoteAddr implements net.Conn.
func (c *conn) RemoteAddr() net.Addr { return kubelet.PeerAddr(c.Conn.RemoteAddr(), c) }
