package cli

import (
	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
)

func newHealthCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "health", Short: "Clear faults of devices"}
	clearing := &cobra.Command{
		Use:   "clear --gpu GPU",
		Short: "Clear the faults of a GPU or MIG device",
		Long: "clear removes the recorded faults of a GPU or MIG device, including faults that only an operator\n" +
			"can remove. The daemon checks the device at once, and reports a fault again if it still exists.",
		Example: "  gpu-device-plugin health clear --gpu 3",
		Args:    cobra.NoArgs,
	}
	socket := addControlFlag(clearing.Flags())
	gpu := clearing.Flags().String("gpu", "", "index or UUID of the GPU or MIG device")
	clearing.RunE = func(cmd *cobra.Command, _ []string) error {
		return succeed(cmd, "GPU "+*gpu+": faults cleared",
			control.Call(cmd.Context(), *socket, daemon.CallHealthClear, daemon.ClearArguments{GPU: *gpu}, nil))
	}
	if err := clearing.MarkFlagRequired("gpu"); err != nil {
		panic(err) // the flag is declared above
	}
	cmd.AddCommand(clearing)
	return cmd
}

func newQuiesceCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "quiesce",
		Short: "Release the driver, so that GPUs can be reset or the driver replaced",
		Long: "quiesce closes NVML until resume. The daemon continues to serve the last known state. New pods get\n" +
			"no GPUs, unless --allocate is set. SIGUSR1 does the same without --allocate.",
		Args: cobra.NoArgs,
	}
	socket := addControlFlag(cmd.Flags())
	allocate := cmd.Flags().Bool("allocate", false, "allow new pods to get GPUs until resume")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		pods := "new pods get no GPU"
		if *allocate {
			pods = "new pods get GPUs"
		}
		return succeed(cmd, "driver released, and "+pods+"; to end this, run: gpu-device-plugin resume",
			control.Call(cmd.Context(), *socket, daemon.CallQuiesce, daemon.QuiesceArguments{Allocate: *allocate}, nil))
	}
	return cmd
}

func newResumeCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "resume",
		Short: "Resume NVML access after quiesce",
		Long:  "resume opens NVML again and checks every GPU. SIGUSR2 does the same.",
		Args:  cobra.NoArgs,
	}
	socket := addControlFlag(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return succeed(cmd, "driver in use again", control.Call(cmd.Context(), *socket, daemon.CallResume, nil, nil))
	}
	return cmd
}
