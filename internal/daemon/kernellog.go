package daemon

import (
	"context"
	"io"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kernellog"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/supervise"
)

// readKernelLog has the monitor hear of the XIDs in the kernel's log, while the configuration wants that. That the log cannot
// be read is no reason to stop serving GPUs.
func (d *daemon) readKernelLog(ctx context.Context) error {
	reader := kernellog.Reader{
		Open: d.openKernelLog, Deliver: d.requests().Deliver, Switch: d.counters.SwitchError, Clock: clock.RealClock{},
	}
	backoff := supervise.Backoff{First: time.Second, Most: 10 * time.Minute, Proven: time.Minute}
	return supervise.Run(ctx, backoff, func(ctx context.Context) error {
		d.awaitKernelLog(ctx, true)
		reading, stop := context.WithCancel(ctx)
		defer stop()
		go func() {
			d.awaitKernelLog(reading, false)
			stop()
		}()
		return reader.Run(reading)
	})
}

// awaitKernelLog waits until the configuration wants the log to be read, or not, or ctx ends.
func (d *daemon) awaitKernelLog(ctx context.Context, wanted bool) {
	feed.Until(ctx, d.watcher.Configs(), func(c config.Config) bool { return c.KernelLog == wanted })
}

// openKernelLog opens the log of the node that is served.
func (d *daemon) openKernelLog() (io.ReadCloser, error) {
	if d.node != nil {
		return d.node.KernelLog(), nil
	}
	return kernellog.Open(kernellog.Path)
}
