package topology_test

import (
	"math"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
)

func TestPairScores(t *testing.T) {
	t.Parallel()
	const both = inventory.PCIeSystem // 10 points
	tests := []struct {
		name string
		link inventory.Link
		want int
	}{
		{"one board", inventory.Link{PCIe: inventory.PCIeSameBoard}, 60},
		{"one switch", inventory.Link{PCIe: inventory.PCIeSingle}, 50},
		{"several switches", inventory.Link{PCIe: inventory.PCIeMultiple}, 40},
		{"host bridge", inventory.Link{PCIe: inventory.PCIeHostBridge}, 30},
		{"NUMA node", inventory.Link{PCIe: inventory.PCIeNUMANode}, 20},
		{"system", inventory.Link{PCIe: inventory.PCIeSystem}, 10},
		{"a path this program does not know", inventory.Link{PCIe: 17}, 0},
		{"the first path this program does not know", inventory.Link{PCIe: inventory.PCIeSystem + 1}, 0},
		{"4 lanes of P100", inventory.Link{NVLinks: 4, NVLinkVersion: 1, PCIe: both}, 330},
		{"2 lanes of V100", inventory.Link{NVLinks: 2, NVLinkVersion: 2, PCIe: both}, 210},
		{"12 lanes of A100", inventory.Link{NVLinks: 12, NVLinkVersion: 3, Switched: true, PCIe: both}, 1210},
		{"18 lanes of H100", inventory.Link{NVLinks: 18, NVLinkVersion: 4, Switched: true, PCIe: both}, 1810},
		{"18 lanes of B200", inventory.Link{NVLinks: 18, NVLinkVersion: 5, Switched: true, PCIe: both}, 3610},
		{"a newer generation counts as the newest known", inventory.Link{NVLinks: 1, NVLinkVersion: 6, PCIe: both},
			210},
		{"lanes without generation", inventory.Link{NVLinks: 2, PCIe: both}, 210},
		{"nonsense", inventory.Link{NVLinks: math.MaxInt, NVLinkVersion: math.MinInt, PCIe: -1}, 6400},
		{"less than no lanes", inventory.Link{NVLinks: -3, NVLinkVersion: 4, PCIe: both}, 10},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			tt.link.Peer = "b"
			g := topology.New([]inventory.GPU{
				{UUID: "a", NUMANode: inventory.NoNUMANode, Links: []inventory.Link{tt.link}},
				{UUID: "b", Index: 1, NUMANode: inventory.NoNUMANode},
			})
			if g.Score(0, 1) != tt.want || g.Score(1, 0) != tt.want {
				t.Errorf("got %d and %d, want %d", g.Score(0, 1), g.Score(1, 0), tt.want)
			}
		})
	}
}

// What two ends say of one connection, and what is made of it.
func TestConnectionsThatTheEndsDisagreeOn(t *testing.T) {
	t.Parallel()
	link := func(peer string, lanes int, path inventory.PCIePath) inventory.Link {
		return inventory.Link{Peer: peer, NVLinks: lanes, NVLinkVersion: 2, PCIe: path}
	}
	tests := []struct {
		name         string
		there, back  []inventory.Link
		numaA, numaB int
		label, pcie  string
		score        int
	}{
		{"neither end knows", nil, nil, 0, 0, "?", "?", 0},
		{"one end knows", nil, []inventory.Link{link("a", 2, inventory.PCIeSingle)}, 0, 0, "NV2", "PIX", 250},
		{
			"one end knows the lanes, the other the path", []inventory.Link{link("b", 2, inventory.PCIeUnknown)},
			[]inventory.Link{link("a", 0, inventory.PCIeSystem)}, 0, 0, "NV2", "SYS", 210,
		},
		{
			"one end sees more lanes", []inventory.Link{link("b", 1, inventory.PCIeSystem)},
			[]inventory.Link{link("a", 2, inventory.PCIeSystem)}, 0, 0, "NV2", "SYS", 210,
		},
		{"one lane, which one end sees", []inventory.Link{link("b", 1, inventory.PCIeSystem)}, nil, 0, 0, "NV1", "SYS",
			110},
		{"no path, one NUMA node", []inventory.Link{link("b", 0, inventory.PCIeUnknown)}, nil, 1, 1, "NODE", "NODE",
			20},
		{"no path, two NUMA nodes", []inventory.Link{link("b", 0, inventory.PCIeUnknown)}, nil, 0, 1, "SYS", "SYS", 10},
		{"no path, a NUMA node unknown", []inventory.Link{link("b", 0, inventory.PCIeUnknown)}, nil, 0,
			inventory.NoNUMANode, "?", "?", 0},
		{
			"links to itself and to strangers", []inventory.Link{link("a", 9, inventory.PCIeSingle),
				link("z", 9, inventory.PCIeSingle)},
			nil, 0, 0, "?", "?", 0,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			g := topology.New([]inventory.GPU{
				{UUID: "a", Index: 0, NUMANode: tt.numaA, Links: tt.there},
				{UUID: "b", Index: 1, NUMANode: tt.numaB, Links: tt.back},
			})
			rows := g.Matrix().GPUs
			for _, cell := range []topology.MatrixPeer{rows[0].Peers[1], rows[1].Peers[0]} {
				if cell.Label != tt.label || cell.PCIe != tt.pcie || cell.Score != tt.score {
					t.Errorf("got %+v, want %s, %s, %d", cell, tt.label, tt.pcie, tt.score)
				}
			}
		})
	}
}

