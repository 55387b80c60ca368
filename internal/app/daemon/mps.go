package daemon

import (
	"context"
	"os"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// RunMPS runs the control daemons for the configuration and the node until ctx ends.
// SIGHUP makes it read the configuration again.
func RunMPS(ctx context.Context, o Options) error {
	driver, node, err := OpenNode(ctx, o.Config.Startup, nil)
	if err != nil {
		return err
	}
	if node != nil {
		defer node.Close()
	}
	m := &mpsNode{
		watcher: config.NewWatcher(o.Sources, o.Config, clock.RealClock{}),
		monitor: monitor.New(monitor.Options{Driver: driverOf{driver}, Policy: o.Config.Health}),
		wanted:  feed.New[[]mps.Group](nil),
		signals: o.Signals,
	}
	// Otherwise a configuration could end control daemons still needed by the device plugin.
	m.watcher.JudgeOn(m.monitor.Snapshots().Value)
	observation := []Task{
		{Name: "configuration", Run: m.watcher.Run},
		{Name: "signals", Run: m.followSignals},
		{Name: "monitor", Run: m.monitor.Run},
		{Name: "driver", Run: func(ctx context.Context) error { return FollowDriver(ctx, m.monitor) }},
		{Name: "plan", Run: m.followPlan},
	}
	if o.Sources.Chosen != nil {
		observation = append(observation, o.Cluster.Observation(m.watcher.Configs(), BootID(node))...)
	}
	return monitor.Replaceable(ctx, RunTasks(ctx, lead.New(lead.Options{}), observation, []Task{
		{Name: "MPS control daemons", Run: mps.NewSupervisor(o.Config.MPSRoot, m.wanted, m.monitor).Run},
	}), driver.Calls)
}

// mpsNode is the node of the control daemons: its GPUs and their sharing.
type mpsNode struct {
	watcher *config.Watcher
	monitor *monitor.Monitor
	wanted  *feed.Feed[[]mps.Group]
	signals <-chan os.Signal
}

// followPlan publishes the groups for every Snapshot and Config, from the device plugin's plan.
func (m *mpsNode) followPlan(ctx context.Context) error {
	for {
		c, configChanged := m.watcher.Configs().Latest()
		snapshot, snapshotChanged := m.monitor.Snapshots().Latest()
		if snapshot.Generation > 0 { // a scan has succeeded
			m.wanted.Publish(mps.Groups(snapshot, resource.New(snapshot, c.Resource)))
		}
		if !feed.WaitAny(ctx, configChanged, snapshotChanged) {
			return nil
		}
	}
}

// followSignals reads the configuration again at SIGHUP.
func (m *mpsNode) followSignals(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-m.signals:
			m.watcher.Reload()
		}
	}
}
