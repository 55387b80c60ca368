package daemon

import (
	"context"
	"fmt"
	"strings"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/reboot"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
)

// askForReboot maintains the file that requests a restart of the node, if configured.
func (w *maintenanceWing) askForReboot(ctx context.Context) error {
	asker := reboot.Asker{Clock: clock.RealClock{}, BootID: BootID(w.gpus.node)}
	asker.Wanted = func() (sentinel reboot.Sentinel, changed [3]<-chan struct{}) {
		c, configChanged := w.watcher.Configs().Latest()
		changed[0] = configChanged
		if c.RebootFile == "" {
			return sentinel, changed
		}
		var s inventory.Snapshot
		var driver driverchange.Status
		s, changed[1] = w.gpus.monitor.Snapshots().Latest()
		driver, changed[2] = w.swaps.Status().Latest()
		sentinel.Path = c.RebootFile
		if sentinel.Reason, sentinel.Known = needsReboot(s); driver.Reboot != "" {
			sentinel.Reason, sentinel.Known = strings.Trim(sentinel.Reason+"; "+driver.Reboot, "; "), true
		}
		return sentinel, changed
	}
	return asker.Run(ctx)
}

// needsReboot returns why GPUs of a Snapshot need a restart of the node; empty if no GPU
// does. The answer is unknown before the first scan, and while scans fail.
func needsReboot(s inventory.Snapshot) (reason string, known bool) {
	var all []string
	for _, g := range s.GPUs {
		if g.Health.Remedy == inventory.RemedyReboot {
			all = append(all, fmt.Sprintf("GPU %d is %s: %s", g.Index, g.Health.State, g.Health.Reason))
		}
	}
	return strings.Join(all, "; "), s.Driver != inventory.Driver{} && s.Stale == ""
}
