package serve

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// A countingAccount is that of a kubelet that counts a device until some time.
type countingAccount struct {
	noCalls
	until time.Time
}

func (a countingAccount) Allocatable(context.Context) (map[string][]string, error) {
	if time.Now().Before(a.until) {
		return map[string][]string{"nvidia.com/gpu": {"GPU-0"}}, nil
	}
	return nil, nil
}

func (countingAccount) Held(context.Context) ([]kubelet.HeldDevice, error) { return nil, nil }

// TestDisconnecting has a life hang up whose kubelet closes its connection some time after it was
// told to, if it did not by itself, and whose directory shows another incarnation some time after
// that.
func TestDisconnecting(t *testing.T) {
	const (
		itself = -1 // the connection is closed already
		soon   = 10 * time.Millisecond
	)
	tests := map[string]struct {
		cause           error
		closes, changes time.Duration
		counted         time.Duration // how long kubelet's account shows devices
		takes           time.Duration
	}{
		"kubelet ended":                                {errKubeletLeft, itself, soon, 0, 0},
		"kubelet made its socket anew":                 {errKubeletLeft, soon, soon, 0, deadCloseTimeout + soon + stopDelay},
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
				account := countingAccount{until: time.Now().Add(test.counted)}
				l := &registration{Collaborators: Collaborators{Incarnation: incarnation, Accountant: account,
					Clock: clock.RealClock{}}, list: newList("nvidia.com/gpu"),
					session:  session{connections: newConnections(), closing: make(chan struct{})},
					previous: &previous{}}
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

// TestAKeptLife: its stream stays open without lists, until its successor has it end. Other
// processes see by its socket that this one goes on.
func TestAKeptLife(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		unix, err := statefile.Listen(t.Context(), filepath.Join(t.TempDir(), "l.sock"))
		if err != nil {
			t.Fatal(err)
		}
		l := &registration{list: newList(gpuName), previous: &previous{},
			session: session{connections: newConnections(), closing: make(chan struct{})}}
		ended := 0
		l.previous.stopKept = func() { ended++ }
		socket := &listener{UnixListener: unix, connections: l.connections}
		silent, _ := opened(t, l.connections)
		server, tasks, task := grpc.NewServer(), sync.WaitGroup{}, false
		tasks.Go(func() {
			<-l.closing
			time.Sleep(time.Millisecond)
			task = true
		})
		l.keepStream(socket, server, &tasks)
		if _, err := socket.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("its server accepts connections: %v", err)
		}
		if may, _ := l.maySend(); may || l.mute.Value() != muteReplaced {
			t.Error("it sends lists beside its successor")
		}
		if ended != 0 || l.previous.socket != socket {
			t.Errorf("the life before ended %d times; the socket is kept: %v", ended, l.previous.socket == socket)
		}
		if client, err := net.Dial("unix", unix.Addr().String()); err != nil {
			t.Error(err)
		} else {
			_ = client.Close()
		}
		select {
		case <-l.closing:
			t.Error("its stream ended at once")
		default:
		}
		l.previous.endKept()
		l.previous.endKept() // nothing is left to end
		if err := server.Serve(unix); !errors.Is(err, grpc.ErrServerStopped) || !task || ended != 1 ||
			silent.SetDeadline(time.Time{}) == nil {
			t.Errorf("its server serves: %v, its tasks have ended: %v; the life before ended %d times, want once", err, task,
				ended)
		}
		select {
		case <-l.closing:
		default:
			t.Error("its stream does not end")
		}
	})
}

