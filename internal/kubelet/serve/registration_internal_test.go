package serve

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// An accountFunc returns the devices that a kubelet counts.
type accountFunc func() ([]string, error)

func (a accountFunc) Allocatable(context.Context) (map[string][]string, error) {
	ids, err := a()
	return map[string][]string{gpuName: ids}, err
}
func (accountFunc) Held(context.Context) ([]kubelet.HeldDevice, error) { return nil, nil }
func (accountFunc) Allocating() (ended func(bool))                     { return func(bool) {} }

// TestDisconnecting has a life hang up whose kubelet closes its connection some time after it was
// told to, if it did not by itself, and whose directory shows another incarnation some time after
// that.
func TestDisconnecting(t *testing.T) {
	const itself, soon = -1, 10 * time.Millisecond // itself: the connection is closed already
	tests := map[string]struct {
		cause           error
		closes, changes time.Duration
		counted         time.Duration // how long kubelet's account shows devices
		takes           time.Duration
	}{
		"kubelet ended":                                {errKubeletLeft, itself, soon, 0, 0},
		"kubelet made its socket again":                {errKubeletLeft, soon, soon, 0, deadCloseTimeout + soon + stopDelay},
		"kubelet ended the stream":                     {errStreamEnded, itself, time.Hour, 0, stopDelay},
		"kubelet ended the stream, and is another now": {errStreamEnded, itself, soon, time.Hour, soon},
		"kubelet is slow to mark the resource":         {errStreamEnded, itself, time.Hour, stopDelay + soon, 2 * stopDelay},
		"another server of the resource goes on":       {errStreamEnded, itself, time.Hour, time.Hour, stopTimeout},
		"our socket was removed":                       {errSocketRemoved, soon, time.Hour, 0, soon + stopDelay},
		"kubelet does not let go":                      {errSocketRemoved, time.Hour, time.Hour, 0, closeTimeout + stopDelay},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				incarnation := feed.New(uint64(1))
				if errors.Is(test.cause, errKubeletLeft) {
					incarnation.Publish(0)
				}
				until := time.Now().Add(test.counted)
				account := accountFunc(func() ([]string, error) {
					if time.Now().Before(until) {
						return []string{"GPU-0"}, nil
					}
					return nil, nil
				})
				l := muted(account, laterDirectory{})
				l.Incarnation = incarnation
				l.session = session{connections: newConnections(), closing: make(chan struct{})}
				connection, far := net.Pipe()
				defer func() { _ = far.Close() }()
				kubelets := &conn{Conn: connection, connections: l.connections}
				l.connections.add(kubelets)
				l.connections.noteCall(peer.NewContext(t.Context(), &peer.Peer{Addr: kubelets.RemoteAddr()}))
				if test.closes == itself {
					_ = kubelets.Close()
				}
				var closing sync.WaitGroup
				defer closing.Wait()
				closing.Go(func() {
					<-l.closing
					if test.closes != itself {
						time.Sleep(test.closes)
						_ = kubelets.Close()
					}
					time.Sleep(test.changes)
					incarnation.Publish(2)
				})
				began := time.Now()
				l.disconnect(t.Context(), grpc.NewServer(), 1, test.cause)
				if took := time.Since(began); took != test.takes {
					t.Errorf("disconnect() took %v, want %v", took, test.takes)
				}
			})
		})
	}
}

// TestWithoutAKubeletTheLastSocketIsClosed: a process that started earlier has to see that this one
// serves no more.
func TestWithoutAKubeletTheLastSocketIsClosed(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "l.sock")
	unix, err := statefile.Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	open := false
	l := &registration{Collaborators: Collaborators{Incarnation: feed.New(uint64(0))},
		previous: &previous{socket: &listener{UnixListener: unix}}}
	l.report = func(Phase) {
		client, err := net.Dial("unix", path)
		if open = err == nil; open {
			_ = client.Close()
		}
		cancel()
	}
	if _, there := l.awaitKubelet(ctx); there || open {
		t.Errorf("kubelet is there: %t; the socket is open: %t", there, open)
	}
}
