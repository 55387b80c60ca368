// Package containerdevices checks that a container got the devices that it requested.
package containerdevices

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
)

const (
	// VisibleDevices is the environment variable that names the devices of a container.
	VisibleDevices = "NVIDIA_VISIBLE_DEVICES"
	// visibleMounts is the value for devices named by mounts in this folder.
	visibleMounts = "/var/run/nvidia-container-devices"
)

// Devices are the devices of a container.
type Devices struct {
	names  []string // of devices; nil if only CDI passed them
	nodes  []string // paths of device nodes of GPUs
	errors []error  // why device nodes cannot be opened
}

func (d Devices) String() string {
	list := func(of []string) string {
		if len(of) == 0 {
			return "none"
		}
		return strings.Join(of, ", ")
	}
	return fmt.Sprintf("devices: %s; device nodes: %s", list(d.names), list(d.nodes))
}

var gpuNode = regexp.MustCompile(`^nvidia\d+$`)

// Read reads the devices of a container from its root directory and its value of
// NVIDIA_VISIBLE_DEVICES. The error says that there are none to read.
func Read(root, visible string) (Devices, error) {
	var got Devices
	switch visible {
	case "", "void", "none":
	case "all":
		return got, errors.New(VisibleDevices + " is all, as in the image: no devices were allocated for this " +
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
			got.errors = append(got.errors, err)
			continue
		}
		_ = node.Close()
	}
	return got, nil
}

// Check compares the container with a request for a number of devices, and returns the
// difference. Several devices may be parts of one GPU, with one node.
func (d Devices) Check(devices int, simulated bool) error {
	distinct := slices.Compact(slices.Sorted(slices.Values(d.names)))
	switch {
	case len(distinct) != len(d.names):
		return fmt.Errorf("a device is named twice: %s", d)
	case d.names != nil && len(d.names) != devices, d.names == nil && len(d.nodes) > devices:
		return fmt.Errorf("the container requested %s and got others: %s", wording.Count(devices, "device"), d)
	case simulated:
		return nil
	case len(d.nodes) == 0:
		return fmt.Errorf("the container has no device node of a GPU: is the RuntimeClass of NVIDIA's runtime "+
			"missing? %s", d)
	case len(d.nodes) > devices:
		return fmt.Errorf("the container has device nodes of GPUs that it did not get: %s", d)
	}
	return errors.Join(d.errors...)
}
