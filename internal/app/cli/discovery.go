package cli

import (
	"context"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/labels"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/featurefile"
)

func (p Program) newDiscoveryCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "gpu-feature-discovery",
		Short: "Write the labels of NVIDIA's GPU feature discovery",
		Long: "gpu-feature-discovery finds the GPUs of the node and writes the same labels as NVIDIA's program of\n" +
			"this name, with the same flags, environment and configuration file. It also runs when this program\n" +
			"is started under the name gpu-feature-discovery. A daemon writes more labels without it: see\n" +
			"--node-labels.",
		Example: "  gpu-device-plugin gpu-feature-discovery --oneshot --output-file= --use-node-feature-api=false\n" +
			"  gpu-device-plugin gpu-feature-discovery --oneshot --output-file= --use-node-feature-api=false " +
			"--simulate=t4",
		Args: cobra.NoArgs,
	}
	config.AddDiscoveryFlags(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return untilItEnds(cmd.Context(), func(ctx context.Context, own *ownProcess) error {
			sources := config.Sources{
				Env: config.DiscoveryEnv(os.LookupEnv), Flags: cmd.Flags(), Program: p.kind(), Discovery: true,
				NVIDIA: p.nvidia,
			}
			c, err := p.begin(ctx, &sources, own)
			switch {
			case err != nil:
				return err
			case c.Discovery.Oneshot:
				return p.discoverOnce(ctx, c, cmd.OutOrStdout())
			}
			return daemon.RunDiscovery(ctx, p.options(c, sources, own), cmd.OutOrStdout())
		}, syscall.SIGHUP)
	}
	return cmd
}

// discoverOnce writes the labels of the node once.
func (p Program) discoverOnce(ctx context.Context, c config.Config, output io.Writer) error {
	snapshot, err := scanOnce(ctx, c)
	if err != nil && c.FailOnInitError {
		return err
	}
	if err != nil {
		klog.FromContext(ctx).Info("The driver cannot be used; writing the labels of a node without GPUs", "reason",
			err.Error())
		snapshot = inventory.Snapshot{}
	}
	o := labels.Options{Resources: c.Resource, Machine: daemon.MachineName(c.Features.MachineTypeFile)}
	if c.Features.LabelsTimestamp {
		o.Timestamp = time.Now().Unix()
	}
	set := labels.Discovered(snapshot, o)
	switch {
	case c.Features.Labels == config.LabelsNodeFeature:
		return p.Cluster.LabelOnce(ctx, c.Startup, set)
	case c.Features.LabelsFile == "":
		return featurefile.Print(output, set)
	}
	return featurefile.Write(c.Features.LabelsFile, set, time.Time{})
}
