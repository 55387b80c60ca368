package monitor

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// logChanges logs how a Snapshot differs from the one before: one line a device whose health
// changed, or one for all where it is the node's.
func logChanges(ctx context.Context, before, after inventory.Snapshot, node string) {
	logger := klog.FromContext(ctx)
	switch {
	case after.Stale != "" && after.Stale != before.Stale:
		logger.Info("Cannot look at the node", "reason", after.Stale)
	case after.Stale == "" && before.Stale != "":
		logger.Info("Can look at the node again")
	}
	if after.Driver != before.Driver {
		logger.Info("Driver", "version", after.Driver.Version, "cuda", after.Driver.CUDA)
	}
	for _, out := range after.LeftOut {
		logger.V(2).Info("GPU is left out", "index", out.Index, "reason", out.Reason)
	}
	struck := 0
	for _, g := range after.GPUs {
		was, known := before.GPU(g.UUID)
		if !known {
			logger.V(2).Info("GPU found", "gpu", g.UUID, "index", g.Index, "model", g.Model, "bdf", g.BDF)
			was.Health.State = inventory.Healthy
		}
		if node != "" && g.Health.Reason == node {
			if was.Health.Reason != node {
				struck++
			}
		} else {
			logHealth(logger, g.UUID, was.Health, g.Health)
		}
		for _, m := range g.MIGDevices {
			logHealth(logger, m.UUID, healthOf(was.MIGDevices, m.UUID), m.Health)
		}
	}
	if struck > 0 {
		logger.Info("Health changed", "node", "all GPUs", "struck", struck, "reason", node)
	}
	for _, g := range before.GPUs {
		if _, still := after.GPU(g.UUID); !still {
			logger.Info("GPU is gone", "gpu", g.UUID, "index", g.Index, "bdf", g.BDF)
		}
	}
}

// healthOf returns the health of the MIG device with the given UUID; of one that was not there
// before, that it was Healthy.
func healthOf(devices []inventory.MIGDevice, uuid string) inventory.Health {
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
	logger.Info("Health changed", "device", uuid, "from", from.State, "to", to.State, "xid", to.XID, "reason", to.Reason,
		"cure", to.Cure)
}
