package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/nodefiles"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig/choice"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

func newMIGCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "mig",
		Short: "Plan, change and print the layout of GPUs in multi-instance mode (MIG)",
		Args:  noArguments,
	}
	cmd.AddCommand(newMIGPlanCommand(), newMIGApplyCommand(), newMIGStatusCommand(), newMIGExportCommand())
	return cmd
}

func newMIGExportCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "export",
		Short: "Print the MIG layout that the GPUs have, as a configuration file of mig-parted",
		Long: "export reads the MIG instances of this node once, or of a simulated node (--simulate). It prints a\n" +
			"file with one layout, current. Instances that a layout cannot express are written to standard\n" +
			"error, and the exit status is 1.",
		Example: "  gpu-device-plugin mig export --simulate a100-mig-mixed > layouts.yaml",
		Args:    noArguments,
	}
	config.AddFlags(cmd.Flags(), nodeFlags...)
	o := &output{format: outputYAML, people: outputYAML}
	cmd.Flags().VarP(o, "output", "o", "output format")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, _, err := config.Load(asTheDaemon(cmd.Context(), cmd.Flags()))
		if err != nil {
			return err
		}
		n, err := readPartitions(cmd.Context(), c)
		if err != nil {
			return err
		}
		l, lost := layout.Export(n.GPUs)
		document := l.Document()
		if err := o.print(cmd.OutOrStdout(), &document, nil); err != nil {
			return err
		}
		if lost = append(n.Warnings, lost...); len(lost) > 0 {
			return errors.New(strings.Join(lost, "; "))
		}
		return nil
	}
	return cmd
}

func newMIGPlanCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "Print how a MIG layout would divide the GPUs, and the steps to it",
		Long: "plan reads the MIG instances of this node once, or of a simulated node (--simulate). For each GPU\n" +
			"it prints the instances before and after, and the steps. It changes nothing. Existing instances of\n" +
			"the layout stay unchanged. The exit status is 1 if the layout is not possible on a GPU.\n\n" +
			"Layouts come from a configuration file of NVIDIA's mig-parted (--config), in which devices may\n" +
			"also be UUIDs of GPUs. Without a file the layouts are all-disabled, all-enabled, all-balanced, and\n" +
			"all-PROFILE for each profile of the GPUs, such as all-1g.10gb. The driver shows all instances only\n" +
			"to root.",
		Example: "  gpu-device-plugin mig plan --simulate dgx-h100 --layout all-balanced\n" +
			"  gpu-device-plugin mig plan --config layouts.yaml --layout training --gpu 0,1 -o yaml",
		Args: noArguments,
	}
	config.AddFlags(cmd.Flags(), nodeFlags...)
	var name, path string
	var only []string
	cmd.Flags().StringVar(&name, "layout", "", "name of the layout; may be left out if --config has one layout")
	cmd.Flags().StringVar(&path, "config", "", "path of a configuration file of mig-parted; default: the built-in "+
		"layouts")
	cmd.Flags().StringSliceVar(&only, "gpu", nil, "GPUs to plan for, by index or UUID; default: all")
	o := addOutputFlagFor(cmd, outputText)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, _, err := config.Load(asTheDaemon(cmd.Context(), cmd.Flags()))
		if err != nil {
			return err
		}
		file, err := readLayouts(path)
		if err != nil {
			return err
		}
		n, err := readPartitions(cmd.Context(), c)
		if err != nil {
			return err
		}
		l, err := layout.Find(name, file, n.GPUs)
		if err != nil {
			return fmt.Errorf("--layout: %s", terminal.Line(err.Error())) // the error contains names from the file
		}
		changes := layout.Plan(l, n.GPUs)
		changes.RefuseUnmatched(file)
		if only != nil {
			if changes.GPUs, err = daemon.SelectGPUs(changes.GPUs, only); err != nil {
				return fmt.Errorf("--gpu: %w", err)
			}
		}
		p := layout.NewPlanned(changes, n.Architectures, append(n.Warnings, unseenProcesses(c)...))
		if err := o.print(cmd.OutOrStdout(), &p, func(w io.Writer) { printMIGPlan(w, p) }); err != nil {
			return err
		}
		return p.Err()
	}
	return cmd
}

// readLayouts reads a file of layouts; nil if the path is empty.
func readLayouts(path string) (*layout.File, error) {
	if path == "" {
		return nil, nil
	}
	data, err := statefile.Read(path, choice.MaxLayouts)
	if err != nil {
		return nil, fmt.Errorf("--config: %w", err)
	}
	file, err := layout.Parse(data)
	if err != nil {
		return nil, fmt.Errorf("--config %s: %s", path, terminal.Line(err.Error()))
	}
	return &file, nil
}

// readPartitions reads the division of the GPUs of the configured node.
func readPartitions(ctx context.Context, c config.Config) (daemon.Partitioned, error) {
	n := daemon.Partitioned{Architectures: map[string]string{}}
	err := withSession(ctx, c, func(ctx context.Context, session *nvidia.Session) error {
		snapshot, err := session.Scan(ctx)
		if err != nil {
			return err
		}
		n.Read(ctx, snapshot, session)
		return nil
	})
	return n, err
}

// unseenProcesses returns warnings about facts missing in a plan of MIG layouts because of a
// separate PID namespace.
func unseenProcesses(c config.Config) []string {
	if c.Simulate != "" || !nodefiles.HasOwnPIDNamespace(os.DirFS("/")) {
		return nil
	}
	return []string{"without hostPID the driver shows no processes of other containers: an instance that the plan " +
		"does not call in use may be in use; the driver refuses to destroy it then"}
}
