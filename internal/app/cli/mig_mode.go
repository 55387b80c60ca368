package cli

import (
	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
)

// newSetMIGModeCommand returns the command that the daemon runs in a separate process.
func newSetMIGModeCommand() *cobra.Command {
	return &cobra.Command{
		Use:    daemon.SetMIGModeCommand + " DRIVER_ROOT UUID MODE [FOLDER…]",
		Short:  "Set the MIG mode of a GPU for the daemon, which has closed its session with the driver",
		Args:   cobra.MinimumNArgs(3),
		Hidden: true,
		RunE: func(_ *cobra.Command, args []string) error {
			err := daemon.SetMIGMode(args[0], args[1], args[2], args[3:]...)
			if err == nil {
				return nil
			}
			complain(errorTimeout, "%v\n", err)
			return ExitStatus(daemon.ModeStatus(err))
		},
	}
}
