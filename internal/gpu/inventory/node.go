package inventory

import (
	"iter"
	"strings"
)

// ControlNodes is a set of device nodes of the driver and its companions, without the nodes of
// single GPUs.
type ControlNodes uint16

// The device nodes. A driver may lack any of them.
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

// Majors are the kernel's major numbers for the driver's device nodes, even if the nodes are
// missing; 0 where the kernel has none. All but GPU may change when the driver is loaded again.
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

// All yields the nodes of the set with their paths below /dev.
func (c ControlNodes) All() iter.Seq2[ControlNodes, string] {
	return func(yield func(ControlNodes, string) bool) {
		for i, path := range controlNodes {
			if node := ControlNodes(1) << i; c.Has(node) && !yield(node, path) {
				return
			}
		}
	}
}
