package daemon

import (
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/kernellog"
)

// readKernelLog delivers the XIDs in the kernel log to the monitor while configured. An
// unreadable log does not stop the service of GPUs.
func (w *gpuWing) readKernelLog(ctx context.Context) error {
	reader := kernellog.Reader{
		Open: w.openKernelLog, Deliver: w.requests().Deliver, Switch: w.switchError, Clock: clock.RealClock{},
	}
	backoff := supervise.Backoff{First: time.Second, Most: 10 * time.Minute, Proven: time.Minute}
	return supervise.Run(ctx, backoff, func(ctx context.Context) error {
		w.awaitKernelLog(ctx, true)
		reading, stop := context.WithCancel(ctx)
		defer stop()
		go func() {
			w.awaitKernelLog(reading, false)
			stop()
		}()
		return reader.Run(reading)
	})
}

// maxSwitchFaults limits the errors of NVSwitches in the status.
const maxSwitchFaults = 16

// switchError records an error of an NVSwitch. A fatal error stays in the status until the
// process ends, because nothing reports its repair.
func (w *gpuWing) switchError(bdf string, sxid uint64, fatal bool, at time.Time) {
	w.counters.SwitchError(bdf, sxid, fatal, at)
	known, what := w.switchFaults.Value(), fmt.Sprintf("NVSwitch %s: SXid %d", bdf, sxid)
	if fatal && len(known) < maxSwitchFaults && !slices.Contains(known, what) {
		w.switchFaults.Publish(append(slices.Clip(known), what))
	}
}

// awaitKernelLog waits until the configured use of the kernel log equals wanted, or ctx ends.
func (w *gpuWing) awaitKernelLog(ctx context.Context, wanted bool) {
	feed.Until(ctx, w.watcher.Configs(), func(c config.Config) bool { return c.KernelLog == wanted })
}

// openKernelLog opens the kernel log of the served node.
func (w *gpuWing) openKernelLog() (io.ReadCloser, error) {
	if w.node != nil {
		return w.node.KernelLog(), nil
	}
	return kernellog.Open(kernellog.Path)
}
