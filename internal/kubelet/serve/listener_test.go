package serve_test

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// silent opens a connection to each of the node's plugin sockets that says nothing until the test
// ends.
func (n *node) silent(t *testing.T) []net.Conn {
	t.Helper()
	var open []net.Conn
	for _, name := range n.sockets(t) {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "unix", filepath.Join(n.dir, name))
		check(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		open = append(open, conn)
	}
	return open
}

// gRPC itself waits for two minutes for a connection that says nothing, also when a server stops.
const beforeGRPC = 100 * time.Second

func TestASilentConnectionHoldsNothingUp(t *testing.T) {
	t.Parallel()
	ends := map[string]func(t *testing.T, n *node, d *daemon){
		"the daemon stops": func(_ *testing.T, _ *node, d *daemon) { d.stop() },
		"kubelet restarts": func(t *testing.T, n *node, _ *daemon) {
			mark := n.Mark()
			check(t, n.Restart())
			n.await(t, "registered again", func() bool { return n.listedAnew(mark) })
		},
		"kubelet drops streams": func(t *testing.T, n *node, _ *daemon) {
			mark := n.Mark()
			n.DropStream(gpu)
			n.await(t, "registered again", func() bool { return n.listedAnew(mark) })
		},
	}
	for name, end := range ends {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bothVersions(t, func(t *testing.T, v standin.Version) {
				n, d := serving(t, v, clock.RealClock{}, 2)
				n.silent(t)
				began := time.Now()
				end(t, n, d)
				if took := time.Since(began); took > beforeGRPC {
					t.Errorf("it took %v", took)
				}
			})
		})
	}
}

func TestASilentConnectionIsClosedAfterASecond(t *testing.T) {
	t.Parallel()
	n, _ := serving(t, standin.V137, clock.RealClock{}, 2)
	for _, conn := range n.silent(t) {
		check(t, conn.SetReadDeadline(time.Now().Add(beforeGRPC)))
		if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("it is still open")
		}
	}
}

// The wait is for kubelet to close its connection, and for no other connection.
func TestNoTimeIsSpentOnTheConnectionsOfOthers(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		c := clocktesting.NewFakeClock(time.Now())
		n := newNode(t)
		n.startKubelet(t, v)
		d := n.startDaemonWith(t, c, &liar{err: errors.New("not here")})
		d.offer(2)
		n.awaitAllocatable(t, 2)
		n.silent(t)
		mark, began := n.Mark(), c.Now()
		n.DropStream(gpu)
		poll.Until(t, "registered again", func() bool {
			if c.Since(began) < 200*time.Millisecond { // of which the pause after kubelet has closed its connection takes 50
				c.Step(time.Millisecond)
			}
			return n.listedAnew(mark)
		})
	})
}
