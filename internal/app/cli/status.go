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
		Long: "status prints in its first line how the daemon is. Then follow the state of each GPU and MIG device, for " +
			"how long, the reason\n" +
			"and the remedy, the resources that the daemon serves, and its warnings. Lines fit the terminal, or have at most " +
			"100 columns.\n" +
			"-o wide prints whole UUIDs and times, and lines of any length.\n\n" +
			"With --watch it prints the summary, and then each change in one line, until SIGINT. A terminal shows as much of " +
			"a line as fits,\n" +
			"unless with -o wide. When the daemon ends, the command says so and waits for the next one. With -o json each " +
			"change is one\n" +
			"JSON object in one line; the first ones are what is there at the start. Changes that follow each other within a " +
			"tenth of a\n" +
			"second may be one change.\n\n" +
			"With --holders it also prints which containers hold which devices. The command asks the kubelet at that moment.",
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
