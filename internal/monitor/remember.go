package monitor

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/ledger"
)

// remember begins with what earlier processes wrote down. What cannot be read is nothing to end for.
func (l *loop) remember(ctx context.Context) {
	log, dir := klog.FromContext(ctx), l.options.StateDir
	faults, noted, err := ledger.Open(dir, l.options.Clock)
	if err != nil {
		log.Info("Beginning without the faults of earlier processes", "dir", dir, "reason", err.Error())
	}
	l.faults, l.kept = faults, noted.Clone()
	noted.Expire(l.options.BootID)
	l.state.noted = noted

	release, err := ledger.ReadRelease(dir, l.options.BootID)
	if err != nil {
		log.Info("Cannot read whether the driver was released; it counts as not released", "dir", dir, "reason", err.Error())
	}
	if release == nil {
		return
	}
	log.Info("The driver was released before this process started: leaving it alone until resume", "since", release.Since)
	l.closed, l.looked = true, true
	l.state.quiesce(release.Allocate, l.now())
	if l.quiesced = release.Since; !l.isQuiesced() { // the file does not say
		l.quiesced = l.now()
	}
	l.publish(ctx)
	close(l.first)
}

// setRelease writes down that the driver was released, or with nil that it was gone back to, and has the loop do what follows. Requests
// that come together are written down in the order in which the loop gets them.
func (m *Monitor) setRelease(ctx context.Context, r *ledger.Release, follow func() error) error {
	select {
	case m.releasing <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-m.releasing }()
	if m.options.StateDir != "" {
		select {
		case <-m.marks: // nobody waits for it any more
		default:
		}
		saved := make(chan error, 1)
		m.marks <- mark{r, saved}
		var err error
		select {
		case err = <-saved:
		case <-m.options.Clock.After(savePatience):
			err = errors.New("the disk does not answer")
		}
		if err != nil {
			klog.FromContext(ctx).Info("Cannot save whether the driver is released; a restart of the daemon may forget it",
				"dir", m.options.StateDir, "reason", err.Error())
		}
	}
	return follow()
}

// savePatience is how long a request waits until it is saved that the driver is released. It is saved later then.
const savePatience = 2 * time.Second

// A mark says that the driver was released, or with a nil Release that it was not.
type mark struct {
	*ledger.Release
	saved chan<- error
}

// saveMarks writes marks down until ctx ends. Only it waits for the disk.
func (m *Monitor) saveMarks(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case k := <-m.marks:
			k.saved <- m.save(m.options.StateDir, k.Release)
		}
	}
}

// save writes one down.
func save(dir string, r *ledger.Release) error {
	if r == nil {
		return ledger.RemoveRelease(dir)
	}
	return ledger.WriteRelease(dir, *r)
}
