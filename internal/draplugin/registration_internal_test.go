package draplugin

import (
	"io"
	"net"
	"testing"

	"google.golang.org/grpc/peer"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
)

// TestConnections: a connection counts from its first byte to its end. One that says nothing, as of another process that sees whether this
// one is there, is not taken for kubelet's.
func TestConnections(t *testing.T) {
	t.Parallel()
	l := &life{Plugin: New(Options{}), kubelet: feed.New(registration{})}
	l.set(func(r *registration) { r.done, r.left = true, true }) // kubelet has registered the driver, and left
	open := func(says string) *conn {
		ours, theirs := net.Pipe()
		c := &conn{Conn: ours, life: l}
		go func() {
			_, _ = io.WriteString(theirs, says)
			_ = theirs.Close()
		}()
		_, _ = c.Read(make([]byte, 10))
		return c
	}
	closing := func(c *conn) {
		t.Helper()
		for range 2 {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	_, changed := l.kubelet.Latest()
	closing(open(""))
	select {
	case <-changed:
		t.Errorf("a connection that says nothing: %+v", l.kubelet.Value())
	default:
	}
	registers, r := open("PRI"), &registrar{life: l}
	for range 2 {
		if _, err := r.GetInfo(peer.NewContext(t.Context(), &peer.Peer{Addr: registers.RemoteAddr()}), nil); err != nil {
			t.Error(err)
		}
	}
	closing(registers)
	if now := l.kubelet.Value(); !now.ok() || now.connected != 0 {
		t.Errorf("the connection for the registration ended: %+v", now)
	}
	l.set(func(r *registration) { r.left = true })
	first := open("P")
	if s := l.Status().Value(); !s.Registered || s.Problem != "" {
		t.Errorf("kubelet is there again: %+v", s)
	}
	second := open("PRI")
	if now := l.kubelet.Value(); !now.ok() || now.connected != 2 {
		t.Errorf("two connections: %+v", now)
	}
	closing(first)
	if now := l.kubelet.Value(); !now.ok() || now.connected != 1 {
		t.Errorf("one of two ended: %+v", now)
	}
	closing(second)
	if now, s := l.kubelet.Value(), l.Status().Value(); now.ok() || now.connected != 0 || s.Registered || s.Problem != "kubelet ended its connection" {
		t.Errorf("both ended: %+v, %+v", now, s)
	}
}
