package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
)

func (p Program) newMPSCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "mps-control-daemon",
		Short: "Run the control daemons of CUDA MPS (Multi-Process Service)",
		Long: "mps-control-daemon runs one nvidia-cuda-mps-control for each resource shared by MPS. It limits the\n" +
			"threads and the memory of each replica, and restarts control daemons that end. It uses the\n" +
			"configuration file of the device plugin. It needs nvidia-cuda-mps-control in the PATH, the right\n" +
			"to set compute modes, and the directory of MPS state on the host (--mps-root), mounted at\n" +
			"--mps-root-ctr-path.",
		Args: noArguments,
	}
	config.AddFlags(cmd.Flags(), mpsFlags...)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return untilItEnds(cmd.Context(), func(ctx context.Context, own *ownProcess) error {
			sources := config.Sources{Env: mpsEnv, Flags: cmd.Flags(), NVIDIA: p.nvidia}
			c, err := p.begin(ctx, &sources, own)
			if err != nil {
				return err
			}
			return daemon.RunMPS(ctx, p.options(c, sources, own))
		}, syscall.SIGHUP)
	}
	cmd.AddCommand(newMountSHMCommand())
	return cmd
}

// mpsEnv is the environment of the control daemons, with a default for the host's
// directory of MPS state. NVIDIA's control daemons do not have the directory and ours do
// not need it, but without it a configuration with MPS sharing is invalid.
func mpsEnv(name string) (string, bool) {
	value, isSet := os.LookupEnv(name)
	if name == "MPS_ROOT" && value == "" {
		return "/run/nvidia/mps", true
	}
	return value, isSet
}

func newMountSHMCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "mount-shm",
		Short: "Mount the shared memory of MPS servers and clients",
		Long: "mount-shm mounts a tmpfs on the folder shm of --mps-root-ctr-path, unless a tmpfs is already\n" +
			"mounted. Its size is half of the memory.",
		Args: noArguments,
	}
	config.AddFlags(cmd.Flags(), "mps-root-ctr-path")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 {
			klog.FromContext(cmd.Context()).Info("Ignoring arguments", "arguments", args)
		}
		// The file has no influence, and may not exist yet.
		c, _, err := config.Sources{Env: os.LookupEnv, Flags: cmd.Flags()}.Resolve("", nil)
		if err != nil {
			return err
		}
		err = mps.MountSHM(c.MPSRoot)
		if errors.Is(err, mps.ErrNotMounted) {
			_, err = fmt.Fprintln(cmd.OutOrStdout(), err)
		}
		return err
	}
	return cmd
}
