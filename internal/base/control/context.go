package control

import (
	"context"
	"errors"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

var (
	errLate = errors.New("the deadline of the caller has passed: nothing was begun")
	errGone = errors.New("the caller has gone: nothing was begun")
	// errStopping is the answer to a call that the end of the server cut off. A change may have begun.
	errStopping = errors.New("the daemon is stopping and did not complete the call; run the command again when the " +
		"daemon runs again")
)

// An instant is a time of the node's monotonic clock, in nanoseconds. All processes on the node
// share the clock, and nobody can set it. 0 means never.
type instant int64

// now returns the time of the node.
func now() instant {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // every Linux has the clock
	return instant(t.Nano())
}

// isOver reports whether the instant has passed.
func (i instant) isOver() bool { return i != 0 && now() > i }

// A callContext is the context of a call. The context ends with the server, at the call's deadline,
// and when the client closes the connection. Err also checks the client and the clock directly:
// after a stop (SIGSTOP, a frozen cgroup) the process reads waiting data from the socket before
// timers and notices fire. A handler therefore calls Err right before each change.
type callContext struct {
	context.Context //nolint:containedctx // callContext implements Context
	end             context.CancelFunc
	deadline        instant
	conn            syscall.RawConn
}

// Err implements context.Context.
func (c *callContext) Err() error {
	if c.Context.Err() == nil && (c.deadline.isOver() || hasGone(c.conn)) {
		c.end()
	}
	return c.Context.Err()
}

// begin returns the context of a call. With a deadline, the call must start before the deadline.
// The error says that the deadline has passed or the client has gone. The caller must call end at
// the end of the call.
func (s *Server) begin(ctx context.Context, conn *net.UnixConn, deadline instant) (_ context.Context, end func(),
	err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, nil, err
	}
	switch {
	case deadline.isOver():
		return nil, nil, errLate
	case hasGone(raw):
		return nil, nil, errGone
	}
	var callCtx context.Context
	var cancel context.CancelFunc
	if deadline == 0 {
		callCtx, cancel = context.WithCancel(ctx)
	} else {
		callCtx, cancel = context.WithTimeout(ctx, time.Duration(deadline-now()))
	}
	// Removes the deadline of the request; the end of the call closes the connection.
	_ = conn.SetReadDeadline(time.Time{})
	s.calls.Go(func() {
		defer cancel()
		// The runtime repeats the check after each event of the connection, even before unread
		// bytes.
		_ = raw.Read(func(uintptr) bool { return callCtx.Err() != nil || hasGone(raw) })
	})
	return &callContext{callCtx, cancel, deadline, raw}, cancel, nil
}

// hasGone reports whether the other end of a connection is closed. A client that only stops sending
// has not gone.
func hasGone(conn syscall.RawConn) (gone bool) {
	err := conn.Control(func(fd uintptr) {
		poll := []unix.PollFd{{Fd: int32(fd)}}
		n, err := unix.Poll(poll, 0)
		gone = err == nil && n > 0 && poll[0].Revents&(unix.POLLHUP|unix.POLLERR) != 0
	})
	return gone || err != nil
}
