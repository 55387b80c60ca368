package daemon

import (
	"context"
	"fmt"
	"strings"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/reboot"
)

// askForReboot maintains the file that requests a restart of the node, if configured.
func (w *maintenanceWing) askForReboot(ctx context.Context) error {
	asker := reboot.Asker{Clock: clock.RealClock{}, BootID: BootID(w.gpus.node)}
	asker.Wanted = func() (sentinel reboot.Sentinel, configured, looked <-chan struct{}) {
		c, configured := w.watcher.Configs().Latest()
		if c.RebootFile == "" {
			return sentinel, configured, nil
		}
		s, looked := w.gpus.monitor.Snapshots().Latest()
		sentinel.Path = c.RebootFile
		sentinel.Reason, sentinel.Known = needsReboot(s)
		return sentinel, configured, looked
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
