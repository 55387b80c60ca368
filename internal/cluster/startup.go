package cluster

import (
	"context"
	"strconv"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// startupInterval is how often the daemon's status is read while the Node has the start-up taint.
const startupInterval = time.Second

// removeStartupTaint removes the start-up taint of the Node as soon as its GPUs are allocatable,
// until ctx ends. It is idle while the Node does not have the taint.
func (c *Cluster) removeStartupTaint(ctx context.Context, d daemon.View) {
	again := new(feed.Alarm)
	wake := func() []<-chan struct{} {
		_, node := c.client.Nodes().Latest()
		_, configured := d.Configs.Latest()
		return []<-chan struct{}{node, configured, again.Rings()}
	}
	kubeapi.RunWithRetry(ctx, clock.RealClock{}, "start-up taint", wake, func(ctx context.Context) error {
		node := c.client.Nodes().Value()
		if !d.Configs.Value().Features.StartupTaint || !kubeapi.Startup.IsOn(node) {
			return nil
		}
		s, err := d.Status(ctx)
		if err != nil || !isStarted(node, d.Listed(), s) {
			again.After(ctx, startupInterval)
			return nil // the taint stays; the status says why
		}
		if err := c.client.SetTaint(ctx, kubeapi.Startup, false, time.Now()); err != nil {
			return err
		}
		klog.FromContext(ctx).Info("Removed the start-up taint: the GPUs of the node are allocatable",
			"taint", kubeapi.Startup.String())
		return nil
	})
}

// isStarted reports whether the GPUs of a node are allocatable: the daemon is ready, and the Node's
// status has all listed devices or the API server has slices of them. A node without devices has
// not started.
func isStarted(node kubeapi.Node, listed map[string]int, s status.Status) bool {
	if !s.Readiness.Ready {
		return false
	}
	total := 0
	for name, devices := range listed {
		total += devices
		if shown, err := strconv.Atoi(node.Allocatable[name]); devices > 0 && (err != nil || shown < devices) {
			return false
		}
	}
	return total > 0 || s.DRA != nil && s.DRA.Devices > 0
}
