package telemetry

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

// A limitedListener limits the open connections. At the limit it closes the oldest connection of
// the client with the most connections, so that no client takes the connections of Prometheus or
// the kubelet.
type limitedListener struct {
	net.Listener
	most int
	log  klog.Logger

	mu   sync.Mutex // guards open
	open []*conn    // oldest first
}

// A conn is a connection of a listener.
type conn struct {
	net.Conn
	client netip.Addr
	closed func(*conn)
}

// acceptPause is the pause after a failure to accept a connection, for example for lack of file
// descriptors.
const acceptPause = 500 * time.Millisecond

// Accept implements net.Listener. It returns an error only after the listener was closed, because
// net/http logs every other error.
func (l *limitedListener) Accept() (net.Conn, error) {
	accepted, err := l.Listener.Accept()
	for logged := false; err != nil; accepted, err = l.Listener.Accept() {
		if errors.Is(err, net.ErrClosed) {
			return nil, err
		}
		if !logged {
			l.log.Info("Cannot accept connections for metrics and probes", "reason", err.Error())
			logged = true
		}
		<-time.After(acceptPause)
	}
	c := &conn{Conn: accepted, closed: l.remove}
	if from, ok := accepted.RemoteAddr().(*net.TCPAddr); ok {
		c.client = from.AddrPort().Addr().Unmap()
	}
	if excess := l.add(c); excess != nil {
		_ = excess.Close() // an error has no consequence
	}
	return c, nil
}

// add registers a connection, and returns a connection to close if there are too many.
func (l *limitedListener) add(c *conn) (excess *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open = append(l.open, c)
	if len(l.open) <= l.most {
		return nil
	}
	count := map[netip.Addr]int{}
	for _, o := range l.open {
		count[o.client]++
	}
	for _, o := range l.open { // a client's first connection is the oldest
		if excess == nil || count[o.client] > count[excess.client] {
			excess = o
		}
	}
	return excess
}

func (l *limitedListener) remove(c *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open = slices.DeleteFunc(l.open, func(o *conn) bool { return o == c })
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.closed(c)
	return c.Conn.Close()
}
