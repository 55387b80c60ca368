package inventory

import (
	"iter"
	"strings"
)

// ControlNodes is the set of device nodes of the node that belong to the driver and its companions, and not to one GPU.
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

var controlNodes = [...]string{
	"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-caps-imex-channels/channel0",
	"gdrdrv", "nvidia-fs0", "infiniband/rdma_cm",
}

// AllControlNodes are those that there can be.
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
