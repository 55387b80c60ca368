package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	agent "github.com/gpu-device-plugin/gpu-device-plugin/internal/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/featurefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/labels"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/monitor"
)

func (p Program) newDiscoveryCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "gpu-feature-discovery",
		Short: "Write the labels of NVIDIA's GPU feature discovery",
		Long: "gpu-feature-discovery finds the GPUs of the node and writes the labels that NVIDIA's program of this name writes, with the\n" +
			"same flags, environment and configuration file. It also runs where this program is started under the name\n" +
			"gpu-feature-discovery. A daemon writes more labels without it: see --node-labels.",
		Example: "  gpu-device-plugin gpu-feature-discovery --oneshot --output-file= --use-node-feature-api=false\n" +
			"  gpu-device-plugin gpu-feature-discovery --oneshot --output-file= --use-node-feature-api=false --simulate=t4",
		Args: cobra.NoArgs,
	}
	config.AddDiscoveryFlags(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return untilItEnds(cmd.Context(), func(ctx context.Context, own *process) error {
			sources := config.Sources{
				Env: config.DiscoveryEnv(os.LookupEnv), Flags: cmd.Flags(), Program: p.kind(), Discovery: true, NVIDIA: p.nvidia,
			}
			return p.runDiscovery(ctx, sources, own, cmd.OutOrStdout())
		}, syscall.SIGHUP)
	}
	return cmd
}

// runDiscovery writes labels once, or until ctx ends.
func (p Program) runDiscovery(ctx context.Context, sources config.Sources, own *process, output io.Writer) error {
	c, err := p.begin(ctx, &sources, own)
	if err != nil {
		return err
	}
	if c.Discovery.Oneshot {
		return p.discoverOnce(ctx, c, output)
	}
	driver, node, err := openNode(ctx, c, nil)
	if err != nil {
		return err
	}
	if node != nil {
		defer node.Close()
	}
	m := monitor.New(monitor.Options{Driver: driverOf{driver}, Policy: c.Health})
	watcher := config.NewWatcher(sources, c, clock.RealClock{})
	d := &discovery{
		daemon: daemon{
			config: c, watcher: watcher, monitor: m, asked: own.signals, unlabeled: feed.New[error](nil), labels: &agent.Labels{
				Configs: watcher.Configs(), Snapshots: m.Snapshots(), Make: labels.Discovered, Machine: machineName, Now: time.Now,
				Wanted: feed.New[map[string]string](nil),
			},
		},
		output: output,
	}
	outputs := []agent.Task{
		{Name: "labels", Run: d.labels.Run}, {Name: "feature file", Run: d.writeFeatures}, {Name: "standard output", Run: d.print},
	}
	if p.Cluster != nil {
		outputs = append(outputs, p.Cluster.Labels(agent.View{
			Config: c, Configs: watcher.Configs(), Labels: d.labels.Wanted, Unlabeled: d.unlabeled,
		})...)
	}
	return replaceable(ctx, agent.Run(ctx, []agent.Task{
		{Name: "configuration", Run: watcher.Run},
		{Name: "signals", Run: d.followSignals},
		{Name: "monitor", Run: m.Run},
		{Name: "first look", Run: func(ctx context.Context) error { return agent.CheckFirstLook(ctx, m, watcher.Configs()) }},
		{Name: "driver", Run: func(ctx context.Context) error { return agent.FollowDriver(ctx, m) }},
	}, outputs), driver.Calls)
}

// discoverOnce writes the labels of the node once.
func (p Program) discoverOnce(ctx context.Context, c config.Config, output io.Writer) error {
	snapshot, err := scanOnce(ctx, c)
	if err != nil && c.FailOnInitError {
		return err
	}
	if err != nil {
		klog.FromContext(ctx).Info("The driver cannot be used; writing the labels of a node without GPUs", "reason", err.Error())
		snapshot = inventory.Snapshot{}
	}
	o := labels.Options{Resources: c.Resource, Machine: machineName(c.Features.MachineTypeFile)}
	if c.Features.LabelsTimestamp {
		o.Timestamp = time.Now().Unix()
	}
	set := labels.Discovered(snapshot, o)
	switch {
	case c.Features.Labels == config.LabelsNodeFeature:
		return p.Cluster.LabelOnce(ctx, c, set)
	case c.Features.LabelsFile == "":
		return printLabels(output, set)
	}
	return featurefile.Write(c.Features.LabelsFile, set, time.Time{})
}

// A discovery is gpu-feature-discovery while it runs.
type discovery struct {
	daemon // as far as it writes labels
	output io.Writer
}

// print prints the labels when they change, and again after each interval, where no file is configured.
func (d *discovery) print(ctx context.Context) error {
	for {
		c, configured := d.watcher.Configs().Latest()
		set, labeled := d.labels.Wanted.Latest()
		if c.Features.Labels == config.LabelsFile && c.Features.LabelsFile == "" && set != nil {
			if err := printLabels(d.output, set); err != nil {
				return err
			}
		}
		var again <-chan time.Time
		if c.Discovery.Sleep > 0 {
			again = time.After(c.Discovery.Sleep)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-configured:
		case <-labeled:
		case <-again:
		}
	}
}

func printLabels(w io.Writer, set map[string]string) error {
	if _, err := w.Write(featurefile.Content(set, time.Time{})); err != nil {
		return fmt.Errorf("print labels: %w", err)
	}
	return nil
}
