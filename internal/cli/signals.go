package cli

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	"time"

	"k8s.io/klog/v2"
)

// signalTimeout bounds what one signal asks for. The driver may have to wake its GPUs first.
const signalTimeout = time.Minute

// heard returns what signals from now on ask for, and what ends that. A process that does not hear SIGHUP ends by it: one
// hears it before it is known to run, and until it has ended.
func heard(signals ...os.Signal) (asked <-chan os.Signal, stop func()) {
	all := make(chan os.Signal, 4)
	signal.Notify(all, signals...)
	return all, func() { signal.Stop(all) }
}

// followSignals does what signals ask for: SIGHUP reads the configuration again and looks at the node, SIGUSR1 releases the
// driver, SIGUSR2 goes back to it.
func (d *daemon) followSignals(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case s := <-d.asked:
			log := klog.FromContext(ctx)
			log.Info("Received signal", "signal", s.String())
			if err := d.obey(ctx, s); err != nil && ctx.Err() == nil {
				log.Error(err, "Cannot do what the signal asks for", "signal", s.String())
			}
		}
	}
}

func (d *daemon) obey(ctx context.Context, s os.Signal) error {
	ctx, cancel := context.WithTimeout(ctx, signalTimeout)
	defer cancel()
	switch s {
	case syscall.SIGUSR1:
		return d.monitor.Quiesce(ctx, false)
	case syscall.SIGUSR2:
		return d.monitor.Resume(ctx)
	default:
		d.watcher.Reload()
		_, err := d.monitor.Look(ctx)
		return err
	}
}
