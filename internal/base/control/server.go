package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

const (
	// maxCalls is the maximum number of open connections. At the limit, the server closes the
	// oldest connection without a request. If all have a request, new connections wait in the
	// kernel's backlog.
	maxCalls = 64
	// callTimeout limits a call in the server, and requestTimeout the wait for its request.
	callTimeout    = 30 * time.Second
	requestTimeout = 5 * time.Second
	// maxStreams is the maximum number of followed calls, to leave capacity for other calls. The
	// server refuses more.
	maxStreams = 8
	// sendTimeout limits the time to send one value to a client of a followed call. A client that
	// stops reading is disconnected, a client that waits for a slow server is not; see client.
	sendTimeout = 30 * time.Second
	// farewellTimeout limits the time to answer a call after the end of the server or of the call's
	// time.
	farewellTimeout = time.Second
	// checkOften is the interval between the server's checks of the socket without inotify, and
	// checkRarely with inotify, which reports a removal. Each check wakes an idle process.
	checkOften  = 500 * time.Millisecond
	checkRarely = 10 * time.Second
)

// A Server answers calls at a socket.
type Server struct {
	socket          string
	handlers        map[string]Handler
	streams         map[string]Stream
	calls           sync.WaitGroup
	connectionSlots chan struct{} // holds one value for each open connection
	streamSlots     chan struct{} // holds one value for each followed call

	mu   sync.Mutex      // guards idle
	idle []*net.UnixConn // without a request so far, in the order of arrival

	sendTimeout time.Duration
}

// NewServer returns a server for the given handlers and streams, by name. It owns the maps.
func NewServer(socket string, handlers map[string]Handler, streams map[string]Stream) *Server {
	return &Server{
		socket: socket, handlers: handlers, streams: streams,
		connectionSlots: make(chan struct{}, maxCalls), streamSlots: make(chan struct{}, maxStreams),
		sendTimeout: sendTimeout,
	}
}

// Run answers calls until ctx ends, then removes the socket and returns nil. Run also returns nil
// after the removal of the socket; running calls are then still answered. Run replaces the socket
// of a dead daemon. It returns an error, and changes nothing, if another daemon answers at the
// socket or the file is not a socket.
func (s *Server) Run(ctx context.Context) error {
	listener, err := listen(ctx, s.socket)
	if err != nil {
		return err
	}
	own, err := os.Lstat(s.socket)
	if err != nil {
		return errors.Join(fmt.Errorf("find control socket: %w", err), listener.Close())
	}
	defer func() {
		if isThere(own, s.socket) {
			_ = os.Remove(s.socket)
		}
		if ctx.Err() != nil {
			s.calls.Wait()
		}
	}()
	life, end := context.WithCancel(ctx)
	defer end()
	context.AfterFunc(life, func() { _ = listener.Close() })
	go func() {
		defer end()
		awaitRemoval(life, own, s.socket)
	}()
	return s.accept(ctx, life, listener)
}

// awaitRemoval returns when the socket is no longer at path, or ctx ends.
func awaitRemoval(ctx context.Context, own fs.FileInfo, path string) {
	pace := checkRarely
	notices, err := fsnotify.NewWatcher()
	if err != nil {
		notices = &fsnotify.Watcher{} // nil channels: no notice ever comes
	} else {
		defer func() { _ = notices.Close() }()
		err = notices.Add(filepath.Dir(path))
	}
	if err != nil {
		pace = checkOften
	}
	for isThere(own, path) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(pace):
		case <-notices.Events:
		case err := <-notices.Errors:
			klog.FromContext(ctx).V(2).Info("Notices about the control socket were lost", "reason", err.Error())
		}
	}
}

// isThere reports whether path still is the server's own socket.
func isThere(own fs.FileInfo, path string) bool {
	now, err := os.Lstat(path)
	return err == nil && os.SameFile(own, now) && own.ModTime().Equal(now.ModTime()) // inode numbers are reused
}

