package containeredits

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// Edits are the changes to a container for its devices.
type Edits struct {
	// Env are environment variables by name.
	Env map[string]string
	// Mounts are paths of the host in the file system of the container.
	Mounts []Mount
	// Nodes are the device nodes for the container.
	Nodes []DeviceNode
	// Annotations are for the container runtime, by key.
	Annotations map[string]string
	// CDIDevices are qualified CDI names.
	CDIDevices []string
}

// A Mount is a path of the host for the container.
type Mount struct {
	HostPath, ContainerPath string
}

// Environment variables for NVIDIA's container runtime.
const (
	EnvVisibleDevices = "NVIDIA_VISIBLE_DEVICES"
	// Void as the value of EnvVisibleDevices disables that runtime, even if the image requests
	// GPUs.
	Void = "void"

	envIMEXChannels = "NVIDIA_IMEX_CHANNELS"
	envGDRCopy      = "NVIDIA_GDRCOPY"
	envGDS          = "NVIDIA_GDS"
	envMOFED        = "NVIDIA_MOFED"
)

const (
	// volumeRoot is the directory where NVIDIA's container runtime expects files named after
	// devices.
	volumeRoot = "/var/run/nvidia-container-devices"
	// emptySource is the source of such a file, because only the file's name counts.
	emptySource = "/dev/null"
	// imexChannel is the only channel for containers.
	imexChannel = "0"
)

// For returns the Edits for the devices of one request. Several replicas of a device count as one
// device.
func For(devices []resource.Device, o Options) (Edits, error) {
	c := container{options: o, devices: distinct(devices), edits: Edits{Env: map[string]string{}}}
	c.limitValue, c.hasLimit = limitOf(devices)
	if c.limitValue.Class == CDIThreads {
		return c.onlyLimit(), nil
	}
	if o.OnlyCDI() && o.Void {
		c.edits.Env[EnvVisibleDevices] = Void
	}
	for _, s := range o.Strategies {
		if err := c.pass(s); err != nil {
			return Edits{}, err
		}
	}
	for name, node := range map[string]inventory.ControlNodes{
		envGDRCopy: inventory.NodeGDRCopy, envGDS: inventory.NodeGDS, envMOFED: inventory.NodeRDMA,
	} {
		if o.wants(node, c.control()) {
			c.edits.Env[name] = "enabled"
		}
	}
	if o.GivesNodes() {
		c.edits.Nodes = c.nodes()
	}
	c.joinMPS()
	c.limit()
	return c.edits, nil
}

// container is a container during the creation of its Edits.
type container struct {
	options    Options
	devices    []resource.Device // without replicas of the same UUID
	limitValue Limit             // if limited
	hasLimit   bool
	edits      Edits
}

// distinct returns the devices without repetitions of a UUID.
func distinct(devices []resource.Device) []resource.Device {
	all := make([]resource.Device, 0, len(devices))
	seen := make(map[string]bool, len(devices))
	for _, d := range devices {
		if !seen[d.UUID] {
			seen[d.UUID] = true
			all = append(all, d)
		}
	}
	return all
}

// pass passes the devices to the runtime by one strategy.
func (c *container) pass(s Strategy) error {
	switch s {
	case EnvVar:
		if _, mounted := c.edits.Env[EnvVisibleDevices]; !mounted {
			c.edits.Env[EnvVisibleDevices] = strings.Join(c.names(), ",")
		}
		if c.has(inventory.NodeIMEXChannel0) {
			c.edits.Env[envIMEXChannels] = imexChannel
		}
	case VolumeMounts:
		c.edits.Env[EnvVisibleDevices] = volumeRoot
		for _, name := range c.names() {
			c.mark(name)
		}
		if c.has(inventory.NodeIMEXChannel0) {
			c.mark("imex/" + imexChannel)
		}
	case CDIAnnotations:
		names := c.cdiNames()
		c.edits.Annotations = map[string]string{c.annotationKey(names): strings.Join(names, ",")}
	case CDICRI:
		c.edits.CDIDevices = c.cdiNames()
	default:
		return fmt.Errorf("make container edits: unknown device list strategy %s", s)
	}
	return nil
}

// has reports whether the container gets a device node of the driver, and the node has it.
func (c *container) has(node inventory.ControlNodes) bool {
	return c.control().Has(node) && c.options.wants(node, c.control())
}

// control returns the device nodes of the node.
func (c *container) control() inventory.ControlNodes {
	if len(c.devices) == 0 {
		return 0
	}
	return c.devices[0].Control
}

// names returns the names of the devices for the runtime.
func (c *container) names() []string {
	names := make([]string, len(c.devices))
	for i, d := range c.devices {
		names[i] = Name(d, c.options.IDs)
	}
	return names
}

// Name returns the name of a device under an ID strategy.
func Name(d resource.Device, by IDStrategy) string {
	if by == ByIndex {
		return d.Index
	}
	return d.UUID
}

// mark mounts a file named after a device, for the runtime.
func (c *container) mark(name string) {
	c.edits.Mounts = append(c.edits.Mounts, Mount{HostPath: emptySource, ContainerPath: path.Join(volumeRoot, name)})
}

// pipeVariable names the pipe directory of a container's MPS control daemon.
const pipeVariable = "CUDA_MPS_PIPE_DIRECTORY"

// mpsContainerRoot is the path of MPS state in containers.
const mpsContainerRoot = "/mps"

// joinMPS makes the container a client of its devices' MPS daemon, if a device is shared by MPS.
// The daemon sets a mode in which only its clients can use the device.
func (c *container) joinMPS() {
	i := slices.IndexFunc(c.devices, func(d resource.Device) bool { return d.MPSDaemon() != "" })
	if i < 0 {
		return
	}
	client := MPSClient(c.options.MPSRoot, c.devices[i].MPSDaemon())
	if c.hasLimit {
		client = mpsClient(c.options.MPSRoot, c.devices[i].MPSDaemon(), unitsPipe)
	}
	maps.Copy(c.edits.Env, client.Env)
	c.edits.Mounts = append(c.edits.Mounts, client.Mounts...)
}

// unitsPipe is the path of the pipe directory in a container with units. The path is the same for
// every GPU, so the CDI device of a limit can contain it.
const unitsPipe = mpsContainerRoot + "/pipe"

// MPSClient returns the Edits for a client of the MPS daemon whose directory is dir below root.
// Root is the host's directory of MPS state.
func MPSClient(root, dir string) Edits {
	return mpsClient(root, dir, path.Join(mpsContainerRoot, dir, "pipe"))
}

// mpsClient returns the Edits of MPSClient with another path of the pipe directory in the
// container.
func mpsClient(root, dir, at string) Edits {
	return Edits{Env: map[string]string{pipeVariable: at}, Mounts: []Mount{
		{HostPath: path.Join(root, dir, "pipe"), ContainerPath: at},
		{HostPath: path.Join(root, "shm"), ContainerPath: "/dev/shm"},
	}}
}
