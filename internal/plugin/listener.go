package plugin

import (
	"net"
	"sync"
)

// connections counts the open connections of one listener, so that a life can tell when kubelet has closed its own.
type connections struct {
	left  chan struct{} // closed when no connection is open any more; none at all does not count
	mu    sync.Mutex    // guards all following fields
	open  int
	empty chan struct{} // closed when open falls to 0; nil while nobody waits
}

// watch returns a listener whose connections are counted.
func (c *connections) watch(l net.Listener) net.Listener {
	return &countingListener{Listener: l, connections: c}
}

// none returns a channel that is closed once no connection is open.
func (c *connections) none() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.empty == nil {
		c.empty = make(chan struct{})
	}
	empty := c.empty
	if c.open == 0 {
		close(c.empty)
		c.empty = nil
	}
	return empty
}

func (c *connections) opened() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open++
}

func (c *connections) closed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open--
	if c.open > 0 {
		return
	}
	select {
	case <-c.left: // by an earlier one
	default:
		close(c.left)
	}
	if c.empty != nil {
		close(c.empty)
		c.empty = nil
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
