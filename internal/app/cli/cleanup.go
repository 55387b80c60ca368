package cli

import (
	"errors"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// mpsRoot is the default directory of the MPS state.
const mpsRoot = "/run/nvidia/mps"

func newCleanupCommand() *cobra.Command {
	long := "cleanup removes the files of an uninstalled daemon from the node: its CDI specs, the MPS root with\n" +
		"its mounted memory, its sockets in the kubelet's folders, the file with labels, and the state\n" +
		"directory. It keeps files in use by containers, and prints the reason. It removes nothing while a\n" +
		"daemon runs, or while the kubelet does not answer."
	names := []string{
		"state-dir", "cdi-dir", "kubelet-root", "kubelet-socket", "pod-resources-socket", "mps-root",
		"node-labels-file",
		"dra-driver-name",
	}
	cmd := &cobra.Command{
		Use: "cleanup", Short: "Remove what an uninstalled daemon has left on the node", Long: long,
		Example: "  gpu-device-plugin cleanup --dry-run", Args: cobra.NoArgs,
	}
	config.AddFlags(cmd.Flags(), names...)
	var hostRoot string
	var dry, stay bool
	cmd.Flags().StringVar(&hostRoot, "host-root", "", "where the node's root directory is mounted in this container")
	cmd.Flags().BoolVar(&dry, "dry-run", false, "print what would be removed, and remove nothing")
	cmd.Flags().BoolVar(&stay, "stay", false, "do not end before a signal, as a container of a DaemonSet")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, _, err := config.Sources{Env: os.LookupEnv, Flags: cmd.Flags()}.Resolve("", nil)
		if err != nil {
			return err
		}
		if c.Edits.MPSRoot == "" {
			c.Edits.MPSRoot = mpsRoot
		}
		for _, path := range []*string{
			&c.StateDir, &c.CDIDir, &c.KubeletRoot, &c.KubeletSocket, &c.PodResourcesSocket, &c.Edits.MPSRoot,
			&c.Features.LabelsFile,
		} {
			if *path != "" {
				*path = filepath.Join("/", hostRoot, *path)
			}
		}
		done, err := daemon.Cleanup(cmd.Context(), c, filepath.Join("/", hostRoot, "sys/fs/cgroup"), dry)
		if err = errors.Join(daemon.PrintRemovals(cmd.OutOrStdout(), done, dry), err); err != nil || !stay {
			return err
		}
		<-cmd.Context().Done()
		return nil
	}
	return cmd
}
