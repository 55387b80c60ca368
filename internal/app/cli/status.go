package cli

import (
	"io"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

func newStatusCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Print the GPUs and resources of a running daemon",
		Long: "status prints a summary of the daemon in its first line. Then follow the state of each GPU and MIG\n" +
			"device with its age, reason and remedy, the resources served by the daemon, and its warnings.\n" +
			"Lines fit the terminal, or have at most 100 columns. -o wide prints whole UUIDs and times, in\n" +
			"lines of any length.\n\n" +
			"With --watch the command prints the summary, and then each change in one line, until SIGINT. A\n" +
			"terminal shows as much of a line as fits, unless -o wide is set. When the daemon ends, the command\n" +
			"says so and waits for the next daemon. With -o json each change is a JSON object in one line; the\n" +
			"first objects describe the state at the start. Changes within a tenth of a second may be combined\n" +
			"into one change.\n\n" +
			"With --holders the command also asks the kubelet which containers hold which devices.",
		Example: "  gpu-device-plugin status -o wide\n  gpu-device-plugin status --watch -o json",
		Args:    cobra.NoArgs,
	}
	socket := addControlFlag(cmd.Flags())
	o := addOutputFlag(cmd, outputWide)
	watched := cmd.Flags().BoolP("watch", "w", false, "print changes until SIGINT")
	holders := cmd.Flags().Bool("holders", false, "also print which containers hold which devices")
	cmd.MarkFlagsMutuallyExclusive("watch", "holders")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		v := newView(cmd.OutOrStdout(), o.format == outputWide)
		if *watched {
			w, err := newWatcher(cmd.OutOrStdout(), o.format, v)
			if err != nil {
				return err
			}
			return w.follow(cmd.Context(), *socket)
		}
		var s status.Status
		if err := control.Call(cmd.Context(), *socket, daemon.CallStatus, daemon.StatusArguments{Holders: *holders},
			&s); err != nil {
			return err
		}
		return o.print(cmd.OutOrStdout(), &s, func(w io.Writer) { printStatus(w, s, v) })
	}
	return cmd
}
