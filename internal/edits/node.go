package edits

import (
	"fmt"
	"path"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

// A DeviceNode is a device node that a container gets.
type DeviceNode struct {
	HostPath, ContainerPath string
	// Permissions are those of the device cgroup: letters of "rwm".
	Permissions string
}

// AlwaysNodes are the driver's device nodes that every container with a GPU is given, as far as the node has them.
const AlwaysNodes = inventory.NodeControl | inventory.NodeUVM | inventory.NodeUVMTools | inventory.NodeModeset

// nodes returns the device nodes of the container, each once.
func (c *container) nodes() []DeviceNode {
	if len(c.devices) == 0 {
		return nil
	}
	var paths []string
	for _, name := range (c.devices[0].Control & AlwaysNodes).All() {
		paths = append(paths, "/dev/"+name)
	}
	for _, d := range c.devices {
		paths = append(paths, DevicePaths(d)...)
	}
	if c.has(inventory.NodeIMEXChannel0) {
		paths = append(paths, "/dev/"+inventory.NodeIMEXChannel0.String())
	}
	nodes := make([]DeviceNode, 0, len(paths))
	seen := map[string]bool{}
	for _, p := range paths {
		if !seen[p] {
			seen[p] = true
			nodes = append(nodes, DeviceNode{HostPath: path.Join("/", c.options.DevRoot, p), ContainerPath: p, Permissions: "rw"})
		}
	}
	return nodes
}

// DevicePaths returns the device nodes that a device consists of: that of the GPU, and for a MIG device those that give
// access to its instances.
func DevicePaths(d resource.Device) []string {
	paths := []string{fmt.Sprintf("/dev/nvidia%d", d.Minor)}
	for _, minor := range []int{d.GICap, d.CICap} {
		if minor > 0 {
			paths = append(paths, fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor))
		}
	}
	return paths
}
