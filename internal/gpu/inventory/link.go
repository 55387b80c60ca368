package inventory

import "fmt"

// A Link is the connection from one GPU to another of the same node.
type Link struct {
	// Peer is the UUID, PeerIndex the NVML index of the GPU at the other end.
	Peer      string
	PeerIndex int
	// NVLinks is the number of active NVLink lanes between the two: direct ones, or, when Switched,
	// those of the weaker end into the NVSwitch fabric. 0 means that only PCIe connects them.
	NVLinks int
	// NVLinkVersion is NVLink's generation (1 to 5), 0 without NVLinks.
	NVLinkVersion int
	// Switched says that the lanes lead through an NVSwitch, so that every pair has all of its
	// bandwidth.
	Switched bool
	// PCIe is the nearest common ancestor of the two in the PCIe tree.
	PCIe PCIePath
}

// PCIePath is the nearest common ancestor of two GPUs in the PCIe tree, from the nearest to the
// farthest. The order is that of nvmlGpuTopologyLevel_t.
type PCIePath int

// The common ancestors of two GPUs, as nvidia-smi topo -m abbreviates them in brackets.
const (
	PCIeUnknown    PCIePath = iota // not known
	PCIeSameBoard                  // on one board (PSB)
	PCIeSingle                     // at most one PCIe bridge (PIX)
	PCIeMultiple                   // several PCIe bridges, no host bridge (PXB)
	PCIeHostBridge                 // a PCIe host bridge (PHB)
	PCIeNUMANode                   // host bridges of one NUMA node (NODE)
	PCIeSystem                     // the interconnect between NUMA nodes (SYS)
)

func (p PCIePath) String() string {
	names := [...]string{"?", "PSB", "PIX", "PXB", "PHB", "NODE", "SYS"}
	if p < 0 || int(p) >= len(names) {
		return fmt.Sprintf("PCIePath(%d)", int(p))
	}
	return names[p]
}
