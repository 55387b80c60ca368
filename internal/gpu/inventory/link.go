package inventory

import "fmt"

// A Link is the connection between two GPUs of the node, seen from one of them.
type Link struct {
	// Peer is the UUID and PeerIndex the NVML index of the other GPU.
	Peer      string
	PeerIndex int
	// NVLinks is the number of active NVLink lanes between the two GPUs. If Switched, it is the
	// number of lanes of the weaker GPU into the NVSwitch fabric. 0 means PCIe only.
	NVLinks int
	// NVLinkVersion is the generation of NVLink (1 to 5); 0 without NVLinks.
	NVLinkVersion int
	// Switched is true if the lanes lead through an NVSwitch: every pair of GPUs has the full
	// bandwidth.
	Switched bool
	// PCIe is the nearest common ancestor of the two GPUs in the PCIe tree.
	PCIe PCIePath
}

// PCIePath is the nearest common ancestor of two GPUs in the PCIe tree, ordered from near to far
// like nvmlGpuTopologyLevel_t.
type PCIePath int

// The common ancestors of two GPUs, with the abbreviations of nvidia-smi topo -m.
const (
	PCIeUnknown    PCIePath = iota // unknown
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
