package repair

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
)

// The rule for the stop of all repairs.
const (
	// StopPercent is the greatest share of the GPU nodes that may ask for a repair within StopTime. Up
	// to StopNodes nodes may ask in any case.
	StopPercent = 20
	StopTime    = time.Hour
	StopNodes   = 2
)

// The names of Leases.
const (
	// LeasePrefix is the start of the name of the Lease of each node with repairs; the name of the node
	// follows.
	LeasePrefix = "gpu-repair-node-"
	// Stopped is the name of the Lease that stops all repairs of the cluster, and Resumed the name of
	// the Lease whose time of renewal is when they were resumed last.
	Stopped = "gpu-repair-stopped"
	Resumed = "gpu-repair-resumed"
)

// An Ask is a node that asked for a repair.
type Ask struct {
	Node string
	At   time.Time
}

// Asking returns the nodes that asked within StopTime and since the repairs of the cluster were
// resumed, sorted. A time in the future counts: clocks differ.
func Asking(asks []Ask, resumed, now time.Time) []string {
	var nodes []string
	for _, a := range asks {
		if now.Sub(a.At) < StopTime && a.At.After(resumed) {
			nodes = append(nodes, a.Node)
		}
	}
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// StopReason returns why all repairs of the cluster must stop: more nodes than are likely to fail
// by chance ask for a repair. It is empty if they may go on. Parameter gpuNodes is the number of the
// cluster's GPU nodes; 0 if unknown.
func StopReason(asking []string, gpuNodes int) string {
	if len(asking) <= StopNodes || len(asking)*100 <= gpuNodes*StopPercent {
		return ""
	}
	of := "nodes"
	if gpuNodes > 0 {
		of = fmt.Sprintf("of %d GPU nodes", gpuNodes)
	}
	return fmt.Sprintf("%d %s asked for a repair within %v: %s", len(asking), of, StopTime,
		wording.List(asking))
}
