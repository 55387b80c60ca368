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
func (d *daemon) askForReboot(ctx context.Context) error {
	asker := reboot.Asker{Clock: clock.RealClock{}, BootID: BootID(d.node)}
	asker.Wanted = func() (w reboot.Sentinel, configured, looked <-chan struct{}) {
		c, configured := d.watcher.Configs().Latest()
		if c.RebootFile == "" {
			return w, configured, nil
		}
		s, looked := d.monitor.Snapshots().Latest()
		w.Path = c.RebootFile
		w.Reason, w.Known = needsReboot(s)
		return w, configured, looked
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
