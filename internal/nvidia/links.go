package nvidia

import (
	"math/bits"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// nvlink is where the active NVLink lanes of a GPU lead.
type nvlink struct {
	active   uint64   // the lanes, a bit each
	inactive uint64   // those that the GPU has besides
	version  int      // NVLink's generation, 0 if not known
	switched int      // how many active lanes lead to an NVSwitch
	peers    []string // the PCI addresses at the other end of the active lanes that do not
	unread   bool     // not all of it could be read: it is read again by the next look
}

// readNVLink reads where the lanes of g lead, if other lanes are active than at the last look.
func (s *scanner) readNVLink(g *gpu, a *account) {
	var active, inactive uint64
	for lane := range nvml.NVLINK_MAX_LINKS {
		state, ret := g.device.GetNvLinkState(lane)
		switch a.extra("nvmlDeviceGetNvLinkState", ret); {
		case contact(ret) != inventory.ContactGood:
			return // what is known holds until the next look
		case ret == nvml.SUCCESS && state == nvml.FEATURE_ENABLED:
			active |= 1 << lane
		case ret == nvml.SUCCESS:
			inactive |= 1 << lane
		}
	}
	g.nvlink.inactive = inactive
	if active == g.nvlink.active && !g.nvlink.unread {
		return
	}
	n := nvlink{active: active, inactive: inactive}
	for rest := active; rest != 0; rest &= rest - 1 {
		if s.follow(bits.TrailingZeros64(rest), g, &n, a); a.gone() {
			return
		}
	}
	g.nvlink = n
	s.topology.stale = true
}

// follow adds where one active lane of g leads.
func (s *scanner) follow(lane int, g *gpu, n *nvlink, a *account) {
	if version, ret := g.device.GetNvLinkVersion(lane); a.extra("nvmlDeviceGetNvLinkVersion", ret) {
		n.version = max(n.version, nvlinkGenerations[nvml.NvlinkVersion(version)])
	}
	kind, ret := g.device.GetNvLinkRemoteDeviceType(lane)
	old := ret == nvml.ERROR_FUNCTION_NOT_FOUND // before R470
	switch {
	case old:
	case !a.extra("nvmlDeviceGetNvLinkRemoteDeviceType", ret):
		n.unread = n.unread || contact(ret) != inventory.ContactGood
		return
	case kind == nvml.NVLINK_DEVICE_TYPE_SWITCH:
		n.switched++
		return
	case kind != nvml.NVLINK_DEVICE_TYPE_GPU:
		return // a processor
	}
	remote, ret := g.device.GetNvLinkRemotePciInfo(lane)
	if !a.extra("nvmlDeviceGetNvLinkRemotePciInfo", ret) {
		n.unread = n.unread || contact(ret) != inventory.ContactGood
		return
	}
	peer := bdf(remote)
	if old && sysfsNVSwitch(s.root, peer) {
		n.switched++
		return
	}
	n.peers = append(n.peers, peer)
}

// nvlinkGenerations are the generations of NVLink by NVML's numbers.
var nvlinkGenerations = map[nvml.NvlinkVersion]int{
	nvml.NVLINK_VERSION_1_0: 1,
	nvml.NVLINK_VERSION_2_0: 2,
	nvml.NVLINK_VERSION_2_2: 2,
	nvml.NVLINK_VERSION_3_0: 3,
	nvml.NVLINK_VERSION_3_1: 3,
	nvml.NVLINK_VERSION_4_0: 4,
	nvml.NVLINK_VERSION_5_0: 5,
	nvml.NVLINK_VERSION_6_0: 6,
}

// A topology remembers how GPUs are connected.
type topology struct {
	ends  []end                            // the GPUs, as the links were made from
	stale bool                             // some lanes lead elsewhere, or some path could not be read
	paths map[[2]string]inventory.PCIePath // by PCI addresses, the lower index first; only what is known
}

// An end is a GPU to which links lead.
type end struct {
	uuid, bdf string
	index     int
}

// link gives every GPU that was found its links to the others. They are made anew only when the GPUs are others, or
// their lanes lead elsewhere.
func (s *scanner) link() {
	t := &s.topology
	same := len(t.ends) == len(s.gpus)
	for i := 0; same && i < len(s.gpus); i++ {
		same = t.ends[i] == endOf(s.gpus[i])
	}
	if same && !t.stale {
		return
	}
	t.ends, t.stale = t.ends[:0], false
	for i := range s.gpus {
		t.ends = append(t.ends, endOf(s.gpus[i]))
		var links []inventory.Link
		for j := range s.gpus {
			if i == j {
				continue
			}
			if l, ok := s.connection(s.known[s.gpus[i].Index], s.known[s.gpus[j].Index]); ok {
				links = append(links, l)
			}
		}
		s.gpus[i].Links = links
	}
	for _, g := range s.gpus {
		s.known[g.Index].seen.Links = g.Links
	}
}

func endOf(g inventory.GPU) end { return end{uuid: g.UUID, bdf: g.BDF, index: g.Index} }

// connection returns the link from one GPU to another; false if nothing is known of it. Of each fact that both ends
// tell, the better one holds: an end that could not be read tells less, never more.
func (s *scanner) connection(from, to *gpu) (inventory.Link, bool) {
	l := inventory.Link{Peer: to.seen.UUID, PeerIndex: to.seen.Index, PCIe: s.pcie(from, to)}
	l.NVLinks = max(from.lanesTo(to), to.lanesTo(from))
	if l.NVLinks == 0 {
		l.NVLinks = min(from.nvlink.switched, to.nvlink.switched)
		l.Switched = l.NVLinks > 0
	}
	if l.NVLinks > 0 {
		l.NVLinkVersion = min(from.nvlink.version, to.nvlink.version)
		if l.NVLinkVersion == 0 {
			l.NVLinkVersion = max(from.nvlink.version, to.nvlink.version)
		}
	}
	return l, l.NVLinks > 0 || l.PCIe != inventory.PCIeUnknown
}

// lanesTo returns how many active lanes lead straight to another GPU.
func (g *gpu) lanesTo(other *gpu) int {
	lanes := 0
	for _, peer := range g.nvlink.peers {
		if peer == other.seen.BDF {
			lanes++
		}
	}
	return lanes
}

// pcie returns the common ancestor of two GPUs in the PCIe tree. It depends on where the two are plugged in only.
func (s *scanner) pcie(a, b *gpu) inventory.PCIePath {
	if b.seen.Index < a.seen.Index {
		a, b = b, a
	}
	key := [2]string{a.seen.BDF, b.seen.BDF}
	if path, ok := s.topology.paths[key]; ok {
		return path
	}
	level, ret := a.device.GetTopologyCommonAncestor(b.device)
	if ret != nvml.SUCCESS {
		level, ret = b.device.GetTopologyCommonAncestor(a.device)
	}
	at := slices.Index(pcieLevels[:], level)
	if ret != nvml.SUCCESS || at < 0 {
		s.topology.stale = s.topology.stale || contact(ret) != inventory.ContactGood
		return inventory.PCIeUnknown
	}
	path := inventory.PCIeSameBoard + inventory.PCIePath(at)
	if s.topology.paths == nil {
		s.topology.paths = map[[2]string]inventory.PCIePath{}
	}
	s.topology.paths[key] = path
	return path
}

// pcieLevels are NVML's levels in the order of inventory.PCIePath, from PCIeSameBoard.
var pcieLevels = [...]nvml.GpuTopologyLevel{
	nvml.TOPOLOGY_INTERNAL, nvml.TOPOLOGY_SINGLE, nvml.TOPOLOGY_MULTIPLE,
	nvml.TOPOLOGY_HOSTBRIDGE, nvml.TOPOLOGY_NODE, nvml.TOPOLOGY_SYSTEM,
}
