package apiserver

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// A memoryListener accepts connections that go through the memory of this process.
type memoryListener struct {
	connections chan net.Conn
	once        sync.Once
	closed      chan struct{}
}

func newMemoryListener() *memoryListener {
	return &memoryListener{connections: make(chan net.Conn), closed: make(chan struct{})}
}

// dial connects to the listener.
func (l *memoryListener) dial(ctx context.Context) (net.Conn, error) {
	up, down := newPipe(), newPipe()
	select {
	case l.connections <- &memoryConn{in: up, out: down}:
		return &memoryConn{in: down, out: up}, nil
	case <-l.closed:
		return nil, syscall.ECONNREFUSED
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *memoryListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.connections:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *memoryListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (*memoryListener) Addr() net.Addr { return &net.TCPAddr{} }

// A pipe is one direction of a connection. A write never waits.
type pipe struct {
	mu       sync.Mutex // guards all following fields
	changed  *sync.Cond
	bytes    bytes.Buffer
	closed   error // why nothing is written any more; nil while it is
	deadline time.Time
	timer    *time.Timer // wakes the reader at the deadline
}

func newPipe() *pipe {
	p := &pipe{timer: time.NewTimer(0)}
	p.changed = sync.NewCond(&p.mu)
	return p
}

func (p *pipe) read(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		switch {
		case !p.deadline.IsZero() && !time.Now().Before(p.deadline):
			return 0, os.ErrDeadlineExceeded
		case p.bytes.Len() > 0:
			return p.bytes.Read(b)
		case p.closed != nil:
			return 0, p.closed
		}
		p.changed.Wait()
	}
}

func (p *pipe) write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed != nil {
		return 0, io.ErrClosedPipe
	}
	p.changed.Broadcast()
	return p.bytes.Write(b)
}

func (p *pipe) close(why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = why
	p.changed.Broadcast()
}

func (p *pipe) setDeadline(t time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.timer.Stop()
	switch p.deadline = t; {
	case t.IsZero():
	case time.Now().Before(t):
		p.timer = time.AfterFunc(time.Until(t), p.changed.Broadcast)
	default: // the race detector of Go 1.26 once crashed in a timer of the past in a bubble
		p.changed.Broadcast()
	}
}

// A memoryConn is one end of a connection.
type memoryConn struct{ in, out *pipe }

func (c *memoryConn) Read(b []byte) (int, error)  { return c.in.read(b) }
func (c *memoryConn) Write(b []byte) (int, error) { return c.out.write(b) }

func (c *memoryConn) Close() error {
	c.out.close(io.EOF)
	c.in.close(net.ErrClosed)
	return nil
}

func (*memoryConn) LocalAddr() net.Addr  { return &net.TCPAddr{} }
func (*memoryConn) RemoteAddr() net.Addr { return &net.TCPAddr{} }

func (c *memoryConn) SetReadDeadline(t time.Time) error { c.in.setDeadline(t); return nil }
func (*memoryConn) SetWriteDeadline(time.Time) error    { return nil } // no write waits
func (c *memoryConn) SetDeadline(t time.Time) error     { return c.SetReadDeadline(t) }
