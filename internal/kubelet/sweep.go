package kubelet

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// A Sweep removes the sockets of killed processes of this program from a folder.
type Sweep struct {
	// Clock and After say how long a socket must have refused connections before its
	// removal. Without a Clock, the socket must also have refused connections at the
	// previous scan. Scans must be a second or more apart, far longer than a process needs
	// to listen.
	Clock clock.PassiveClock
	After time.Duration

	refused map[string]time.Time // names of sockets that refused connections at the last look, and since when
}

// Look returns the names of the sockets that refuse connections now, and removes the sockets
// of killed processes.
func (s *Sweep) Look(ctx context.Context, folder string, names []string) (refused []string) {
	before, now := s.refused, time.Time{}
	if s.Clock != nil {
		now = s.Clock.Now()
	}
	s.refused = map[string]time.Time{}
	for _, name := range names {
		path := filepath.Join(folder, name)
		if !errors.Is(DialOnce(ctx, path), syscall.ECONNREFUSED) {
			continue
		}
		refused = append(refused, name)
		since, again := before[name]
		switch {
		case !again:
			s.refused[name] = now
		case now.Sub(since) >= s.After && os.Remove(path) == nil:
			klog.FromContext(ctx).Info("Removed the socket of a process that ended", "socket", name)
		default:
			s.refused[name] = since
		}
	}
	return refused
}

// DialOnce connects to a socket, and closes the connection at once. There is no timeout,
// because Unix sockets accept or refuse at once, and a timeout would not prove that a
// process listens.
func DialOnce(ctx context.Context, path string) error {
	conn, err := (&net.Dialer{}).DialContext(context.WithoutCancel(ctx), "unix", path)
	if err != nil {
		return err
	}
	_ = conn.Close() // nothing was sent
	return nil
}