// TestWhyALifeEnds, as far as the directory and the list tell.
func TestWhyALifeEnds(t *testing.T) {
	const s = time.Second
	for name, tt := range map[string]struct {
		happens func(l *registration, d *sharedDirectory, socket string) // after a second
		next    func(l *registration, d *sharedDirectory, socket string) // after two
		want    error
		after   time.Duration
		signals bool // the socket of another server came or went
	}{
		"nothing": {want: context.DeadlineExceeded, after: 10 * s},
		"another kubelet": {happens: func(l *registration, _ *sharedDirectory, _ string) { l.Incarnation.Publish(2) },
			want: errKubeletLeft, after: s},
		"the same kubelet": {happens: func(l *registration, _ *sharedDirectory, _ string) { l.Incarnation.Publish(1) },
			want: context.DeadlineExceeded, after: 10 * s},
		"its socket is removed": {happens: func(l *registration, _ *sharedDirectory, socket string) {
			_ = os.Remove(socket)
			l.Sockets.Publish(nil)
		}, want: errSocketRemoved, after: s},
		"other options": {happens: func(l *registration, _ *sharedDirectory, _ string) {
			l.list.publish(listOf(oneGPU()), Options{Inspect: true})
		}, want: errOptions, after: s},
		"another list": {happens: func(l *registration, _ *sharedDirectory, _ string) {
			l.list.publish(listOf(oneGPU()), Options{})
		}, want: context.DeadlineExceeded, after: 10 * s},
		"another program": {happens: func(l *registration, d *sharedDirectory, _ string) {
			d.beside(kubelet.Socket{Name: "another.sock"})
			l.Sockets.Publish(nil)
		}, want: context.DeadlineExceeded, after: 10 * s, signals: true},
		"another program, of which this is not the first notice": {happens: func(l *registration, d *sharedDirectory,
			_ string) {
			d.beside(kubelet.Socket{Name: "another.sock"})
			l.Sockets.Publish(nil)
		}, next: func(l *registration, _ *sharedDirectory, _ string) {
			<-l.siblingChanged
			l.Sockets.Publish(nil)
		}, want: context.DeadlineExceeded, after: 10 * s},
		"the end of a later process": {happens: func(l *registration, d *sharedDirectory, _ string) {
			d.come("later.sock")
			l.Sockets.Publish(nil)
		}, want: errOtherEnded, after: s + stopDelay},
		"a list that must not be sent": {happens: func(l *registration, _ *sharedDirectory, _ string) {
			l.mute.Publish(muteLaterProcess)
		}, want: errOtherEnded, after: s + stopDelay},
		"the end of an earlier process": {happens: func(l *registration, _ *sharedDirectory,
			_ string) {
			l.reregisterPromised.Publish(true)
		},
			want: errEarlierLeft, after: s + leftFor},
		"that of one which is there still": {happens: func(l *registration, d *sharedDirectory, _ string) {
			d.behind("earlier.sock")
			l.reregisterPromised.Publish(true)
		}, next: func(l *registration, d *sharedDirectory, _ string) {
			d.behind()
			l.Sockets.Publish(nil)
		}, want: errEarlierLeft, after: 2*s + leftFor, signals: true},
		"that of one while another program serves": {happens: func(l *registration, _ *sharedDirectory, _ string) {
			l.mute.Publish(muteOtherPlugin)
			l.reregisterPromised.Publish(true)
		}, want: context.DeadlineExceeded, after: 10 * s},
		"another program serves since": {happens: func(l *registration, _ *sharedDirectory,
			_ string) {
			l.reregisterPromised.Publish(true)
		},
			next: func(l *registration, _ *sharedDirectory, _ string) { l.mute.Publish(muteOtherPlugin) },
			want: context.DeadlineExceeded, after: 10 * s},
	} {
		t.Run(name, func(t *testing.T) {
			socket := filepath.Join(t.TempDir(), "e.sock")
			if err := os.WriteFile(socket, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 10*s)
				defer cancel()
				d := &sharedDirectory{}
				l := sentList(d, emptyAccount{})
				if tt.happens != nil {
					defer time.AfterFunc(s, func() { tt.happens(l, d, socket) }).Stop()
				}
				if tt.next != nil {
					defer time.AfterFunc(2*s-time.Millisecond, func() { tt.next(l, d, socket) }).Stop()
				}
				began := time.Now()
				err := l.follow(ctx, socket, 1, false)
				took := time.Since(began)
				if tt.next != nil && errors.Is(err, errEarlierLeft) {
					took += time.Millisecond
				}
				if !errors.Is(err, tt.want) || took != tt.after {
					t.Errorf("it ends after %v: %v; want %v: %v", took, err, tt.after, tt.want)
				}
				if signals := len(l.siblingChanged) > 0; signals != tt.signals {
					t.Errorf("a change of sockets is signalled: %v, want %v", signals, tt.signals)
				}
			})
		})
	}
}
