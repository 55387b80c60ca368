package cli

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
)

func newAliveCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "alive",
		Short: "Report whether a running daemon is alive, for a liveness probe",
		Long: "alive exits with 0 if no task of the daemon is stuck, and with 1 and the reasons otherwise. GPUs\n" +
			"are not checked: a hanging driver, a bad GPU or a missing kubelet is no reason to restart the\n" +
			"daemon.",
		Args: cobra.NoArgs,
	}
	socket := addControlFlag(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		var stuck []string
		if err := control.Call(cmd.Context(), *socket, daemon.CallAlive, nil, &stuck); err != nil {
			return err
		}
		if len(stuck) > 0 {
			return errors.New("stuck: " + terminal.Line(strings.Join(stuck, "; ")))
		}
		_, err := fmt.Fprintln(cmd.OutOrStdout(), "alive")
		return err
	}
	return cmd
}
