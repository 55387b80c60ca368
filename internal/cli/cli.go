// Package cli is the command line: it turns flags into the values that the other packages work with, builds the real
// adapters, and puts the daemon together. It is the only package that sees them all; only main imports it.
package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/version"
)

// Execute runs the command that args ask for until it is done or ctx ends, and writes what it prints to output. The error
// is a sentence for the person who typed args.
func Execute(ctx context.Context, args []string, output io.Writer) error {
	root := newRootCommand()
	root.SetArgs(doubleDashed(args, root.Flags()))
	root.SetOut(output)
	return root.ExecuteContext(ctx)
}

// doubleDashed returns args with two dashes before the daemon's flags that have one: NVIDIA's plugin takes both.
func doubleDashed(args []string, flags *pflag.FlagSet) []string {
	args = slices.Clone(args)
	for i, arg := range args {
		name, _, _ := strings.Cut(strings.TrimPrefix(arg, "-"), "=")
		if len(name) > 1 && strings.HasPrefix(arg, "-") && flags.Lookup(name) != nil {
			args[i] = "-" + arg
		}
	}
	return args
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "gpu-device-plugin",
		Short: "Kubernetes device plugin for NVIDIA GPUs",
		Long: "gpu-device-plugin is a Kubernetes device plugin for NVIDIA GPUs. It finds the GPUs of the node, registers them with\n" +
			"kubelet, and reports their health. Without a command it runs as a daemon. The commands check a configuration file,\n" +
			"show what a node would offer, and control a running daemon.",
		Args:          noArguments,
		SilenceErrors: true,
		SilenceUsage:  true,

		SuggestionsMinimumDistance: 2,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return untilItEnds(cmd.Context(), func(ctx context.Context, p *process) error {
				return runDaemon(ctx, cmd.Flags(), p)
			}, syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGUSR2)
		},
	}
	config.AddFlags(root.Flags())
	addLogFlags(root)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w; %s --help lists the flags", err, cmd.CommandPath())
	})
	root.AddCommand(
		newVersionCommand(), newPlanCommand(), newTopologyCommand(), newSimulateCommand(), newStatusCommand(), newReadyCommand(),
		newAliveCommand(),
		newDoctorCommand(), newConfigCommand(), newHealthCommand(), newQuiesceCommand(), newResumeCommand(), newMPSCommand(),
	)
	return root
}

// addLogFlags adds klog's level to all commands, under the name that Kubernetes' components give it.
func addLogFlags(root *cobra.Command) {
	var all flag.FlagSet
	klog.InitFlags(&all)
	level := all.Lookup("v")
	f := root.PersistentFlags().VarPF(goValue{level.Value}, "v", "v",
		"log level: 0 changes and problems, 2 decisions, 4 details, 6 debugging")
	f.DefValue = level.DefValue
}

// goValue is a flag of package flag as cobra wants it.
type goValue struct{ flag.Value }

func (goValue) Type() string { return "level" }

func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	problem := fmt.Sprintf("unknown command %q", args[0])
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		problem += fmt.Sprintf(", did you mean %q?", near[0])
	}
	return errors.New(problem + "; " + cmd.CommandPath() + " --help lists the commands")
}

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), version.String())
			return err
		},
	}
}
