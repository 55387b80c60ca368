package apiserver

import (
	"io"
	"log" //nolint:depguard // the only logger that net/http takes
	"net"
	"sync"
)

// discard keeps net/http from writing errors of handshakes to standard error.
var discard = log.New(io.Discard, "", 0)

// hole is what keeps every byte from passing while it is open. Bytes that came meanwhile pass when it closes, as TCP sends
// them again.
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

// wait returns when bytes pass or the connection has been closed.
func (h *hole) wait(gone <-chan struct{}) {
	h.mu.Lock()
	closed := h.closed
	h.mu.Unlock()
	select {
	case <-closed:
	case <-gone:
	}
}

// holeListener accepts connections whose bytes go through the hole.
type holeListener struct {
	net.Listener
	hole *hole
}

func (l holeListener) Accept() (net.Conn, error) {
	connection, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &holeConn{Conn: connection, hole: l.hole, gone: make(chan struct{})}, nil
}

type holeConn struct {
	net.Conn
	hole *hole
	once sync.Once
	gone chan struct{} // closed by Close
}

func (c *holeConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.hole.wait(c.gone)
	return n, err
}

func (c *holeConn) Write(b []byte) (int, error) {
	c.hole.wait(c.gone)
	return c.Conn.Write(b)
}

func (c *holeConn) Close() error {
	c.once.Do(func() { close(c.gone) })
	return c.Conn.Close()
}
