package kubelet

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"syscall"

	"k8s.io/klog/v2"
)

// A Sweep removes the sockets that processes of this program left in a folder when they were killed.
type Sweep struct {
	refused map[string]bool // names of sockets that refused connections at the last look
}

// Look returns which of the sockets with these names refuse connections now. It removes those of them that refused at the last look,
// too, which has to be a second ago or more: a process listens within far less.
func (s *Sweep) Look(ctx context.Context, folder string, names []string) (refused []string) {
	before := s.refused
	s.refused = map[string]bool{}
	for _, name := range names {
		path := filepath.Join(folder, name)
		if !errors.Is(DialOnce(ctx, path), syscall.ECONNREFUSED) {
			continue
		}
		refused = append(refused, name)
		if s.refused[name] = true; before[name] && os.Remove(path) == nil {
			delete(s.refused, name)
			klog.FromContext(ctx).Info("Removed the socket of a process that ended", "socket", name)
		}
	}
	return refused
}

// DialOnce connects to a socket, and closes the connection at once. It does not wait, so that no end of a wait is taken for a
// process that is there: Unix tells at once whether one listens.
func DialOnce(ctx context.Context, path string) error {
	conn, err := (&net.Dialer{}).DialContext(context.WithoutCancel(ctx), "unix", path)
	if err != nil {
		return err
	}
	_ = conn.Close() // nothing was said
	return nil
}
