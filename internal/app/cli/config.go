package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

func (p Program) newConfigCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "config", Short: "Check configuration files"}
	check := &cobra.Command{
		Use:   "check FILE",
		Short: "Check a configuration file, without a GPU",
		Long: "check reads a file like a daemon with the same flags and environment, and prints the problems in\n" +
			"the file. Some settings depend on flags: sharing by MPS needs --mps-root. With --simulate, check\n" +
			"also prints the effect of the file on the simulated node, and fails if a running daemon would\n" +
			"refuse the file there because no GPU would be offered.",
		Example: "  gpu-device-plugin config check config.yaml\n" +
			"  gpu-device-plugin config check config.yaml --simulate dgx-h100\n" +
			"  gpu-device-plugin config check config.yaml --mps-root=/run/nvidia/mps",
		Args: needs("a file", 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			sources := config.Sources{Env: os.LookupEnv, Flags: cmd.Flags()}
			if p.Cluster == nil {
				sources.Program = p.kind() // the name of a node is not needed here
			}
			c, remarks, err := sources.LoadFile(args[0])
			var warnings []string
			for _, r := range remarks {
				warnings = append(warnings, r.String())
			}
			if err == nil && c.Simulate != "" {
				var ofNode []string
				ofNode, err = checkOnNode(cmd.Context(), c)
				warnings = append(warnings, ofNode...)
			}
			for _, w := range warnings {
				if _, err := fmt.Fprintf(cmd.OutOrStdout(), "warning: %s\n", w); err != nil {
					return err
				}
			}
			if invalid := (*config.Invalid)(nil); errors.As(err, &invalid) {
				return multilineError{invalid}
			}
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s is valid\n", args[0])
			return err
		},
	}
	config.AddFlags(check.Flags())
	cmd.AddCommand(check)
	return cmd
}

// checkOnNode returns the warnings about a configuration on its simulated node, and why a
// daemon with offered GPUs there would refuse the configuration.
func checkOnNode(ctx context.Context, c config.Config) (warnings []string, err error) {
	snapshot, err := scanOnce(ctx, c)
	if err != nil {
		return nil, err
	}
	everything := config.Config{Live: config.Live{Resource: resource.Options{MIG: c.Resource.MIG}}}
	return resource.New(snapshot, c.Resource).Warnings, c.Replaces(everything, snapshot)
}

// asTheDaemon returns the sources of the daemon's configuration, for commands that show
// the daemon's work. If a label of the node chooses the file, the running daemon tells the
// file; there is no file without a daemon.
func asTheDaemon(ctx context.Context, flags *pflag.FlagSet) config.Sources {
	s := config.Sources{Env: os.LookupEnv, Flags: flags}
	if early := s.Early(); early.NodeConfig.Dir != "" && early.File == "" {
		s.Chosen = feed.New(config.Chosen{File: askStatus(ctx, early.ControlSocket).Value.Status.ConfigFile})
	}
	return s
}

// simulateAsTheDaemon makes c simulate the same node as the running daemon, unless c names
// a node. It prints a note on standard error, because the command looks at a new node of
// the same profile.
func simulateAsTheDaemon(cmd *cobra.Command, c *config.Config) {
	if c.Simulate != "" || c.ControlSocket == "" {
		return
	}
	if c.Simulate = askStatus(cmd.Context(), c.ControlSocket).Value.Status.Simulated; c.Simulate != "" {
		fmt.Fprintf(cmd.ErrOrStderr(), "The daemon runs on the simulated node %s, shown here without faults; "+
			"see status for its present state.\n", terminal.Line(c.Simulate))
	}
}

// multilineError is the error of a configuration with a line for each problem: for a terminal, not for a
// log.
type multilineError struct{ *config.Invalid }

func (l multilineError) Unwrap() error { return l.Invalid }

func (l multilineError) Error() string {
	var b strings.Builder
	b.WriteString(l.File + " is not valid:")
	for _, p := range l.Problems {
		b.WriteString("\n  " + p.String())
	}
	return b.String()
}
