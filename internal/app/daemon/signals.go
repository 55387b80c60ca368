package daemon

import (
	"context"
	"os"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// signalTimeout limits the work for one signal. The driver may have to wake its GPUs first.
const signalTimeout = time.Minute

// releasable is a monitor that can release the driver.
type releasable interface {
	Quiesce(ctx context.Context, allocate bool) error
	Resume(ctx context.Context) error
	Look(ctx context.Context) (inventory.Snapshot, error)
}

// followSignals handles signals: SIGHUP reads the configuration again and scans the node,
// SIGUSR1 releases the driver, SIGUSR2 resumes its use.
func followSignals(ctx context.Context, signals <-chan os.Signal, watcher *config.Watcher, m releasable) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case s := <-signals:
			log := klog.FromContext(ctx)
			log.Info("Received signal", "signal", s.String())
			if err := handleSignal(ctx, s, watcher, m); err != nil && ctx.Err() == nil {
				log.Error(err, "Cannot handle the signal", "signal", s.String())
			}
		}
	}
}

func handleSignal(ctx context.Context, s os.Signal, watcher *config.Watcher, m releasable) error {
	ctx, cancel := context.WithTimeout(ctx, signalTimeout)
	defer cancel()
	switch s {
	case syscall.SIGUSR1:
		return m.Quiesce(ctx, false)
	case syscall.SIGUSR2:
		return m.Resume(ctx)
	default:
		watcher.Reload()
		_, err := m.Look(ctx)
		return err
	}
}
