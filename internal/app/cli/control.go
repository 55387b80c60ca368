package cli

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// succeed prints the result of an action, or returns the error of the action.
func succeed(cmd *cobra.Command, done string, err error) error {
	if err != nil {
		return notStarted(err)
	}
	_, err = fmt.Fprintln(cmd.OutOrStdout(), terminal.Line(done))
	return err
}

// notStarted adds to the error of an action that a silent daemon will not start the action later.
func notStarted(err error) error {
	if errors.Is(err, control.ErrSilent) {
		return fmt.Errorf("%w. The daemon will not start the requested change later", err)
	}
	return err
}

// addControlFlag adds the flag for the control socket of the daemon. Commands and the daemon read
// the same environment variable.
func addControlFlag(flags *pflag.FlagSet) *string {
	socket := config.DefaultControlSocket
	if value, ok := os.LookupEnv("CONTROL_SOCKET"); ok && value != "" {
		socket = value
	}
	return flags.String("control-socket", socket, "control socket of the daemon [$CONTROL_SOCKET]")
}
