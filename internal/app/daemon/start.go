package daemon

import (
	"context"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// LogStart logs the version, the settings and the resources in one line after the first
// successful scan. Then, or when ctx ends, it returns nil.
func LogStart(ctx context.Context, version string, snapshots *feed.Feed[inventory.Snapshot],
	configs *feed.Feed[config.Config]) error {
	for {
		snapshot, snapshotChanged := snapshots.Latest()
		if snapshot.Generation > 0 && snapshot.Stale == "" {
			c := configs.Value()
			var resources, strategies []string
			for _, r := range resource.New(snapshot, c.Resource).Resources {
				resources = append(resources, fmt.Sprintf("%s: %d", r.Name, r.Count()))
			}
			for _, s := range c.Edits.Strategies {
				strategies = append(strategies, s.String())
			}
			migDevices := 0
			for _, g := range snapshot.GPUs {
				migDevices += len(g.MIGDevices)
			}
			klog.FromContext(ctx).Info("Started", "version", version, "driver", snapshot.Driver.Version, "gpus",
				len(snapshot.GPUs),
				"migDevices", migDevices, "leftOut", len(snapshot.LeftOut), "resources", resources,
				"deviceListStrategy",
				strategies,
				"migStrategy", c.Resource.MIG.String(), "sharing", c.Resource.Sharing.Mode.String())
			return nil
		}
		if !feed.WaitAny(ctx, snapshotChanged) {
			return nil
		}
	}
}
