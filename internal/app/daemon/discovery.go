package daemon

import (
	"context"
	"io"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/labels"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/featurefile"
)

// RunDiscovery writes the labels of NVIDIA's gpu-feature-discovery until ctx ends. It
// writes to output if the configuration names no file.
func RunDiscovery(ctx context.Context, o Options, output io.Writer) error {
	driver, node, err := OpenNode(ctx, o.Config.Startup, nil)
	if err != nil {
		return err
	}
	if node != nil {
		defer node.Close()
	}
	m := monitor.New(monitor.Options{Driver: driverOf{driver}, Policy: o.Config.Health})
	watcher := config.NewWatcher(o.Sources, o.Config, clock.RealClock{})
	watcher.JudgeOn(m.Snapshots().Value) // like the device plugin, whose resources the labels describe
	configs, wanted, problem := watcher.Configs(), feed.New[map[string]string](nil), feed.New[error](nil)
	nodeLabels := &Labels{Configs: configs, Snapshots: m.Snapshots(), Make: labels.Discovered, Machine: MachineName,
		Now: time.Now, Wanted: wanted}
	file := &featureFile{configs: configs, labels: wanted, problem: problem}
	outputs := []Task{
		{Name: "labels", Run: nodeLabels.Run},
		{Name: "feature file", Run: file.run},
		{Name: "standard output", Run: (&featurefile.Printer{Output: output, Wanted: file.latestTarget}).Run},
	}
	if o.Cluster != nil {
		outputs = append(outputs, o.Cluster.Labels(View{
			ConfigView: ConfigView{Startup: o.Config.Startup, Configs: configs},
			LabelView:  LabelView{Labels: wanted, LabelsProblem: problem},
		})...)
	}
	return monitor.Replaceable(ctx, RunTasks(ctx, lead.New(lead.Options{}), []Task{
		{Name: "configuration", Run: watcher.Run},
		{Name: "signals", Run: func(ctx context.Context) error { return followSignals(ctx, o.Signals, watcher, m) }},
		{Name: "monitor", Run: m.Run},
		{Name: "first scan", Run: func(ctx context.Context) error { return CheckFirstLook(ctx, m, configs) }},
		{Name: "driver", Run: func(ctx context.Context) error { return FollowDriver(ctx, m) }},
	}, outputs), driver.Calls)
}
