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

// startupLooks is how often the daemon's status is read while the Node has the start-up taint.
const startupLooks = time.Second

// endStartup removes the start-up taint of the node as soon as pods can get its GPUs, until ctx
// ends. It costs nothing while the Node has no such taint.
func (c *Cluster) endStartup(ctx context.Context, d daemon.View) {
	again := new(feed.Alarm)
	wake := func() []<-chan struct{} {
		_, node := c.client.Nodes().Latest()
		_, configured := d.Configs.Latest()
		return []<-chan struct{}{node, configured, again.Rings()}
	}
	kubeapi.Keep(ctx, clock.RealClock{}, "start-up taint", wake, func(ctx context.Context) error {
		node := c.client.Nodes().Value()
		if !d.Configs.Value().Features.StartupTaint || !kubeapi.Startup.IsOn(node) {
			return nil
		}
		s, err := d.Status(ctx)
		if err != nil || !started(node, d.Listed(), s) {
			again.After(ctx, startupLooks)
			return nil // the taint stays; the status says what is missing
		}
		if err := c.client.SetTaint(ctx, kubeapi.Startup, false, time.Now()); err != nil {
			return err
		}
		klog.FromContext(ctx).Info("Removed the start-up taint: the GPUs of the node are allocatable",
			"taint", kubeapi.Startup.String())
		return nil
	})
}

// started reports whether pods can get the GPUs of a node: the daemon is ready, and the Node's
// status shows each listed device, or the API server has slices of them. A node that has nothing to
// give yet has not started.
func started(node kubeapi.Node, listed map[string]int, s status.Status) bool {
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
