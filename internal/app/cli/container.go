package cli

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
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
		got, err := readContainer("/", os.Getenv(visibleDevices))
		if err != nil {
			return err
		}
		if err := got.check(*devices, *simulated); err != nil {
			return err
		}
		_, err = fmt.Fprintln(cmd.OutOrStdout(), got)
		return err
	}
	return cmd
}

const (
	visibleDevices = "NVIDIA_VISIBLE_DEVICES"
	// visibleMounts is the value for devices named by mounts in this folder.
	visibleMounts = "/var/run/nvidia-container-devices"
)

// container has the devices of a container.
type container struct {
	names  []string // of devices; nil if only CDI passed them
	nodes  []string // device nodes of GPUs
	closed []error  // why device nodes cannot be opened
}

func (c container) String() string {
	list := func(of []string) string {
		if len(of) == 0 {
			return "none"
		}
		return strings.Join(of, ", ")
	}
	return fmt.Sprintf("devices: %s; device nodes: %s", list(c.names), list(c.nodes))
}

var gpuNode = regexp.MustCompile(`^nvidia\d+$`)

// readContainer reads the devices of a container from its root directory and its value of
// NVIDIA_VISIBLE_DEVICES.
func readContainer(root, visible string) (container, error) {
	var got container
	switch visible {
	case "", "void", "none":
	case "all":
		return got, errors.New(visibleDevices + " is all, as in the image: no devices were allocated for this " +
			"container")
	case visibleMounts:
		entries, err := os.ReadDir(filepath.Join(root, visibleMounts))
		if err != nil {
			return got, fmt.Errorf("read the names of devices: %w", err)
		}
		for _, e := range entries {
			got.names = append(got.names, e.Name())
		}
	default:
		got.names = strings.Split(visible, ",")
	}
	entries, err := os.ReadDir(filepath.Join(root, "dev"))
	if err != nil {
		return got, fmt.Errorf("read device nodes: %w", err)
	}
	for _, e := range entries {
		if !gpuNode.MatchString(e.Name()) {
			continue
		}
		got.nodes = append(got.nodes, "/dev/"+e.Name())
		node, err := os.OpenFile(filepath.Join(root, "dev", e.Name()), os.O_RDWR, 0)
		if err != nil {
			got.closed = append(got.closed, err)
			continue
		}
		_ = node.Close()
	}
	return got, nil
}

// check compares the container with a request for a number of devices, and returns the
// difference. Several devices may be parts of one GPU, with one node.
func (c container) check(devices int, simulated bool) error {
	distinct := slices.Compact(slices.Sorted(slices.Values(c.names)))
	switch {
	case len(distinct) != len(c.names):
		return fmt.Errorf("a device is named twice: %s", c)
	case c.names != nil && len(c.names) != devices, c.names == nil && len(c.nodes) > devices:
		return fmt.Errorf("the container requested %s and got others: %s", status.Count(devices, "device"), c)
	case simulated:
		return nil
	case len(c.nodes) == 0:
		return fmt.Errorf("the container has no device node of a GPU: is the RuntimeClass of NVIDIA's runtime "+
			"missing? %s", c)
	case len(c.nodes) > devices:
		return fmt.Errorf("the container has device nodes of GPUs that it did not get: %s", c)
	}
	return errors.Join(c.closed...)
}
