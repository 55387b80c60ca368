package topology

import (
	"fmt"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// A Matrix is a Graph for printing, in order of position.
type Matrix struct {
	GPUs []MatrixGPU `json:"gpus"`
}

// MatrixGPU is a row of a Matrix.
type MatrixGPU struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
	BDF   string `json:"bdf"`
	Model string `json:"model"`
	// NUMANode is the nearest memory node, or inventory.NoNUMANode.
	NUMANode int `json:"numaNode"`
	// Peers are the connections to all GPUs, in order of position; the GPU itself has the label "X"
	// and no score.
	Peers []MatrixPeer `json:"peers"`
}

// MatrixPeer is a cell of a Matrix.
type MatrixPeer struct {
	UUID string `json:"uuid"`
	// Label is the connection as in nvidia-smi topo -m: "NV4" for 4 NVLink lanes, else the PCIe
	// path; "X" for the GPU itself, "?" if unreadable.
	Label string `json:"label"`
	// NVLinks is the number of active lanes, and NVLinkVersion their generation. Switched is true
	// if they lead to NVSwitches.
	NVLinks       int  `json:"nvlinks"`
	NVLinkVersion int  `json:"nvlinkVersion"`
	Switched      bool `json:"switched"`
	// PCIe is the nearest common ancestor: PSB, PIX, PXB, PHB, NODE, SYS or "?".
	PCIe string `json:"pcie"`
	// Score is the points of the connection.
	Score int `json:"score"`
}

// Matrix returns the graph as a matrix.
func (g *Graph) Matrix() Matrix {
	m := Matrix{GPUs: make([]MatrixGPU, len(g.nodes))}
	for a, n := range g.nodes {
		row := MatrixGPU{Index: n.index, UUID: n.uuid, BDF: n.bdf, Model: n.model, NUMANode: n.numaNode}
		for b, peer := range g.nodes {
			link := g.link(a, b)
			cell := MatrixPeer{
				UUID: peer.uuid, Label: label(link), NVLinks: link.NVLinks, NVLinkVersion: link.NVLinkVersion,
				Switched: link.Switched, PCIe: link.PCIe.String(), Score: g.Score(a, b),
			}
			if a == b {
				cell.Label = "X"
			}
			row.Peers = append(row.Peers, cell)
		}
		m.GPUs[a] = row
	}
	return m
}

func label(link inventory.Link) string {
	if link.NVLinks > 0 {
		return fmt.Sprintf("NV%d", link.NVLinks)
	}
	return link.PCIe.String()
}
