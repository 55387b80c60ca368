package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

func newReadyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ready",
		Short: "Report whether a running daemon is ready, for a readiness probe",
		Long: "ready exits with 0 if the daemon is ready, and with 1 and the reason otherwise. The daemon is\n" +
			"ready when all resources of its plan are registered and the kubelet counts their devices, or when\n" +
			"there is nothing to serve and no other device plugin serves GPUs on the node. A ready daemon stays\n" +
			"ready until it ends, unless the driver's files on disk do not match the loaded kernel module: then\n" +
			"the node must be restarted.",
		Args: cobra.NoArgs,
	}
	socket := addControlFlag(cmd.Flags())
	wait := cmd.Flags().Duration("wait", 0, "how long to wait for a daemon that is not ready yet, at most 20s")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		answer, err := askReady(cmd.Context(), *socket, min(*wait, daemon.MaxReadyWait))
		switch {
		case err != nil:
			return err
		case !answer.Ready:
			return errors.New("not ready: " + terminal.Line(answer.Reason))
		}
		_, err = fmt.Fprintln(cmd.OutOrStdout(), readyText(answer))
		return err
	}
	return cmd
}

func readyText(r status.Readiness) string {
	if r.Reason == "" {
		return "ready"
	}
	return "ready: " + terminal.Line(r.Reason)
}

// readyPace is the pause between attempts to reach a control socket that does not exist yet.
const readyPace = 50 * time.Millisecond

// askReady asks the daemon at a control socket whether the daemon is ready. It waits up to
// wait for the daemon to start and to be ready.
func askReady(ctx context.Context, socket string, wait time.Duration) (status.Readiness, error) {
	start := time.Now()
	for {
		var answer status.Readiness
		limit := max(0, wait-time.Since(start))
		arguments := daemon.ReadyArguments{WaitMilliseconds: limit.Milliseconds()}
		err := control.Call(ctx, socket, daemon.CallReady, arguments, &answer)
		if err != nil && ctx.Err() != nil {
			return status.Readiness{}, ctx.Err()
		}
		if !errors.Is(err, control.ErrNoDaemon) || limit == 0 {
			return answer, err
		}
		select {
		case <-ctx.Done():
			return status.Readiness{}, ctx.Err()
		case <-time.After(readyPace):
		}
	}
}
