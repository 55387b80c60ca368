package control

import (
	"errors"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// A client is a connection of the server to a client. A deadline limits only the wait for the
// client. Without this type, a deadline also cuts off a client that is on time: the net package
// neither reads nor writes after the deadline, even if the server itself was late because it had no
// CPU or was stopped.
type client struct{ conn *net.UnixConn }

// Read implements io.Reader. After the deadline it reads only bytes that have already arrived.
func (c client) Read(p []byte) (int, error) {
	n, err := c.conn.Read(p)
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		return n, err
	}
	switch n, readErr := c.atOnce(p, unix.Read); {
	case readErr != nil:
		return 0, err
	case n == 0:
		return 0, io.EOF
	default:
		return n, nil
	}
}

// Write implements io.Writer. After the deadline it writes only bytes that fit into the socket.
func (c client) Write(p []byte) (int, error) {
	n, err := c.conn.Write(p)
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		return n, err
	}
	for n < len(p) {
		more, writeErr := c.atOnce(p[n:], unix.Write)
		if writeErr != nil {
			return n, err
		}
		n += more
	}
	return n, nil
}

// atOnce reads or writes without a wait: sockets of the net package never block. It returns an error
// if there is nothing to read, or no room to write.
func (c client) atOnce(p []byte, do func(fd int, p []byte) (int, error)) (n int, err error) {
	raw, err := c.conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	closed := raw.Control(func(fd uintptr) { n, err = do(int(fd), p) })
	return n, errors.Join(closed, err)
}
