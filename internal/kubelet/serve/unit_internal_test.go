package serve

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"google.golang.org/grpc/peer"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

// opened returns a connection that was accepted, and where gRPC says that a call came from it.
func opened(t *testing.T, c *connections) (*conn, context.Context) {
	t.Helper()
	near, far := net.Pipe()
	t.Cleanup(func() { _, _ = near.Close(), far.Close() })
	connection := &conn{Conn: near, connections: c}
	if !c.add(connection) {
		t.Fatal("the connection is refused")
	}
	return connection, peer.NewContext(t.Context(), &peer.Peer{Addr: connection.RemoteAddr()})
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// TestTheConnectionOfTheFirstCallIsKubelets: its end is the end of kubelet's connections, and that
// of others is not.
func TestTheConnectionOfTheFirstCallIsKubelets(t *testing.T) {
	t.Parallel()
	c := newConnections()
	c.noteCall(t.Context()) // nobody knows where it came from
	kubelets, call := opened(t, c)
	other, another := opened(t, c)
	if !isClosed(c.kubeletGone()) {
		t.Error("a kubelet that made no call has a connection")
	}
	c.noteCall(call)
	c.noteCall(another)
	_ = other.Close()
	if isClosed(c.kubeletClosed()) || isClosed(c.kubeletGone()) {
		t.Error("the end of another connection counts as that of kubelet's")
	}
	for range 2 {
		_ = kubelets.Close()
	}
	if !isClosed(c.kubeletClosed()) || !isClosed(c.kubeletGone()) {
		t.Error("the end of kubelet's connection is not seen")
	}

	c = newConnections()
	kubelets, call = opened(t, c)
	_ = kubelets.Close() // gRPC answers a call after its connection has ended
	c.noteCall(call)
	if !isClosed(c.kubeletClosed()) {
		t.Error("the end of kubelet's connection before its call is not seen")
	}
}

// TestConnectionsAreClosed: all but kubelet's, or all; and none is accepted afterwards.
func TestConnectionsAreClosed(t *testing.T) {
	t.Parallel()
	c := newConnections()
	kubelets, call := opened(t, c)
	other, _ := opened(t, c)
	c.noteCall(call)
	open := func(connection *conn) bool {
		return !errors.Is(connection.SetDeadline(time.Time{}), net.ErrClosed) && connection.SetDeadline(time.Time{}) == nil
	}
	c.close()
	if !open(kubelets) || open(other) {
		t.Errorf("open: kubelet's %v, another %v, want kubelet's alone", open(kubelets), open(other))
	}
	if c.add(&conn{connections: c}) {
		t.Error("a connection is accepted while they are closed")
	}
}

// TestAListenerThatFails: it is said once for each time that it begins, and gRPC tries again.
func TestAListenerThatFails(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "l.sock")
	unix, err := statefile.Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	said := 0
	l := &listener{UnixListener: unix, connections: newConnections(),
		logger: funcr.New(func(string, string) { said++ }, funcr.Options{})}
	l.failing = true // it failed before
	client, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	accepted, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer accepted.Close()
	l.release()
	for range 3 {
		if _, err := l.Accept(); err == nil {
			t.Error("it accepts although it is closed")
		}
	}
	if said != 1 {
		t.Errorf("it was said %d times", said)
	}
}
