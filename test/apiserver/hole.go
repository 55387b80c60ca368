package apiserver

import (
	"io"
	"log" //nolint:depguard // the only logger that net/http takes
	"net"
	"sync"
)

// discard keeps net/http from writing errors of handshakes to standard error.
var discard = log.New(io.Discard, "", 0)

// hole is what keeps every byte from passing while it is open. Bytes that came meanwhile pass when
// it closes, as TCP sends them again.
type hole struct {
	mu     sync.Mutex
	closed chan struct{} // closed: bytes pass
}

func newHole() *hole {
	h := &hole{closed: make(chan struct{})}
	close(h.closed)
	return h
}

func (h *hole) open() {
	h.mu.Lock()
	defer h.mu.Unlock()
	select {
	case <-h.closed:
		h.closed = make(chan struct{})
	default:
	}
}

func (h *hole) release() {
	h.mu.Lock()
	defer h.mu.Unlock()
	select {
	case <-h.closed:
	default:
		close(h.closed)
	}
}

type holeConn struct {
	net.Conn
	hole    *hole
	once    sync.Once
	gone    chan struct{} // closed by Close
	stopped <-chan struct{}
}

// wait returns when bytes pass. It fails when the connection is closed or the server stopped.
func (c *holeConn) wait() error {
	c.hole.mu.Lock()
	closed := c.hole.closed
	c.hole.mu.Unlock()
	select {
	case <-closed:
	case <-c.gone:
	case <-c.stopped:
	}
	select {
	case <-c.stopped:
		return net.ErrClosed
	default:
		return nil
	}
}

// holeListener accepts connections whose bytes go through the hole.
type holeListener struct {
	net.Listener
	hole    *hole
	stopped <-chan struct{} // closed when the server is stopped
}

func (l holeListener) Accept() (net.Conn, error) {
	connection, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &holeConn{Conn: connection, hole: l.hole, gone: make(chan struct{}), stopped: l.stopped}, nil
}

func (c *holeConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if stopped := c.wait(); stopped != nil {
		return 0, stopped
	}
	return n, err
}

func (c *holeConn) Write(b []byte) (int, error) {
	if err := c.wait(); err != nil {
		return 0, err
	}
	return c.Conn.Write(b)
}

func (c *holeConn) Close() error {
	c.once.Do(func() { close(c.gone) })
	return c.Conn.Close()
}
