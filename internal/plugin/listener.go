package plugin

import (
	"net"
	"sync"
)

// connections counts the open connections of one listener, so that a life can tell when kubelet has closed its own.
type connections struct {
	mu      sync.Mutex // guards all following fields
	open    int
	drained chan struct{} // closed when open falls to 0; after that made anew for the next connection
}

func newConnections() *connections { return &connections{drained: make(chan struct{})} }

// watch returns a listener whose connections are counted.
func (c *connections) watch(l net.Listener) net.Listener {
	return &countingListener{Listener: l, connections: c}
}

// left returns a channel that is closed once no connection is open any more. Where none is open yet, the first is waited
// for.
func (c *connections) left() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.drained
}

// none returns a channel that is closed once no connection is open: at once if there is none, or never was one.
func (c *connections) none() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open == 0 {
		now := make(chan struct{})
		close(now)
		return now
	}
	return c.drained
}

func (c *connections) opened() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open++; c.open > 1 {
		return
	}
	select {
	case <-c.drained:
		c.drained = make(chan struct{})
	default: // the first
	}
}

func (c *connections) closed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open--; c.open == 0 {
		close(c.drained)
	}
}

type countingListener struct {
	net.Listener
	connections *connections
}

func (l *countingListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.connections.opened()
	return &countedConn{Conn: conn, closed: l.connections.closed}, nil
}

// A countedConn tells once that it was closed. gRPC closes a connection as soon as the other end did.
type countedConn struct {
	net.Conn
	once   sync.Once
	closed func()
}

func (c *countedConn) Close() error {
	err := c.Conn.Close()
	c.once.Do(c.closed)
	return err
}
