package cli

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/containerdevices"
)

// newCheckContainerCommand returns the command of the chart's test, which runs in a pod with a GPU.
func newCheckContainerCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check-container",
		Short: "Check that this container got the devices that it requested",
		Long: "check-container checks the container that it runs in: the devices named by NVIDIA_VISIBLE_DEVICES,\n" +
			"and the device nodes of GPUs, which must exist and open. It exits with 1 if the devices differ\n" +
			"from --devices. It needs no driver library.",
		Example: "  gpu-device-plugin check-container --devices 1",
		Args:    cobra.NoArgs,
	}
	devices := cmd.Flags().Int("devices", 1, "number of devices that the container requested")
	simulated := cmd.Flags().Bool("simulated", false, "the GPUs are simulated: the container has no device nodes of "+
		"them")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		got, err := containerdevices.Read("/", os.Getenv(containerdevices.VisibleDevices))
		if err != nil {
			return err
		}
		if err := got.Check(*devices, *simulated); err != nil {
			return err
		}
		_, err = fmt.Fprintln(cmd.OutOrStdout(), got)
		return err
	}
	return cmd
}
