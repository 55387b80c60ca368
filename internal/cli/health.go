package cli

import (
	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/control"
)

func newHealthCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "health", Short: "Judge the health of a device in the place of a running daemon"}
	clearing := &cobra.Command{
		Use:   "clear --gpu GPU",
		Short: "Take a GPU or MIG device for good, whatever was found of it",
		Long: "clear drops the faults of a GPU or MIG device, those that only a person may drop included. The daemon looks at it at\n" +
			"once: what is still wrong is found again.",
		Example: "  gpu-device-plugin health clear --gpu 3",
		Args:    cobra.NoArgs,
	}
	socket := addControlFlag(clearing.Flags())
	gpu := clearing.Flags().String("gpu", "", "index or UUID of the GPU, or of the MIG device")
	clearing.RunE = func(cmd *cobra.Command, _ []string) error {
		return control.Call(cmd.Context(), *socket, callHealthClear, clearArguments{GPU: *gpu}, nil)
	}
	if err := clearing.MarkFlagRequired("gpu"); err != nil {
		panic(err) // the flag was declared above
	}
	cmd.AddCommand(clearing)
	return cmd
}

func newQuiesceCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "quiesce",
		Short: "Have a running daemon release the driver, so that GPUs can be reset and the driver be replaced",
		Long: "quiesce has the daemon close NVML and leave it alone until resume. It goes on serving what it knows; unless\n" +
			"--allocate is given, its GPUs are not given to new pods meanwhile. SIGUSR1 does the same without --allocate.",
		Args: cobra.NoArgs,
	}
	socket := addControlFlag(cmd.Flags())
	allocate := cmd.Flags().Bool("allocate", false, "give GPUs to new pods meanwhile")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return control.Call(cmd.Context(), *socket, callQuiesce, quiesceArguments{Allocate: *allocate}, nil)
	}
	return cmd
}

func newResumeCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "resume",
		Short: "End what quiesce began: open the driver again and look at the node",
		Long:  "resume has the daemon open NVML again and look at every GPU. SIGUSR2 does the same.",
		Args:  cobra.NoArgs,
	}
	socket := addControlFlag(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return control.Call(cmd.Context(), *socket, callResume, nil, nil)
	}
	return cmd
}
