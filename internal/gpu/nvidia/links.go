package nvidia

import (
	"cmp"
	"math/bits"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// nvlink is where the active NVLink lanes of a GPU lead.
type nvlink struct {
	active   uint64   // the lanes, a bit each
	inactive uint64   // those that the GPU has besides
	up       uint64   // those that were active since the session was opened
	version  int      // NVLink's generation, 0 if not known
	switched int      // how many active lanes lead to an NVSwitch
	peers    []string // the PCI addresses at the other end of the active lanes that do not
	unread   bool     // not all of it could be read: it is read again by the next look
}

// A pair is two GPUs by their PCI addresses, the lower one first. The way by PCIe between them
// depends on these only.
type pair [2]string

func pairOf(a, b *gpu) pair { return pair{min(a.seen.BDF, b.seen.BDF), max(a.seen.BDF, b.seen.BDF)} }

// A peer is another GPU of the session to which the way by PCIe is not known.
type peer struct {
	pair   pair
	handle nvml.Device
}

// A way leads from one GPU of a pair to the other by PCIe.
type way struct {
	pair pair
	path inventory.PCIePath
}

// peers returns the GPUs to which the way from the GPU of a slot is not known.
func (s *scanner) peers(sl *slot) []peer {
	var peers []peer
	for _, other := range s.slots {
		pair := pairOf(sl.gpu, other.gpu)
		if _, known := s.topology.paths[pair]; other != sl && other.gpu.seen.UUID != "" && !known {
			peers = append(peers, peer{pair, other.gpu.device.handle})
		}
	}
	return peers
}

// readLinks reads where the lanes of a GPU lead, and the ways by PCIe to other GPUs.
func (s *scanner) readLinks(sl *slot, g *gpu, peers []peer) {
	var a callResults
	g.linked, g.ways = true, nil
	s.readNVLink(g, &a)
	for _, p := range peers {
		if a.gone() {
			break
		}
		other := device{api: sl.api, handle: p.handle}
		level, ret := g.device.GetTopologyCommonAncestor(other)
		if ret != nvml.SUCCESS {
			level, ret = other.GetTopologyCommonAncestor(g.device)
		}
		if at := slices.Index(pcieLevels[:], level); ret == nvml.SUCCESS && at >= 0 {
			g.ways = append(g.ways, way{p.pair, inventory.PCIeSameBoard + inventory.PCIePath(at)})
		} else if contact(ret) != inventory.ContactGood {
			g.nvlink.unread = true
		}
	}
	if a.gone() {
		g.nvlink.unread, g.results = true, a
	}
}

// linked takes over the links that were read of a GPU.
func (s *scanner) linked(g *gpu) {
	if s.topology.paths == nil {
		s.topology.paths = map[pair]inventory.PCIePath{}
	}
	for _, p := range g.ways {
		s.topology.paths[p.pair] = p.path
	}
	g.linked, g.ways, s.topology.stale = false, nil, true
}

// readNVLink reads where the lanes of g lead, if other lanes are active than when it was read last.
func (s *scanner) readNVLink(g *gpu, a *callResults) {
	var active, inactive uint64
	for lane := range cmp.Or(g.lanes, nvml.NVLINK_MAX_LINKS) {
		state, ret := g.device.GetNvLinkState(lane)
		switch a.extra("nvmlDeviceGetNvLinkState", ret); {
		case contact(ret) != inventory.ContactGood:
			g.nvlink.unread = true // what is known holds until the next look
			return
		case ret == nvml.SUCCESS && state == nvml.FEATURE_ENABLED:
			active |= 1 << lane
		case ret == nvml.SUCCESS:
			inactive |= 1 << lane
		}
	}
	g.nvlink.up |= active
	g.nvlink.inactive, g.lanes = inactive, max(g.lanes, bits.Len64(active|inactive)) // a chip gets no more of them
	if active == g.nvlink.active && !g.nvlink.unread {
		return
	}
	n := nvlink{active: active, inactive: inactive, up: g.nvlink.up}
	for rest := active; rest != 0; rest &= rest - 1 {
		if s.follow(bits.TrailingZeros64(rest), g, &n, a); a.gone() {
			return
		}
	}
	g.nvlink = n
}

// down returns how many lanes of a GPU are down: those that are not active although they were, or
// although they are on another GPU of the same model where lanes lead to an NVSwitch. Lanes that no
// bridge connects are never active. In MIG mode all lanes are off.
func (s *scanner) down(g *gpu) (lanes int, known bool) {
	if g.nvlink.active|g.nvlink.inactive == 0 || g.seen.MIG == inventory.MIGEnabled {
		return 0, false
	}
	up := g.nvlink.up
	for _, sl := range s.slots {
		if sl.gpu.nvlink.switched > 0 && sl.gpu.seen.Model == g.seen.Model {
			up |= sl.gpu.nvlink.up
		}
	}
	return bits.OnesCount64(g.nvlink.inactive & up), true
}

// follow adds where one active lane of g leads.
func (s *scanner) follow(lane int, g *gpu, n *nvlink, a *callResults) {
	if version, ret := g.device.GetNvLinkVersion(lane); a.extra("nvmlDeviceGetNvLinkVersion", ret) {
		n.version = max(n.version, nvlinkGenerations[nvml.NvlinkVersion(version)])
	}
	kind, ret := g.device.GetNvLinkRemoteDeviceType(lane)
	switch {
	case ret == nvml.ERROR_FUNCTION_NOT_FOUND: // before R470
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
	if sysfsNVSwitch(s.root, peer) {
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
	ends  []end                       // the GPUs, as the links were made from
	stale bool                        // links were read since
	paths map[pair]inventory.PCIePath // only what is known
}

// An end is a GPU to which links lead.
type end struct {
	uuid, bdf string
	index     int
}

// link gives every GPU that was found its links to the others. They are made anew only when the
// GPUs are others, or their lanes lead elsewhere.
func (s *scanner) link() {
	t := &s.topology
	if !t.stale && slices.EqualFunc(t.ends, s.gpus, func(e end, g inventory.GPU) bool { return e == endOf(g) }) {
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
			if l, ok := s.connection(s.slots[s.gpus[i].Index].gpu, s.slots[s.gpus[j].Index].gpu); ok {
				links = append(links, l)
			}
		}
		s.gpus[i].Links = links
	}
	for _, g := range s.gpus {
		s.slots[g.Index].gpu.seen.Links = g.Links
	}
}

func endOf(g inventory.GPU) end { return end{uuid: g.UUID, bdf: g.BDF, index: g.Index} }

// connection returns the link from one GPU to another; false if nothing is known of it. Of each
// fact that both ends tell, the better one holds: an end that could not be read tells less, never
// more.
func (s *scanner) connection(from, to *gpu) (inventory.Link, bool) {
	l := inventory.Link{Peer: to.seen.UUID, PeerIndex: to.seen.Index, PCIe: s.topology.paths[pairOf(from, to)]}
	l.NVLinks = max(from.lanesTo(to), to.lanesTo(from))
	if l.NVLinks == 0 {
		l.NVLinks = min(from.nvlink.switched, to.nvlink.switched)
		l.Switched = l.NVLinks > 0
	}
	if l.NVLinks > 0 {
		l.NVLinkVersion = min(from.nvlink.version, to.nvlink.version)
		l.NVLinkVersion = cmp.Or(l.NVLinkVersion, max(from.nvlink.version, to.nvlink.version))
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

// pcieLevels are NVML's levels in the order of inventory.PCIePath, from PCIeSameBoard.
var pcieLevels = [...]nvml.GpuTopologyLevel{
	nvml.TOPOLOGY_INTERNAL, nvml.TOPOLOGY_SINGLE, nvml.TOPOLOGY_MULTIPLE,
	nvml.TOPOLOGY_HOSTBRIDGE, nvml.TOPOLOGY_NODE, nvml.TOPOLOGY_SYSTEM,
}
