package nvidia

import (
	"cmp"
	"math/bits"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// nvlink describes the NVLink lanes of a GPU.
type nvlink struct {
	active     uint64   // active lanes, one bit each
	inactive   uint64   // inactive lanes
	everActive uint64   // lanes active at any time in this session
	version    int      // generation of NVLink, 0 if unknown
	switched   int      // number of active lanes to an NVSwitch
	peers      []string // PCI addresses at the other end of the other active lanes
	unread     bool     // incomplete: to be read again by the next look
}

// A pair is two GPUs by PCI address, lower address first. The addresses alone determine the PCIe
// path between the GPUs.
type pair [2]string

func pairOf(a, b *gpu) pair {
	return pair{min(a.lastSeen.BDF, b.lastSeen.BDF), max(a.lastSeen.BDF, b.lastSeen.BDF)}
}

// A peer is another GPU of the session with an unknown PCIe path.
type peer struct {
	pair   pair
	handle nvml.Device
}

// A pciePath is the PCIe path between the GPUs of a pair.
type pciePath struct {
	pair pair
	path inventory.PCIePath
}

// peers returns the GPUs whose PCIe path to the GPU of a slot is unknown.
func (s *scanner) peers(sl *slot) []peer {
	var peers []peer
	for _, other := range s.slots {
		pair := pairOf(sl.gpu, other.gpu)
		if _, known := s.topology.paths[pair]; other != sl && other.gpu.lastSeen.UUID != "" && !known {
			peers = append(peers, peer{pair, other.gpu.device.handle})
		}
	}
	return peers
}

// readLinks reads the lanes of a GPU, and its PCIe paths to other GPUs.
func (s *scanner) readLinks(sl *slot, g *gpu, peers []peer) {
	var a callResults
	g.linksRead, g.paths = true, nil
	s.readNVLink(g, &a)
	for _, p := range peers {
		if a.isUseless() {
			break
		}
		other := device{api: sl.api, handle: p.handle}
		level, ret := g.device.GetTopologyCommonAncestor(other)
		if ret != nvml.SUCCESS {
			level, ret = other.GetTopologyCommonAncestor(g.device)
		}
		if at := slices.Index(pcieLevels[:], level); ret == nvml.SUCCESS && at >= 0 {
			g.paths = append(g.paths, pciePath{p.pair, inventory.PCIeSameBoard + inventory.PCIePath(at)})
		} else if contact(ret) != inventory.ContactGood {
			g.nvlink.unread = true
		}
	}
	if a.isUseless() {
		g.nvlink.unread, g.results = true, a
	}
}

// storeLinks stores the links that were read for a GPU.
func (s *scanner) storeLinks(g *gpu) {
	if s.topology.paths == nil {
		s.topology.paths = map[pair]inventory.PCIePath{}
	}
	for _, p := range g.paths {
		s.topology.paths[p.pair] = p.path
	}
	g.linksRead, g.paths, s.topology.stale = false, nil, true
}

// readNVLink reads the destinations of the lanes of g if other lanes are active than last time.
func (s *scanner) readNVLink(g *gpu, a *callResults) {
	var active, inactive uint64
	for lane := range cmp.Or(g.lanes, nvml.NVLINK_MAX_LINKS) {
		state, ret := g.device.GetNvLinkState(lane)
		switch a.extra("nvmlDeviceGetNvLinkState", ret); {
		case contact(ret) != inventory.ContactGood:
			g.nvlink.unread = true // keep the known lanes until the next look
			return
		case ret == nvml.SUCCESS && state == nvml.FEATURE_ENABLED:
			active |= 1 << lane
		case ret == nvml.SUCCESS:
			inactive |= 1 << lane
		}
	}
	g.nvlink.everActive |= active
	// the number of lanes of a chip never grows
	g.nvlink.inactive, g.lanes = inactive, max(g.lanes, bits.Len64(active|inactive))
	if active == g.nvlink.active && !g.nvlink.unread {
		return
	}
	n := nvlink{active: active, inactive: inactive, everActive: g.nvlink.everActive}
	for rest := active; rest != 0; rest &= rest - 1 {
		if s.addLane(bits.TrailingZeros64(rest), g, &n, a); a.isUseless() {
			return
		}
	}
	g.nvlink = n
}

// lanesDown returns the number of lanes of a GPU that are down. A lane is down if it was active
// before, or if it is active on another GPU of the same model with lanes to an NVSwitch. Lanes
// without a bridge are never active. In MIG mode all lanes are off.
func (s *scanner) lanesDown(g *gpu) (lanes int, known bool) {
	if g.nvlink.active|g.nvlink.inactive == 0 || g.lastSeen.MIG == inventory.MIGEnabled {
		return 0, false
	}
	up := g.nvlink.everActive
	for _, sl := range s.slots {
		if sl.gpu.nvlink.switched > 0 && sl.gpu.lastSeen.Model == g.lastSeen.Model {
			up |= sl.gpu.nvlink.everActive
		}
	}
	return bits.OnesCount64(g.nvlink.inactive & up), true
}

// addLane adds the destination of one active lane of g.
func (s *scanner) addLane(lane int, g *gpu, n *nvlink, a *callResults) {
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

// A topology remembers the connections of the GPUs.
type topology struct {
	ends  []end                       // the GPUs of the computed links
	stale bool                        // links were read since
	paths map[pair]inventory.PCIePath // known paths only
}

// An end is a GPU at the end of links.
type end struct {
	uuid, bdf string
	index     int
}

// setLinks sets the links of every GPU. They are computed again only after a change of the GPUs or
// the lanes.
func (s *scanner) setLinks() {
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
		s.slots[g.Index].gpu.lastSeen.Links = g.Links
	}
}

func endOf(g inventory.GPU) end { return end{uuid: g.UUID, bdf: g.BDF, index: g.Index} }

// connection returns the link from one GPU to another; false if unknown. If both ends report a
// value, the better value counts: an end that could not be read reports less, never more.
func (s *scanner) connection(from, to *gpu) (inventory.Link, bool) {
	l := inventory.Link{Peer: to.lastSeen.UUID, PeerIndex: to.lastSeen.Index, PCIe: s.topology.paths[pairOf(from, to)]}
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

// lanesTo returns the number of active lanes directly to another GPU.
func (g *gpu) lanesTo(other *gpu) int {
	lanes := 0
	for _, peer := range g.nvlink.peers {
		if peer == other.lastSeen.BDF {
			lanes++
		}
	}
	return lanes
}

// pcieLevels are NVML's levels in the order of inventory.PCIePath, starting with PCIeSameBoard.
var pcieLevels = [...]nvml.GpuTopologyLevel{
	nvml.TOPOLOGY_INTERNAL, nvml.TOPOLOGY_SINGLE, nvml.TOPOLOGY_MULTIPLE,
	nvml.TOPOLOGY_HOSTBRIDGE, nvml.TOPOLOGY_NODE, nvml.TOPOLOGY_SYSTEM,
}