func TestMatrix(t *testing.T) {
	t.Parallel()
	gpus := bridges(4)[:3]
	gpus[0].Model = "NVIDIA A40"
	want := topology.Matrix{GPUs: []topology.MatrixGPU{
		{Index: 0, UUID: "GPU-00", BDF: "0000:00:00.0", Model: "NVIDIA A40", NUMANode: 0, Peers: []topology.MatrixPeer{
			{UUID: "GPU-00", Label: "X", PCIe: "?"},
			{UUID: "GPU-01", Label: "NV4", NVLinks: 4, NVLinkVersion: 3, PCIe: "PIX", Score: 450},
			{UUID: "GPU-02", Label: "SYS", PCIe: "SYS", Score: 10},
		}},
		{Index: 1, UUID: "GPU-01", BDF: "0000:01:00.0", NUMANode: 0, Peers: []topology.MatrixPeer{
			{UUID: "GPU-00", Label: "NV4", NVLinks: 4, NVLinkVersion: 3, PCIe: "PIX", Score: 450},
			{UUID: "GPU-01", Label: "X", PCIe: "?"},
			{UUID: "GPU-02", Label: "SYS", PCIe: "SYS", Score: 10},
		}},
		{Index: 2, UUID: "GPU-02", BDF: "0000:02:00.0", NUMANode: 1, Peers: []topology.MatrixPeer{
			{UUID: "GPU-00", Label: "SYS", PCIe: "SYS", Score: 10},
			{UUID: "GPU-01", Label: "SYS", PCIe: "SYS", Score: 10},
			{UUID: "GPU-02", Label: "X", PCIe: "?"},
		}},
	}}
	if diff := gocmp.Diff(want, topology.New(gpus).Matrix()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestNewLeavesOutWhatItCannotHold(t *testing.T) {
	t.Parallel()
	g := topology.New(uniform(70))
	if g.Len() != topology.MaxGPUs || g.Everything().Len() != topology.MaxGPUs {
		t.Errorf("a graph of 70 GPUs has %d", g.Len())
	}
	if _, ok := g.Position("GPU-65"); ok {
		t.Error("GPU-65 has a position")
	}
	twice := append(bridges(4), bridges(4)[1])
	if g := topology.New(twice); g.Len() != 4 {
		t.Errorf("a GPU that comes twice is there twice: %d", g.Len())
	}
}

func TestEqual(t *testing.T) {
	t.Parallel()
	g := topology.New(dgx1())
	healthy := dgx1()
	healthy[2].Health = inventory.Health{State: inventory.Unhealthy, Reason: "XID 79"}
	if !g.Equal(topology.New(healthy)) {
		t.Error("health changes the graph")
	}
	for name, other := range map[string][]inventory.GPU{
		"a link down": dgx1LinkDown(), "a GPU less": dgx1()[:7], "no GPUs": nil,
	} {
		if g.Equal(topology.New(other)) {
			t.Errorf("%s does not change the graph", name)
		}
	}
}
