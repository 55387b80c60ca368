package cli

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

func newConfigCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "config", Short: "Look at configuration files"}
	cmd.AddCommand(&cobra.Command{
		Use:   "check FILE",
		Short: "Say what is wrong with a configuration file; no GPU is needed",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			data, err := os.ReadFile(args[0])
			if err != nil {
				return fmt.Errorf("read configuration file: %w", err)
			}
			_, warnings, err := config.Sources{}.Resolve(args[0], data)
			for _, w := range warnings {
				if _, err := fmt.Fprintf(cmd.OutOrStdout(), "warning: %s\n", w); err != nil {
					return err
				}
			}
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s is valid\n", args[0])
			return err
		},
	})
	return cmd
}
