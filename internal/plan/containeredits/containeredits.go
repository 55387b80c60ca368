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

// Edits is what a container is given.
type Edits struct {
	// Env are environment variables by name.
	Env map[string]string
	// Mounts are what of the host the container sees in its file system.
	Mounts []Mount
	// Nodes are the device nodes it may use.
	Nodes []DeviceNode
	// Annotations are for the container runtime, by key.
	Annotations map[string]string
	// CDIDevices are qualified CDI names.
	CDIDevices []string
}

// A Mount is a path of the host that the container sees.
type Mount struct {
	HostPath, ContainerPath string
}

// The environment variables by which NVIDIA's container runtime knows what a container is to have.
const (
	EnvVisibleDevices = "NVIDIA_VISIBLE_DEVICES"
	// Void, as a value of EnvVisibleDevices, is nothing to that runtime: not even what an image says.
	Void = "void"

	envIMEXChannels = "NVIDIA_IMEX_CHANNELS"
	envGDRCopy      = "NVIDIA_GDRCOPY"
	envGDS          = "NVIDIA_GDS"
	envMOFED        = "NVIDIA_MOFED"
)

const (
	// volumeRoot is the directory in which NVIDIA's container runtime looks for files named after
	// devices.
	volumeRoot = "/var/run/nvidia-container-devices"
	// nothing is the source of such a file: only its name counts.
	nothing = "/dev/null"
	// imexChannel is the only channel that a container can be given.
	imexChannel = "0"
)

// For returns what a container is given with the devices of one request: replicas of one device
// give it that device once.
func For(devices []resource.Device, o Options) (Edits, error) {
	c := container{options: o, devices: distinct(devices), edits: Edits{Env: map[string]string{}}}
	c.bound, c.limited = limitOf(devices)
	if c.bound.Class == CDIThreads {
		return c.onlyLimit(), nil
	}
	if o.OnlyCDI() && o.Void {
		c.edits.Env[EnvVisibleDevices] = Void
	}
	for _, s := range o.Strategies {
		if err := c.tell(s); err != nil {
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

// container is a container whose edits are made.
type container struct {
	options Options
	devices []resource.Device // no two of one UUID
	bound   Limit             // if limited
	limited bool
	edits   Edits
}

// distinct returns the devices without those whose UUID has come before.
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

// tell passes the devices to the runtime by one strategy.
func (c *container) tell(s Strategy) error {
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

// has reports whether the container is to have a device node of the driver that the node has.
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

// names returns what the runtime calls the devices.
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

// mark mounts a file whose name is read by the runtime.
func (c *container) mark(name string) {
	c.edits.Mounts = append(c.edits.Mounts, Mount{HostPath: nothing, ContainerPath: path.Join(volumeRoot, name)})
}

// pipeVariable says where the MPS control daemon of a container is.
const pipeVariable = "CUDA_MPS_PIPE_DIRECTORY"

// mpsContainerRoot is where containers see MPS state.
const mpsContainerRoot = "/mps"

// joinMPS makes the container a client of the MPS daemon of its devices, if one of them is shared
// by MPS: the daemon sets a mode in which only its clients can use the device.
func (c *container) joinMPS() {
	i := slices.IndexFunc(c.devices, func(d resource.Device) bool { return d.MPSDaemon() != "" })
	if i < 0 {
		return
	}
	client := MPSClient(c.options.MPSRoot, c.devices[i].MPSDaemon())
	if c.limited {
		client = mpsClient(c.options.MPSRoot, c.devices[i].MPSDaemon(), unitsPipe)
	}
	maps.Copy(c.edits.Env, client.Env)
	c.edits.Mounts = append(c.edits.Mounts, client.Mounts...)
}

// unitsPipe is where a container with units sees the pipe directory of its one GPU: the same for
// each GPU, so that the CDI device of its limit can say where it is.
const unitsPipe = mpsContainerRoot + "/pipe"

// MPSClient returns what makes a container a client of the MPS daemon with a directory below root,
// the host's directory of MPS state.
func MPSClient(root, dir string) Edits {
	return mpsClient(root, dir, path.Join(mpsContainerRoot, dir, "pipe"))
}

// mpsClient is MPSClient for a container that sees the pipe directory at a path.
func mpsClient(root, dir, at string) Edits {
	return Edits{Env: map[string]string{pipeVariable: at}, Mounts: []Mount{
		{HostPath: path.Join(root, dir, "pipe"), ContainerPath: at},
		{HostPath: path.Join(root, "shm"), ContainerPath: "/dev/shm"},
	}}
}
