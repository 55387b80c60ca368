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

// A limitedListener bounds the connections that are open at a time. When there are too many, it
// closes the oldest one of the client that has most of them: a client that opens many connections
// takes none from Prometheus and kubelet.
type limitedListener struct {
	net.Listener
	most int
	log  klog.Logger

	mu   sync.Mutex // guards open
	open []*conn    // in the order in which they came
}

// A conn is a connection of a listener.
type conn struct {
	net.Conn
	client netip.Addr
	closed func(*conn)
}

// acceptAgain is how long after a connection could not be accepted, as without descriptors, the
// next try is.
const acceptAgain = 500 * time.Millisecond

// Accept implements net.Listener. It returns an error only when the listener was closed; net/http
// would log each other one.
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
		<-time.After(acceptAgain)
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

// add notes a connection, and returns one to close if there are too many.
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
	for _, o := range l.open { // the first one of a client is its oldest
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
