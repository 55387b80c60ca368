package kubelet

import (
	"context"
	"errors"
	"io/fs"
	"strings"
	"syscall"
	"time"
)

// listenTimeout bounds a connection to the socket of another plugin.
const listenTimeout = 100 * time.Millisecond

// Listening returns the names of the sockets of other GPU device plugins that accept
// connections: other processes of this program, and the plugins of NVIDIA and Google, known
// by their sockets' names.
func (d *Directory) Listening(ctx context.Context) []string {
	var listening []string
	for _, name := range d.sockets() {
		if d.Ours(name) || !strings.HasPrefix(name, socketPrefix) && !strings.HasPrefix(name, "nvidia") {
			continue
		}
		if d.tryPlugin(ctx, name) == nil {
			listening = append(listening, name)
		}
	}
	return listening
}

// Refuses reports whether the socket of that name is gone or refuses connections.
func (d *Directory) Refuses(ctx context.Context, name string) bool {
	err := d.tryPlugin(ctx, name)
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)
}

// tryPlugin connects to a plugin socket, and closes the connection at once, because some programs
// cannot stop while a connection is silent.
func (d *Directory) tryPlugin(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, listenTimeout)
	defer cancel()
	conn, err := d.dialPlugin(ctx, name)
	if err != nil {
		return err
	}
	_ = conn.Close()
	return nil
}
