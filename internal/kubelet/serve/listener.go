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

// connections are the open connections of one listener. They show when the kubelet has closed its
// connection. A registration closes the other connections itself, because a stopping gRPC server
// waits for silent connections.
type connections struct {
	mu              sync.Mutex // guards all following fields
	open            map[*conn]struct{}
	kubelet         *conn         // the first connection with a call: only the kubelet knows the socket then
	kubeletClosedCh chan struct{} // closed when the kubelet's connection is
	closing         bool          // new connections are closed at once
}

func newConnections() *connections {
	return &connections{open: map[*conn]struct{}{}, kubeletClosedCh: make(chan struct{})}
}

// noteCall records a call. ctx is the context of the call.
func (c *connections) noteCall(ctx context.Context) {
	from, ok := kubelet.PeerConn(ctx).(*conn)
	c.mu.Lock()
	defer c.mu.Unlock()
	if !ok || c.kubelet != nil {
		return
	}
	c.kubelet = from
	if _, open := c.open[c.kubelet]; !open {
		close(c.kubeletClosedCh)
	}
}

// kubeletClosed returns a channel that is closed once the kubelet's connection was closed; never if
// the kubelet makes no call.
func (c *connections) kubeletClosed() <-chan struct{} { return c.kubeletClosedCh }

// kubeletGone returns a channel that is closed once no connection of the kubelet is open: at once
// if there never was one.
func (c *connections) kubeletGone() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.kubelet != nil {
		return c.kubeletClosedCh
	}
	none := make(chan struct{})
	close(none)
	return none
}

// close closes the open and all future connections, except the kubelet's.
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

// add adds a new connection. It returns false if the caller must close the connection.
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
		close(c.kubeletClosedCh)
	}
	delete(c.open, conn)
}

// A listener records the connections that it accepts. Close only stops accepting: the socket stays
// until release.
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
				l.logger.Info("Cannot accept a connection of the kubelet; retrying", "reason", err.Error())
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

// A conn is an accepted connection. gRPC closes it as soon as the other side has closed it.
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
