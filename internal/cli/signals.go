package cli

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	"time"

	"k8s.io/klog/v2"
)

// signalTimeout bounds the work for one signal. The driver may have to wake its GPUs first.
const signalTimeout = time.Minute

// receive returns a channel of signals, and a function that ends that. SIGHUP ends a process that does not receive it, so receive is
// called before anything else, and ended last.
func receive(signals ...os.Signal) (received <-chan os.Signal, stop func()) {
	all := make(chan os.Signal, 4)
	signal.Notify(all, signals...)
	return all, func() { signal.Stop(all) }
}

// followSignals handles signals: SIGHUP reads the configuration again and looks at the node, SIGUSR1 releases the
// driver, SIGUSR2 goes back to it.
func (d *daemon) followSignals(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case s := <-d.asked:
			log := klog.FromContext(ctx)
			log.Info("Received signal", "signal", s.String())
			if err := d.handleSignal(ctx, s); err != nil && ctx.Err() == nil {
				log.Error(err, "Cannot do what the signal asks for", "signal", s.String())
			}
		}
	}
}

func (d *daemon) handleSignal(ctx context.Context, s os.Signal) error {
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
