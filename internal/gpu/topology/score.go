package topology

import "github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"

// Scores are proportional to bandwidth: 4 points for 1 GB/s in one direction. So a lane of NVLink 2
// (25 GB/s) is 100, as in NVIDIA's plugin.

// laneScores are the scores of one NVLink lane by generation, from NVIDIA's published bandwidths
// (both directions, all lanes of a GPU): P100 160 GB/s over 4 lanes, V100 300 over 6, A100 600 over
// 12, H100 900 over 18, B200 1,800 over 18.
var laneScores = [...]int32{
	1: 80,  // 20 GB/s
	2: 100, // 25 GB/s
	3: 100, // 25 GB/s
	4: 100, // 25 GB/s
	5: 200, // 50 GB/s
}

// unknownLaneScore is the score of a lane of unknown generation, the same as of three of the five
// generations.
const unknownLaneScore = 100

// maxLanes limits the counted lanes between two GPUs, to three times the lanes of any GPU, so that
// an invalid reading cannot overflow a sum.
const maxLanes = 64

// pathScores are the scores of the PCIe path, by nearest common ancestor, in the steps of NVIDIA's
// plugin. PCIe 3.0 x16, the slowest in use, moves at most 15.75 GB/s (63 points), and each further
// hop leaves less. All are below one lane of NVLink, as is the bandwidth on machines with both. A
// pair with NVLink also has the points of its path: they decide between equal NVLinks, and keep a
// set below one host bridge or on one socket.
var pathScores = [...]int32{
	inventory.PCIeUnknown:    0,
	inventory.PCIeSameBoard:  60,
	inventory.PCIeSingle:     50,
	inventory.PCIeMultiple:   40,
	inventory.PCIeHostBridge: 30,
	inventory.PCIeNUMANode:   20,
	inventory.PCIeSystem:     10,
}

// pairScore returns the points of a connection.
func pairScore(l inventory.Link) int32 {
	return nvlinkScore(l) + pathScore(l.PCIe)
}

func nvlinkScore(l inventory.Link) int32 {
	lanes := int32(min(max(l.NVLinks, 0), maxLanes))
	if l.NVLinkVersion <= 0 {
		return lanes * unknownLaneScore
	}
	return lanes * laneScores[min(l.NVLinkVersion, len(laneScores)-1)]
}

func pathScore(p inventory.PCIePath) int32 {
	if p < 0 || int(p) >= len(pathScores) {
		return 0
	}
	return pathScores[p]
}

// merge combines the reports of both ends of a connection. A lane or path readable from only one
// end still exists. If both ends differ, the better value counts.
func merge(a, b inventory.Link) inventory.Link {
	link := a
	if nvlinkScore(b) > nvlinkScore(a) {
		link.NVLinks, link.NVLinkVersion, link.Switched = b.NVLinks, b.NVLinkVersion, b.Switched
	}
	if pathScore(b.PCIe) > pathScore(a.PCIe) {
		link.PCIe = b.PCIe
	}
	return link
}

// nearest guesses an unreadable PCIe path from the NUMA nodes of the two GPUs, if both are known.
func nearest(link inventory.Link, nodeA, nodeB int) inventory.Link {
	if link.PCIe != inventory.PCIeUnknown || nodeA < 0 || nodeB < 0 {
		return link
	}
	link.PCIe = inventory.PCIeSystem
	if nodeA == nodeB {
		link.PCIe = inventory.PCIeNUMANode
	}
	return link
}
