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

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/files"
)

const (
	// maxCalls is how many connections are served at a time. Others wait until the kernel's backlog is full.
	maxCalls = 64
	// callTimeout bounds one call as the server sees it, requestTimeout how long its request may take to come.
	callTimeout    = 30 * time.Second
	requestTimeout = 5 * time.Second
	// farewellTimeout bounds the answer to a call that ended because the server or the call's time does.
	farewellTimeout = time.Second
	// lookEvery is how often the socket is looked for: it may have been removed.
	lookEvery = 500 * time.Millisecond
)

// A Server answers calls at a socket.
type Server struct {
	socket   string
	handlers map[string]Handler
	calls    sync.WaitGroup
	room     chan struct{} // holds one value for each connection that is served
}

// NewServer returns a server for the given calls, by name. It takes over the map.
func NewServer(socket string, handlers map[string]Handler) *Server {
	return &Server{socket: socket, handlers: handlers, room: make(chan struct{}, maxCalls)}
}

// Run answers calls until ctx ends, then removes the socket and returns nil. It also returns nil when the socket was removed;
// calls that are under way are answered then. A socket at which another daemon answers, and anything that is no socket, is an
// error, and is left alone; a socket that a dead daemon left behind is replaced.
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
		for isThere(own, s.socket) && pause(life) {
		}
	}()
	return s.accept(ctx, life, listener)
}

// pause waits until it is time to look again. It returns false if ctx ends before.
func pause(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(lookEvery):
		return true
	}
}

// isThere reports whether a socket is at path still.
func isThere(own fs.FileInfo, path string) bool {
	now, err := os.Lstat(path)
	return err == nil && os.SameFile(own, now) && own.ModTime().Equal(now.ModTime()) // numbers of files are used again
}

// accept serves connections until life ends. Calls are answered with ctx.
func (s *Server) accept(ctx, life context.Context, listener *net.UnixListener) error {
	log := klog.FromContext(ctx)
	for failing := false; ; {
		select {
		case <-life.Done():
			return nil
		case s.room <- struct{}{}:
		}
		conn, err := listener.AcceptUnix()
		if err == nil {
			failing = false
			s.calls.Go(func() {
				defer func() { <-s.room }()
				s.serve(ctx, conn)
			})
			continue
		}
		<-s.room
		if !failing && life.Err() == nil { // such as too many open files
			log.Info("Cannot accept control calls", "reason", err.Error())
		}
		failing = true
		if !pause(life) {
			return nil
		}
	}
}

// listen listens at path, for this user alone.
func listen(ctx context.Context, path string) (*net.UnixListener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("make folder of control socket: %w; choose another with --control-socket", err)
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err == nil {
		_ = conn.Close()
		return nil, fmt.Errorf("listen at control socket %s: another daemon answers there; choose another with --control-socket", path)
	}
	switch info, lost := os.Lstat(path); {
	case errors.Is(lost, fs.ErrNotExist):
	case lost == nil && info.Mode().Type() != fs.ModeSocket:
		return nil, fmt.Errorf("listen at control socket %s: a file that is not a socket is there; remove it, or choose another path with "+
			"--control-socket", path)
	case !errors.Is(err, syscall.ECONNREFUSED):
		return nil, fmt.Errorf("listen at control socket %s: %w; choose another with --control-socket", path, err)
	default: // of a daemon that has ended
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("replace control socket: %w", err)
		}
	}
	listener, err := files.Listen(ctx, path)
	if err != nil {
		return nil, fmt.Errorf("make control socket: %w", err)
	}
	listener.SetUnlinkOnClose(false)
	return listener, nil
}

func (s *Server) serve(ctx context.Context, conn *net.UnixConn) {
	defer func() { _ = conn.Close() }()
	_ = conn.SetReadDeadline(time.Now().Add(requestTimeout)) // where that fails, the call's end counts
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() {
		_ = errors.Join(conn.SetReadDeadline(time.Unix(1, 0)), conn.SetWriteDeadline(time.Now().Add(farewellTimeout)))
	})
	defer stop()
	log := klog.FromContext(ctx).V(2)

	var r request
	var a answer
	switch err := json.NewDecoder(io.LimitReader(conn, maxRequest)).Decode(&r); {
	case errors.Is(err, io.EOF): // it was only to see whether we are here
		return
	case err != nil:
		a.Error = fmt.Sprintf("read the request (limits: %d bytes, %s): %v", maxRequest, requestTimeout, err)
		log.Info("Cannot read control call", "reason", err.Error())
	default:
		result, err := s.answer(ctx, conn, r)
		if err == nil {
			a.Result, err = json.Marshal(result)
		}
		if err != nil {
			a.Error = err.Error()
		}
		log.Info("Control call", "call", r.Call, "arguments", string(r.Arguments), "error", a.Error)
	}
	if err := json.NewEncoder(conn).Encode(a); err != nil {
		log.Info("Cannot answer control call", "call", r.Call, "reason", err.Error())
	}
}

func (s *Server) answer(ctx context.Context, conn *net.UnixConn, r request) (any, error) {
	if err := allowed(conn); err != nil {
		return nil, err
	}
	handle, known := s.handlers[r.Call]
	if !known {
		return nil, fmt.Errorf("unknown call %q; this daemon knows %s", r.Call,
			strings.Join(slices.Sorted(maps.Keys(s.handlers)), ", "))
	}
	return handle(ctx, r.Arguments)
}

// allowed lets in root and the user that the daemon runs as. The socket's mode says the same; this holds also where
// somebody changed it.
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
