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

// A Sweep removes the sockets that processes of this program left in a folder when they were
// killed.
type Sweep struct {
	// Clock and After say how long a socket must have refused connections before it is removed.
	// Without them, it must have refused them at the last look, too, which has to be a second ago or
	// more: a process listens within far less.
	Clock clock.PassiveClock
	After time.Duration

	refused map[string]time.Time // names of sockets that refused connections at the last look, and since when
}

// Look returns which of the sockets with these names refuse connections now. It removes those of
// them whose processes were killed.
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

// DialOnce connects to a socket, and closes the connection at once. It does not wait, so that no
// end of a wait is taken for a process that is there: Unix tells at once whether one listens.
func DialOnce(ctx context.Context, path string) error {
	conn, err := (&net.Dialer{}).DialContext(context.WithoutCancel(ctx), "unix", path)
	if err != nil {
		return err
	}
	_ = conn.Close() // nothing was said
	return nil
}
