package draplugin

import (
	"context"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/peer"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
)

// TestConnections: a connection counts from its first byte to its end. A silent connection, such as
// another process's test, does not count as the kubelet's.
func TestConnections(t *testing.T) {
	t.Parallel()
	l := &life{Plugin: New(Options{}), kubelet: feed.New(registration{})}
	// kubelet has registered the driver, and left
	l.set(func(r *registration) { r.registered, r.disconnected = true, true })
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
	l.set(func(r *registration) { r.disconnected = true })
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
	if now, s := l.kubelet.Value(), l.Status().Value(); now.ok() || now.connected != 0 || s.Registered ||
		s.Problem != "the kubelet ended its connection" {
		t.Errorf("both ended: %+v, %+v", now, s)
	}
}

// listen listens at the socket of another program. Closing the listener keeps the file.
func listen(t *testing.T, path string) *net.UnixListener {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	return l
}

// TestForeignCounts: while another program's driver of the same name exists, the driver is not
// registered, and reports what to do, whatever the kubelet does with the socket until the socket is
// closed, and at the close.
func TestForeignCounts(t *testing.T) {
	t.Parallel()
	dir := loopback.Folder(t)
	foreign := listen(t, filepath.Join(dir, "gpu.nvidia.com-reg.sock"))
	defer func() { _ = foreign.Close() }()
	l := &life{Plugin: New(Options{}), kubelet: feed.New(registration{})}
	l.look(t.Context(), &folder{path: dir, driver: l.o.Driver})
	for what, change := range map[string]func(){
		"kubelet registered the driver": func() { l.set(func(r *registration) { r.registered, r.disconnected = true, false }) },
		"kubelet left":                  func() { l.set(func(r *registration) { r.disconnected = true }) },
		"the life ended":                func() { l.change(func(s *Status) { s.Problem = errForeign.Error() }) },
	} {
		change()
		if s := l.Status().Value(); s.Registered || !strings.HasSuffix(s.Problem,
			"gpu.nvidia.com-reg.sock; remove that driver from the node") {
			t.Errorf("%s: %+v", what, s)
		}
	}
}

// TestSocketOfKilledProgram: a killed program's socket does not count as a running driver's.
func TestSocketOfKilledProgram(t *testing.T) {
	t.Parallel()
	dir := loopback.Folder(t)
	for _, name := range []string{"gpu.nvidia.com-reg.sock", "gpu-device-plugin-dra-vvvvvvvvvvaa-1.sock"} {
		if err := listen(t, filepath.Join(dir, name)).Close(); err != nil {
			t.Fatal(err)
		}
	}
	ctx, end := context.WithCancel(t.Context())
	end()
	if found := (&folder{path: dir, driver: "gpu.nvidia.com"}).look(ctx); found.foreign != "" {
		t.Errorf("found %+v", found)
	}
}