// accept serves connections until life ends. Calls are answered with ctx.
func (s *Server) accept(ctx, life context.Context, listener *net.UnixListener) error {
	log := klog.FromContext(ctx)
	for failing := false; ; {
		conn, err := listener.AcceptUnix()
		if err == nil {
			failing = false
			if !s.enter(life, conn) {
				return conn.Close()
			}
			s.calls.Go(func() {
				defer func() { <-s.connectionSlots }()
				s.serve(ctx, conn)
			})
			continue
		}
		if life.Err() != nil {
			return nil
		}
		if !failing { // such as too many open files
			log.Info("Cannot accept control calls", "reason", err.Error())
		}
		failing = true
		select {
		case <-life.Done():
		case <-time.After(checkOften):
		}
	}
}

// enter waits for capacity for a connection. At the limit, it closes the oldest idle connection. It
// returns false if life ends first.
func (s *Server) enter(life context.Context, conn *net.UnixConn) bool {
	select {
	case s.connectionSlots <- struct{}{}:
	default:
		s.mu.Lock()
		if len(s.idle) > 0 {
			_ = s.idle[0].SetReadDeadline(time.Unix(1, 0)) // after a failure the connection is already closed
			s.idle = slices.Delete(s.idle, 0, 1)
		}
		s.mu.Unlock()
		select {
		case <-life.Done():
			return false
		case s.connectionSlots <- struct{}{}:
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = conn.SetReadDeadline(time.Now().Add(requestTimeout)) // after a failure the call's end counts
	s.idle = append(s.idle, conn)
	return true
}

// read reads the request of an idle connection. The connection is then no longer idle.
func (s *Server) read(conn *net.UnixConn) (r request, err error) {
	err = json.NewDecoder(io.LimitReader(client{conn}, maxRequest)).Decode(&r)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.idle = slices.DeleteFunc(s.idle, func(c *net.UnixConn) bool { return c == conn })
	return r, err
}

// listen listens at path for the user of this process only.
func listen(ctx context.Context, path string) (*net.UnixListener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("make folder of control socket: %w; choose another with --control-socket", err)
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err == nil {
		_ = conn.Close()
		return nil, fmt.Errorf("listen at control socket %s: another daemon answers there; choose another with "+
			"--control-socket", path)
	}
	switch info, lost := os.Lstat(path); {
	case errors.Is(lost, fs.ErrNotExist):
	case lost == nil && info.Mode().Type() != fs.ModeSocket:
		return nil, fmt.Errorf("listen at control socket %s: a file that is not a socket is there; remove it, or "+
			"choose another path with "+
			"--control-socket", path)
	case !errors.Is(err, syscall.ECONNREFUSED):
		return nil, fmt.Errorf("listen at control socket %s: %w; choose another with --control-socket", path, err)
	default: // the socket of a dead daemon
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("replace control socket: %w", err)
		}
	}
	listener, err := statefile.Listen(ctx, path)
	if err != nil {
		return nil, fmt.Errorf("make control socket: %w", err)
	}
	listener.SetUnlinkOnClose(false)
	return listener, nil
}

func (s *Server) serve(ctx context.Context, conn *net.UnixConn) {
	defer func() { _ = conn.Close() }()
	late, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	stop := context.AfterFunc(late, func() {
		_ = errors.Join(conn.SetReadDeadline(time.Unix(1, 0)), conn.SetWriteDeadline(time.Now().Add(farewellTimeout)))
	})
	log := klog.FromContext(ctx).V(2)

	r, err := s.read(conn)
	var a response
	switch {
	case errors.Is(err, io.EOF): // the client only checked whether the daemon runs
		return
	case err != nil && ctx.Err() != nil:
		a.Error = errStopping.Error()
	case err != nil:
		a.Error = fmt.Sprintf("read the request (limits: %d bytes, %s, %d connections at a time): %v",
			maxRequest, requestTimeout, maxCalls, err)
		log.Info("Cannot read control call", "reason", err.Error())
	case s.streams[r.Call] != nil:
		stop()
		err := s.stream(ctx, conn, r)
		log.Info("Followed control call ended", "call", r.Call)
		if err == nil || ctx.Err() != nil {
			return
		}
		a.Error = err.Error()
	default:
		result, err := s.answer(late, conn, r)
		if err == nil {
			a.Result, err = json.Marshal(result)
		}
		switch {
		case err == nil:
		case ctx.Err() != nil && errors.Is(err, context.Canceled):
			a.Error = errStopping.Error()
		default:
			a.Error = err.Error()
		}
		log.Info("Control call", "call", r.Call, "arguments", string(r.Arguments), "error", a.Error)
	}
	if err := json.NewEncoder(client{conn}).Encode(a); err != nil {
		log.Info("Cannot answer control call", "call", r.Call, "reason", err.Error())
	}
}

func (s *Server) answer(ctx context.Context, conn *net.UnixConn, r request) (any, error) {
	if err := allowed(conn); err != nil {
		return nil, err
	}
	handle, known := s.handlers[r.Call]
	if !known {
		names := slices.AppendSeq(slices.Collect(maps.Keys(s.handlers)), maps.Keys(s.streams))
		slices.Sort(names)
		return nil, fmt.Errorf("unknown call %q; this daemon knows %s", r.Call, strings.Join(names, ", "))
	}
	calling, end, err := s.begin(ctx, conn, r.Deadline)
	if err != nil {
		return nil, err
	}
	defer end()
	return handle(calling, r.Arguments)
}

// stream sends the values of a Stream to the client until the client has gone or ctx ends. It
// returns nil when the client has gone.
func (s *Server) stream(ctx context.Context, conn *net.UnixConn, r request) error {
	if err := allowed(conn); err != nil {
		return err
	}
	select {
	case s.streamSlots <- struct{}{}:
		defer func() { <-s.streamSlots }()
	default:
		return fmt.Errorf("%d clients follow this daemon, and more are not allowed; end one of them", maxStreams)
	}
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return fmt.Errorf("follow a call: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if r.Deadline.isOver() {
		return errLate
	}
	following, end, err := s.begin(ctx, conn, 0)
	if err != nil {
		return nil //nolint:nilerr // the client has gone
	}
	defer end()
	_ = conn.SetWriteDeadline(time.Now().Add(s.sendTimeout)) // after a failure the client's end counts
	values := json.NewEncoder(client{conn})
	if err := values.Encode(response{}); err != nil {
		return nil // the client has gone
	}
	gone := false
	err = s.streams[r.Call](following, r.Arguments, func(value any) error {
		encoded, err := json.Marshal(value)
		if err != nil {
			return fmt.Errorf("encode a value: %w", err)
		}
		_ = conn.SetWriteDeadline(time.Now().Add(s.sendTimeout)) // after a failure the client's end counts
		if following.Err() != nil {                              // the end may have set a deadline before
			return following.Err()
		}
		if err := values.Encode(response{Result: encoded}); err != nil {
			gone = true // or does not read; the rest of the value cannot be sent later
			return fmt.Errorf("send a value: %w", err)
		}
		return nil
	})
	if gone || following.Err() != nil {
		return nil
	}
	_ = conn.SetWriteDeadline(time.Now().Add(s.sendTimeout)) // the deadline of the last value may have passed
	return err
}

// allowed returns an error unless the caller is root or the daemon's own user. The mode of the
// socket has the same effect, but somebody may have changed the mode.
func allowed(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return fmt.Errorf("get the user of the caller: %w", err)
	}
	var peer *syscall.Ucred
	var peerErr error
	if err := raw.Control(func(fd uintptr) {
		peer, peerErr = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	}); err != nil {
		return fmt.Errorf("get the user of the caller: %w", err)
	}
	if peerErr != nil {
		return fmt.Errorf("get the user of the caller: %w", peerErr)
	}
	if peer.Uid != 0 && int(peer.Uid) != os.Geteuid() {
		return fmt.Errorf("user %d may not control the daemon; only root and user %d may", peer.Uid, os.Geteuid())
	}
	return nil
}
