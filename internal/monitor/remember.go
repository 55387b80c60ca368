package monitor

import (
	"context"

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
	l.quiet, l.closed, l.looked = true, true, true
	l.state.quiesce(release.Allocate, l.now())
	l.quiesced = release.Since
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
	if dir := m.options.StateDir; dir != "" {
		var err error
		if r != nil {
			err = ledger.WriteRelease(dir, *r)
		} else {
			err = ledger.RemoveRelease(dir)
		}
		if err != nil {
			klog.FromContext(ctx).Info("Cannot save whether the driver is released; a restart of the daemon forgets it",
				"dir", dir, "reason", err.Error())
		}
	}
	return follow()
}
