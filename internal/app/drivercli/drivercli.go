// Package drivercli is the command line of the program gpu-driver. Package cli does not import it, so
// the daemon's program contains no code for packing and loading drivers.
package drivercli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverpack"
)

// Main runs the program with the arguments of the process until it is done or a signal ends it, and
// returns its exit status.
func Main() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal kills
	if err := Execute(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, terminal.Printable(fmt.Sprintf("Error: %v", err), terminal.Caret))
		return 1
	}
	return 0
}

// Execute runs the command in args and writes its output to output. The error is a sentence for the
// user.
func Execute(ctx context.Context, args []string, output io.Writer) error {
	root := newCommand() //nolint:contextcheck // cobra gives the context to the commands
	root.SetArgs(args)
	safe := &terminal.Writer{To: output}
	root.SetOut(safe)
	return errors.Join(root.ExecuteContext(ctx), safe.Close())
}

func newCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "gpu-driver",
		Short: "Pack NVIDIA drivers, and change the driver of a node",
		Long: "gpu-driver makes a folder and an OCI image out of NVIDIA's .run file of a driver: the user space as\n" +
			"NVIDIA's installer lays it out, kernel modules for any number of kernels, and a manifest with the\n" +
			"digest of every file. That runs on any Linux machine, without a GPU and without root.\n\n" +
			"On a node, gpu-driver serve loads the driver of such a folder, and changes it on request.",
		SilenceErrors: true, SilenceUsage: true,
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w; %s --help lists the flags", err, cmd.CommandPath())
	})
	root.AddCommand(newPackCommand(), newBuildCommand(), newVerifyCommand(), newVersionCommand(),
		newServeCommand(), newStatusCommand(), newPlaceCommand(), newFetchCommand(), newSwapCommand(),
		newCopySelfCommand(),
		newCallCommand("next-boot DIGEST|VERSION", driverapi.CallNextBoot,
			"Change the driver at the next boot of this node",
			"next-boot places a driver folder. The loaded driver stays until the node restarts."),
		newCallCommand("confirm", driverapi.CallConfirm, "End a change: the new driver works",
			"confirm ends a change whose step is unproven. The former driver folder stays until a third one is\n"+
				"placed."),
		newCallCommand("revert", driverapi.CallRevert, "Take a change back: the new driver does not work",
			"revert unloads the driver of a change whose step is unproven, and loads the former one. The change has\n"+
				"then failed; `gpu-driver cancel` forgets it."),
		newCallCommand("cancel", driverapi.CallCancel, "End a change that has not unloaded the driver",
			"cancel ends a change that copies a folder, waits for users of the driver or waits for a boot, and\n"+
				"forgets one that has failed. The loaded driver stays."))
	return root
}

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), version.String())
			return err
		},
	}
}

func newPackCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "pack RUN --sha256 DIGEST (--folder DIR | --image DIR | --archive FILE)... " +
			"[--modules DIR --kernel RELEASE]...",
		Short: "Make a driver folder, an OCI image or an archive out of a .run file",
		Long: "pack reads NVIDIA's .run file and executes nothing of it. It fails, and writes nothing, if the file\n" +
			"does not have the given digest, if it is not a driver of NVIDIA, if it has a type of file whose\n" +
			"place is unknown, or if a module is for another kernel, another driver or another architecture.\n" +
			"NVIDIA publishes the digests beside the files.\n\n" +
			"The folder, the image and the archive are there as a whole or not at all, also if the program is\n" +
			"killed. The same input gives the same digests.",
		Example: "  gpu-driver pack NVIDIA-Linux-x86_64-580.95.05.run --sha256 DIGEST --image driver-580\n" +
			"  gpu-driver pack NVIDIA-Linux-x86_64-580.95.05.run --sha256 DIGEST --folder /srv/driver-580 \\\n" +
			"    --modules build/6.8.0-90 --kernel 6.8.0-90-generic --modules build/6.8.0-94 --kernel 6.8.0-94-generic",
		Args: oneArgument("the path of a .run file"),
	}
	var o driverpack.Options
	var folders, releases []string
	f := cmd.Flags()
	f.StringVar(&o.SHA256, "sha256", "", "SHA-256 digest of the .run file, in hexadecimal; required")
	f.StringVar(&o.Folder, "folder", "", "new folder for the driver")
	f.StringVar(&o.Image, "image", "", "new folder for an image of the driver, as an OCI image layout")
	f.StringVar(&o.Archive, "archive", "", "new tar.gz file of the driver, for driver.source and driver.sha256")
	f.StringArrayVar(&folders, "modules", nil, "folder with kernel modules, for the next --kernel")
	f.StringArrayVar(&releases, "kernel", nil, "kernel release of the modules, as uname -r prints it")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		switch {
		case o.SHA256 == "":
			return errors.New("--sha256 is missing: give the digest that NVIDIA publishes beside the file")
		case o.Folder == "" && o.Image == "" && o.Archive == "":
			return errors.New("--folder, --image and --archive are missing: name at least one of them")
		case len(folders) != len(releases):
			return fmt.Errorf("--modules is there %d times and --kernel %d times: each folder of modules "+
				"needs the release of its kernel", len(folders), len(releases))
		}
		for i, folder := range folders {
			o.Modules = append(o.Modules, driverpack.Modules{Folder: folder, Release: releases[i]})
		}
		o.Run, o.SHA256 = args[0], strings.ToLower(o.SHA256)
		result, err := driverpack.Pack(cmd.Context(), o)
		if err != nil {
			return err
		}
		if o.Folder != "" {
			fmt.Fprintf(cmd.OutOrStdout(), "folder   %s\n", o.Folder)
		}
		if o.Image != "" {
			fmt.Fprintf(cmd.OutOrStdout(), "image    %s, %s\n", o.Image, result.Image)
		}
		if o.Archive != "" {
			fmt.Fprintf(cmd.OutOrStdout(), "archive  %s, sha256:%s\n", o.Archive, result.Archive)
		}
		if err := printManifest(cmd.OutOrStdout(), result.Manifest, result.Digest); err != nil {
			return err
		}
		if text := result.LeftOut(); text != "" {
			fmt.Fprintf(cmd.OutOrStdout(), "32-bit   %s\n", text)
		}
		return nil
	}
	return cmd
}

func newBuildCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "build-modules RUN --sha256 DIGEST --kernel-source DIR --folder DIR [--proprietary]",
		Short: "Compile the kernel modules of a .run file for one kernel",
		Long: "build-modules compiles the open kernel modules of NVIDIA's .run file, or with --proprietary the\n" +
			"others, for the kernel of a folder with headers. It needs make, a compiler and the headers, fetches\n" +
			"nothing and keeps no key: sign the modules before you pack them, if the nodes demand signatures. It\n" +
			"runs the makefiles and scripts of the .run file, so give the digest that NVIDIA publishes.",
		Example: "  gpu-driver build-modules NVIDIA-Linux-x86_64-580.95.05.run --sha256 DIGEST \\\n" +
			"    --kernel-source /lib/modules/6.8.0-90-generic/build --folder modules/6.8.0-90-generic",
		Args: oneArgument("the path of a .run file"),
	}
	var o driverpack.BuildOptions
	f := cmd.Flags()
	f.StringVar(&o.SHA256, "sha256", "", "SHA-256 digest of the .run file, in hexadecimal; required")
	f.StringVar(&o.KernelSource, "kernel-source", "",
		"folder with the headers of the kernel, such as /lib/modules/RELEASE/build; required")
	f.StringVar(&o.Folder, "folder", "", "new folder for the modules; required")
	f.BoolVar(&o.Proprietary, "proprietary", false, "compile the proprietary modules instead of the open ones")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		for _, name := range []string{"sha256", "kernel-source", "folder"} {
			if cmd.Flag(name).Value.String() == "" {
				return fmt.Errorf("--%s is missing: %s", name, cmd.Flag(name).Usage)
			}
		}
		o.Run, o.SHA256, o.Log = args[0], strings.ToLower(o.SHA256), cmd.ErrOrStderr()
		release, err := driverpack.BuildModules(cmd.Context(), o)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "modules  %s\nkernel   %s\n", o.Folder, release)
		return err
	}
	return cmd
}

func newVerifyCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "verify FOLDER",
		Short: "Compare a driver folder with its manifest",
		Long: "verify reads every file of a driver folder and compares it with the folder's manifest: the type, the\n" +
			"mode, the size and the digest. A file that the manifest does not have, and a link that leads out of\n" +
			"the folder, are errors as well. The exit status is 0 if the folder is as it was packed, and 1\n" +
			"otherwise.",
		Example: "  gpu-driver verify /srv/driver-580",
		Args:    oneArgument("the path of a driver folder"),
		RunE: func(cmd *cobra.Command, args []string) error {
			m, digest, err := driverfolder.Verify(cmd.Context(), args[0])
			if err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			return printManifest(cmd.OutOrStdout(), m, digest)
		},
	}
}

// printManifest prints a summary of a driver folder.
func printManifest(to io.Writer, m driverfolder.Manifest, digest string) error {
	var b strings.Builder
	var size int64
	for _, f := range m.Files {
		size += f.Size
	}
	fmt.Fprintf(&b, "digest   sha256:%s\n", digest)
	fmt.Fprintf(&b, "driver   %s, %s, %d files, %d MB\n", m.Version, m.Architecture, len(m.Files), size/1_000_000)
	for _, k := range m.Kernels {
		kind := "proprietary"
		if k.Open {
			kind = "open"
		}
		signed := "not signed"
		if k.Signed {
			signed = "signed"
		}
		if k.Signer != "" {
			signed = "signed by " + k.Signer
		}
		fmt.Fprintf(&b, "kernel   %s: %s modules, %s\n", k.Release, kind, signed)
	}
	if len(m.Kernels) == 0 {
		fmt.Fprintln(&b, "kernel   none: the folder has no kernel modules")
	}
	_, err := io.WriteString(to, b.String())
	return err
}

func oneArgument(what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == 1 {
			return nil
		}
		return fmt.Errorf("%s needs %s: %s", cmd.Name(), what, cmd.UseLine())
	}
}
