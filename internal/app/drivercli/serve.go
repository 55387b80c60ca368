package drivercli

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverhost"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverkernel"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverstore"
)

// lockTimeout limits the wait for a process that has the directory.
const lockTimeout = 20 * time.Second

// pollPause is the time between two checks whether the driver is still in use.
const pollPause = 3 * time.Second

func newServeCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Load the driver of this node, and change it on request",
		Long: "serve loads the node's current driver folder after a boot, and answers the commands below and\n" +
			"gpu-node-agent at a socket. It never changes a driver that belongs to packages of the distribution, to\n" +
			"NVIDIA's installer or to another program; `gpu-driver status` says so. It needs root in the node's PID\n" +
			"namespace, with all capabilities.",
		Args: cobra.NoArgs,
	}
	var directory, sources, socket, root, caFile string
	var parameters, downloadFrom []string
	f := cmd.Flags()
	f.StringVar(&directory, "directory", driverapi.DefaultDirectory,
		"folder for the drivers of the node, at the same path on the node")
	f.StringVar(&sources, "sources", "/drivers", "folder whose folders are driver folders, such as image volumes")
	f.StringVar(&socket, "socket", "", "control socket (default: driver.sock in --directory)")
	f.StringVar(&root, "host-root", "/", "where the root file system of the node is mounted")
	f.StringArrayVar(&downloadFrom, "download-from", nil,
		"URL of a folder of a server from which drivers may be downloaded; may be repeated (default: none)")
	f.StringVar(&caFile, "ca-file", "",
		"file of the node with certificates of authorities, beside those of the node, for --download-from")
	f.StringArrayVar(&parameters, "module-parameter", nil,
		"parameter of a kernel module, such as nvidia.NVreg_EnableGpuFirmware=1; may be repeated")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		kernel := &driverkernel.Kernel{Root: root, Calls: driverkernel.SystemCalls{Root: root},
			Parameters: map[string]string{}}
		for _, p := range parameters {
			module, rest, ok := strings.Cut(p, ".")
			if !ok || module == "" || !strings.Contains(rest, "=") {
				return fmt.Errorf("--module-parameter %s is not like MODULE.NAME=VALUE", p)
			}
			module = strings.ReplaceAll(module, "-", "_")
			kernel.Parameters[module] = strings.TrimSpace(kernel.Parameters[module] + " " + rest)
		}
		if socket == "" {
			socket = filepath.Join(directory, filepath.Base(driverapi.DefaultSocket))
		}
		host, err := driverhost.New(driverhost.Options{
			Directory: directory, Sources: sources, Kernel: kernel, Pause: pollPause,
			DownloadFrom: downloadFrom, CAFile: caFile,
		})
		if err != nil {
			return explainLock(err)
		}
		defer host.Close()
		return host.Run(cmd.Context(), socket)
	}
	return cmd
}

// explainLock returns the error of opening a directory.
func explainLock(err error) error {
	if errors.Is(err, statefile.ErrLocked) {
		return fmt.Errorf("another gpu-driver works in the folder: %w", err)
	}
	return err
}

func newPlaceCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "place (DIGEST | VERSION | --from DIR)",
		Short: "Copy a driver folder to this node",
		Long: "place copies a driver folder from the sources of `gpu-driver serve` to the node, and verifies the\n" +
			"copy. The loaded driver stays. With --from, it copies any folder without `gpu-driver serve`, for\n" +
			"example before that starts. Files that the folder's manifest does not have are ignored, so the folder\n" +
			"may be the root of a container.",
		Example: "  gpu-driver place 580.95.05\n" +
			"  gpu-driver place --from / --directory /var/lib/gpu-device-plugin/driver",
	}
	var from, directory string
	socket := addSocketFlag(cmd)
	cmd.Flags().StringVar(&from, "from", "", "driver folder to copy, without `gpu-driver serve`")
	cmd.Flags().StringVar(&directory, "directory", driverapi.DefaultDirectory,
		"with --from: folder for the drivers of the node")
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if (from == "") == (len(args) == 0) || len(args) > 1 {
			return fmt.Errorf("place needs a digest or a version, or --from: %s", cmd.UseLine())
		}
		return nil
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c := client{cmd.Context(), *socket}
		show := newProgress(cmd.OutOrStdout())
		defer show.end()
		if from == "" {
			return c.place(args[0], show)
		}
		var store *driverstore.Store
		err := statefile.AwaitLock(cmd.Context(), realClock, lockTimeout, time.Second, func() (err error) {
			store, err = driverstore.Open(directory, func(string) {})
			return err
		})
		if err != nil {
			return explainLock(err)
		}
		defer store.Close()
		f, err := store.Place(cmd.Context(), from, func(percent int) { show.line("placing", percent, "") })
		if err != nil {
			return err
		}
		show.end()
		return printManifest(cmd.OutOrStdout(), f.Manifest, f.Digest)
	}
	return cmd
}

func newCopySelfCommand() *cobra.Command {
	return &cobra.Command{
		Use: "copy-self FILE", Short: "Copy this program to a file", Args: oneArgument("the path of the new file"),
		Long: "copy-self copies this program, so that a container whose image has only a driver can run it.",
		RunE: func(_ *cobra.Command, args []string) error {
			self, err := os.ReadFile("/proc/self/exe")
			if err != nil {
				return err
			}
			return statefile.Replace(args[0], self, 0o755)
		},
	}
}
