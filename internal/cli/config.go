package cli

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

func newConfigCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "config", Short: "Look at configuration files"}
	check := &cobra.Command{
		Use:   "check FILE",
		Short: "Say what is wrong with a configuration file; no GPU is needed",
		Long: "check judges a file as the daemon would that is given it with the same flags and environment: some of a file\n" +
			"is only right with others, such as sharing by MPS with --mps-root.",
		Example: "  gpu-device-plugin config check config.yaml\n" +
			"  gpu-device-plugin config check config.yaml --mps-root=/run/nvidia/mps",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			_, warnings, err := config.Sources{Env: os.LookupEnv, Flags: cmd.Flags()}.LoadFile(args[0])
			for _, w := range warnings {
				if _, err := fmt.Fprintf(cmd.OutOrStdout(), "warning: %s\n", w); err != nil {
					return err
				}
			}
			if invalid := (*config.Invalid)(nil); errors.As(err, &invalid) {
				return listed{invalid}
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

// listed is the error of a configuration with a line for each problem: for a terminal, not for a log.
type listed struct{ *config.Invalid }

func (l listed) Unwrap() error { return l.Invalid }

func (l listed) Error() string {
	var b strings.Builder
	b.WriteString(l.File + " is not valid:")
	for _, p := range l.Problems {
		b.WriteString("\n  " + p.String())
	}
	return b.String()
}
