package monitor

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// logChanges logs the differences between two Snapshots: one line for each device with another
// health, or one line for all GPUs with a common reason.
func logChanges(ctx context.Context, before, after inventory.Snapshot, node string) {
	logger := klog.FromContext(ctx)
	switch {
	case after.Stale != "" && after.Stale != before.Stale:
		logger.Info("Health check of the node failed", "reason", after.Stale)
	case after.Stale == "" && before.Stale != "":
		logger.Info("Health check of the node succeeded again")
	}
	if after.Driver != before.Driver {
		logger.Info("Driver", "version", after.Driver.Version, "cuda", after.Driver.CUDA)
	}
	for _, out := range after.LeftOut {
		logger.V(2).Info("GPU is left out", "index", out.Index, "reason", out.Reason)
	}
	affected := 0
	for _, g := range after.GPUs {
		was, known := before.GPU(g.UUID)
		if !known {
			logger.V(2).Info("GPU found", "gpu", g.UUID, "index", g.Index, "model", g.Model, "bdf", g.BDF)
			was.Health.State = inventory.Healthy
		}
		if node != "" && g.Health.Reason == node {
			if was.Health.Reason != node {
				affected++
			}
		} else {
			logHealth(logger, g.UUID, was.Health, g.Health)
		}
		for _, m := range g.MIGDevices {
			logHealth(logger, m.UUID, migHealth(was.MIGDevices, m.UUID), m.Health)
		}
	}
	if affected > 0 {
		logger.Info("Health changed", "node", "all GPUs", "struck", affected, "reason", node)
	}
	for _, g := range before.GPUs {
		if _, still := after.GPU(g.UUID); !still {
			logger.Info("GPU is gone", "gpu", g.UUID, "index", g.Index, "bdf", g.BDF)
		}
	}
}

// migHealth returns the health of the MIG device with the given UUID, or Healthy for a new device.
func migHealth(devices []inventory.MIGDevice, uuid string) inventory.Health {
	for _, m := range devices {
		if m.UUID == uuid {
			return m.Health
		}
	}
	return inventory.Health{State: inventory.Healthy}
}

func logHealth(logger klog.Logger, uuid string, from, to inventory.Health) {
	from.Since = to.Since
	if from == to {
		return
	}
	logger.Info("Health changed", "device", uuid, "from", from.State, "to", to.State, "xid", to.XID,
		"reason", to.Reason, "cure", to.Remedy)
}
