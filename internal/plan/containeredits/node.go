package containeredits

import (
	"fmt"
	"path"
	"strconv"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// A DeviceNode is a device node for a container.
type DeviceNode struct {
	HostPath, ContainerPath string
	// Permissions are letters of "rwm" for the device cgroup.
	Permissions string
}

// AlwaysNodes are the driver's device nodes for every container with a GPU, as far as the node has
// them.
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
			nodes = append(nodes, DeviceNode{HostPath: path.Join("/", c.options.DevRoot, p), ContainerPath: p,
				Permissions: "rw"})
		}
	}
	return nodes
}

// A Number identifies a device node for the kernel. Mode is the driver's mode of the node; 0 for
// any mode.
type Number struct {
	Major, Minor int
	Mode         uint32
}

// capMode is the mode of the nodes of MIG capabilities, from DeviceFileMode in
// /proc/driver/nvidia/capabilities.
const capMode = 0o444

// NumberOf returns the number of one of the driver's device nodes, by its path in a container;
// false if unknown.
func NumberOf(node string, majors inventory.Majors) (Number, bool) {
	switch node {
	case "/dev/nvidiactl":
		return Number{Major: majors.GPU, Minor: 255}, majors.GPU > 0
	case "/dev/nvidia-modeset":
		return Number{Major: majors.GPU, Minor: 254}, majors.GPU > 0
	case "/dev/nvidia-uvm":
		return Number{Major: majors.UVM}, majors.UVM > 0
	case "/dev/nvidia-uvm-tools":
		return Number{Major: majors.UVM, Minor: 1}, majors.UVM > 0
	}
	for _, numbered := range []struct {
		prefix string
		Number
	}{
		{"/dev/nvidia-caps/nvidia-cap", Number{Major: majors.Caps, Mode: capMode}},
		{"/dev/nvidia-caps-imex-channels/channel", Number{Major: majors.IMEX}},
		{"/dev/nvidia", Number{Major: majors.GPU}},
	} {
		if rest, found := strings.CutPrefix(node, numbered.prefix); found {
			minor, err := strconv.Atoi(rest)
			numbered.Minor = minor
			return numbered.Number, err == nil && numbered.Major > 0
		}
	}
	return Number{}, false
}

// DevicePaths returns the device nodes of a device: the node of the GPU, and for a MIG device the
// nodes of its instances.
func DevicePaths(d resource.Device) []string {
	paths := []string{fmt.Sprintf("/dev/nvidia%d", d.Minor)}
	for _, minor := range []int{d.GICap, d.CICap} {
		if minor > 0 {
			paths = append(paths, fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor))
		}
	}
	return paths
}
