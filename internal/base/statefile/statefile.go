package statefile

import (
	"context"
	"errors"
	"net"
	"syscall"
)

// MaxSocketPath is the longest path of a Unix socket, in bytes (unix(7)).
const MaxSocketPath = 107

// Listen creates a Unix socket at path, which must be free, and listens. Only the user of this
// process may connect, whatever the umask: the kernel gives the file the mode of the socket.
func Listen(ctx context.Context, path string) (*net.UnixListener, error) {
	config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var refused error
		err := raw.Control(func(fd uintptr) { refused = syscall.Fchmod(int(fd), 0o600) })
		return errors.Join(err, refused)
	}}
	listener, err := config.Listen(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	return listener.(*net.UnixListener), nil //nolint:forcetypeassert // the network is unix
}
