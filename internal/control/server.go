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
)

// A Server answers calls at a socket.
type Server struct {
	socket   string
	handlers map[string]Handler
}

// NewServer returns a server for the given calls, by name. It takes over the map.
func NewServer(socket string, handlers map[string]Handler) *Server {
	return &Server{socket: socket, handlers: handlers}
}

// Run answers calls until ctx ends, then removes the socket and returns nil. A socket at which another daemon answers is
// an error, and is left alone; one that a dead daemon left behind is replaced.
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
		if now, err := os.Lstat(s.socket); err == nil && os.SameFile(own, now) {
			_ = os.Remove(s.socket)
		}
	}()
	var calls sync.WaitGroup
	defer calls.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	context.AfterFunc(ctx, func() { _ = listener.Close() })
	for {
		conn, err := listener.AcceptUnix()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept at control socket: %w", err)
		}
		calls.Go(func() { s.serve(ctx, conn) })
	}
}

// listen listens at path, for this user alone.
func listen(ctx context.Context, path string) (*net.UnixListener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("make folder of control socket: %w; choose another with --control-socket", err)
	}
	if conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path); err == nil {
		_ = conn.Close()
		return nil, fmt.Errorf("listen at control socket %s: another daemon answers there; choose another with --control-socket", path)
	}
	// The socket is made under a name of its own and then takes the place of what a dead daemon left.
	// Its path is no longer, since the path of a socket has its limit.
	fresh := filepath.Join(filepath.Dir(path), fmt.Sprintf(".%d", os.Getpid()))
	if err := os.Remove(fresh); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("make control socket: %w", err)
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: fresh, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("make control socket: %w", err)
	}
	listener.SetUnlinkOnClose(false)
	if err := errors.Join(os.Chmod(fresh, 0o600), os.Rename(fresh, path)); err != nil {
		return nil, errors.Join(fmt.Errorf("make control socket: %w", err), listener.Close(), os.Remove(fresh))
	}
	return listener, nil
}

func (s *Server) serve(ctx context.Context, conn *net.UnixConn) {
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()

	var r request
	if err := json.NewDecoder(io.LimitReader(conn, maxMessage)).Decode(&r); err != nil {
		if !errors.Is(err, io.EOF) { // somebody only looked whether we are here
			klog.FromContext(ctx).V(2).Info("Control call cannot be read", "reason", err.Error())
		}
		return
	}
	var a answer
	result, err := s.answer(ctx, conn, r)
	if err == nil {
		a.Result, err = json.Marshal(result)
	}
	if err != nil {
		a.Error = err.Error()
	}
	klog.FromContext(ctx).V(2).Info("Control call", "call", r.Call, "arguments", string(r.Arguments), "error", a.Error)
	if err := json.NewEncoder(conn).Encode(a); err != nil {
		klog.FromContext(ctx).V(2).Info("Control call cannot be answered", "call", r.Call, "reason", err.Error())
	}
}

func (s *Server) answer(ctx context.Context, conn *net.UnixConn, r request) (any, error) {
	if err := allowed(conn); err != nil {
		return nil, err
	}
	handle, known := s.handlers[r.Call]
	if !known {
		return nil, fmt.Errorf("this daemon does not know the call %q; it knows %s", r.Call,
			strings.Join(slices.Sorted(maps.Keys(s.handlers)), ", "))
	}
	return handle(ctx, r.Arguments)
}

// allowed lets in root and the user that the daemon runs as. The socket's mode says the same; this holds also where
// somebody changed it.
func allowed(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return fmt.Errorf("tell who calls: %w", err)
	}
	var peer *syscall.Ucred
	var peerErr error
	if err := raw.Control(func(fd uintptr) {
		peer, peerErr = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	}); err != nil {
		return fmt.Errorf("tell who calls: %w", err)
	}
	if peerErr != nil {
		return fmt.Errorf("tell who calls: %w", peerErr)
	}
	if peer.Uid != 0 && int(peer.Uid) != os.Geteuid() {
		return fmt.Errorf("user %d may not control the daemon: only root and user %d may", peer.Uid, os.Geteuid())
	}
	return nil
}
