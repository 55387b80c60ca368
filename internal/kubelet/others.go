package kubelet

import (
	"context"
	"strings"
	"time"
)

// listenTimeout bounds a connection to the socket of another plugin.
const listenTimeout = 100 * time.Millisecond

// Listening returns the names of the sockets of other GPU device plugins that accept connections: those of other processes of
// this program, and those whose names begin as those of NVIDIA's and Google's plugins do.
func (d *Directory) Listening(ctx context.Context) []string {
	var listening []string
	for _, name := range d.sockets() {
		if d.Ours(name) || !strings.HasPrefix(name, socketPrefix) && !strings.HasPrefix(name, "nvidia") {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, listenTimeout)
		if conn, err := d.dialPlugin(ctx, name); err == nil {
			_ = conn.Close()
			listening = append(listening, name)
		}
		cancel()
	}
	return listening
}
