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

// errAnswered ends a streaming call.
var errAnswered = errors.New("answered")

func newResetCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "reset --gpu GPU",
		Short: "Reset GPUs by nvidia-smi --gpu-reset",
		Long: "reset withdraws the GPUs from new pods, has the daemon release the driver, runs nvidia-smi\n" +
			"--gpu-reset, and waits up to 30 s until the GPUs are Healthy. GPUs connected by NVLink must be\n" +
			"reset together: name all of them in one command. The driver does not list them before the reset,\n" +
			"and nvidia-smi names the missing GPUs. The reset destroys the MIG devices of the GPUs.\n\n" +
			"If pods or processes use the GPUs, the command names them and resets nothing, unless --wait is\n" +
			"set. Ending the command ends the reset until the driver is released. Afterwards the reset\n" +
			"continues; status shows the result.",
		Example: "  gpu-device-plugin reset --gpu 3\n  gpu-device-plugin reset --gpu 2,3 --wait 30m",
		Args:    cobra.NoArgs,
	}
	socket := addControlFlag(cmd.Flags())
	var a daemon.ResetArguments
	cmd.Flags().StringSliceVar(&a.GPUs, "gpu", nil, "index or UUID of a GPU; may be repeated")
	cmd.Flags().DurationVar(&a.Wait, "wait", 0,
		"how long to wait for the pods and processes that use the GPUs; 0: not at all")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if a.Wait < 0 {
			return fmt.Errorf("--wait %v is negative: give a time such as 30m", a.Wait)
		}
		err := control.Follow(cmd.Context(), *socket, daemon.CallReset, a, func(p daemon.ResetProgress) error {
			if p.Done {
				p.Text = "reset, and Healthy"
			}
			if _, err := fmt.Fprintf(cmd.OutOrStdout(), "GPU %s: %s\n", strings.Join(a.GPUs, ", "),
				terminal.Line(p.Text)); err != nil || !p.Done {
				return err
			}
			return errAnswered
		})
		switch {
		case errors.Is(err, errAnswered):
			return nil
		case errors.Is(err, control.ErrEnded):
			return fmt.Errorf("%w; status of the next daemon shows what became of the reset", err)
		}
		return notStarted(err)
	}
	if err := cmd.MarkFlagRequired("gpu"); err != nil {
		panic(err) // the flag is declared above
	}
	return cmd
}

// newSimulatedSMICommand returns the command that a daemon with a simulated node runs in place of
// nvidia-smi.
func newSimulatedSMICommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:    daemon.SimulatedSMICommand + " SOCKET --gpu-reset -i ADDRESSES",
		Short:  "Stand in for nvidia-smi on a simulated node",
		Args:   cobra.ExactArgs(1),
		Hidden: true,
	}
	cmd.Flags().Bool("gpu-reset", false, "reset GPUs")
	addresses := cmd.Flags().StringSliceP("id", "i", nil, "PCI addresses of the GPUs")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		var answer daemon.SMIAnswer
		err := control.Follow(cmd.Context(), args[0], daemon.CallSimulateReset,
			daemon.SMIArguments{Addresses: *addresses}, func(a daemon.SMIAnswer) error {
				answer = a
				return errAnswered
			})
		// The daemon ends this process at its own end, like nvidia-smi, which asks no
		// daemon.
		if errors.Is(err, control.ErrEnded) || errors.Is(err, control.ErrNoDaemon) {
			<-cmd.Context().Done()
		}
		if !errors.Is(err, errAnswered) {
			return err
		}
		if _, err := fmt.Fprint(cmd.OutOrStdout(), answer.Said); err != nil || answer.OK {
			return err
		}
		return ExitStatus(255)
	}
	return cmd
}
