package inventory

import (
	"iter"
	"strings"
)

// ControlNodes is the set of device nodes of the node that belong to the driver and its companions,
// and not to one GPU.
type ControlNodes uint16

// The device nodes, each of which a driver may lack.
const (
	NodeControl      ControlNodes = 1 << iota // nvidiactl
	NodeUVM                                   // nvidia-uvm
	NodeUVMTools                              // nvidia-uvm-tools
	NodeModeset                               // nvidia-modeset
	NodeIMEXChannel0                          // nvidia-caps-imex-channels/channel0
	NodeGDRCopy                               // gdrdrv
	NodeGDS                                   // nvidia-fs0 (GPUDirect Storage)
	NodeRDMA                                  // infiniband/rdma_cm (MOFED)
)

// Majors are the kernel's major numbers of the driver's device nodes, whether or not there are such
// nodes; 0 where the kernel has none. All but GPU may be others when the driver is loaded anew.
type Majors struct {
	GPU  int // nvidiaN, nvidiactl and nvidia-modeset
	UVM  int // nvidia-uvm and nvidia-uvm-tools
	Caps int // nvidia-caps/nvidia-capN
	IMEX int // nvidia-caps-imex-channels/channelN
}

var controlNodes = [...]string{
	"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-caps-imex-channels/channel0",
	"gdrdrv", "nvidia-fs0", "infiniband/rdma_cm",
}

// AllControlNodes is the set of all ControlNodes.
const AllControlNodes = NodeControl | NodeUVM | NodeUVMTools | NodeModeset | NodeIMEXChannel0 |
	NodeGDRCopy | NodeGDS | NodeRDMA

// Has reports whether all of other are in the set.
func (c ControlNodes) Has(other ControlNodes) bool { return c&other == other }

func (c ControlNodes) String() string {
	var paths []string
	for _, path := range c.All() {
		paths = append(paths, path)
	}
	return strings.Join(paths, ",")
}

// All gives the nodes of the set one by one, each with its path below /dev.
func (c ControlNodes) All() iter.Seq2[ControlNodes, string] {
	return func(yield func(ControlNodes, string) bool) {
		for i, path := range controlNodes {
			if node := ControlNodes(1) << i; c.Has(node) && !yield(node, path) {
				return
			}
		}
	}
}
