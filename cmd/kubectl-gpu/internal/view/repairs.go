package view

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
)

// The label and the annotations of Leases about repairs; gpu-node-agent writes them.
const (
	RepairLabel        = Domain + "/repair"
	repairStatus       = Domain + "/repair.status"
	repairStopped      = Domain + "/repair.reason"
	maxRepairStatus    = 64 << 10
	repairStateUnknown = "unknown"
)

// Repairs are the repairs of the GPUs of a cluster.
type Repairs struct {
	// Stopped is true while no node begins a repair, because too many nodes asked for one; Reason has
	// the nodes.
	Stopped bool     `json:"stopped"`
	Reason  string   `json:"reason,omitempty"`
	Repairs []Repair `json:"repairs"`
}

// A Repair is a GPU that needs a reset, or a reset of the last 24 hours.
type Repair struct {
	Node string `json:"node"`
	// GPU is the index of a GPU that needs a reset, and the UUIDs of GPUs that were reset.
	GPU string `json:"gpu"`
	// State is ready, waiting, repairing, manual, repaired, failed or unknown.
	State string    `json:"state"`
	Since time.Time `json:"since,omitzero"`
	// Reason is what the GPU waits for, or its state before and after the reset.
	Reason string `json:"reason"`
}

// NewRepairs returns the repairs by the Leases of the nodes, sorted by node. A GPU that needs a reset
// precedes the resets of its node.
func NewRepairs(leases []coordinationv1.Lease) Repairs {
	r := Repairs{Repairs: []Repair{}}
	for _, l := range leases {
		node, isNode := strings.CutPrefix(l.Name, repair.LeasePrefix)
		switch {
		case l.Name == repair.Stopped:
			r.Stopped, r.Reason = true, l.Annotations[repairStopped]
		case isNode:
			r.Repairs = append(r.Repairs, repairsOf(node, l.Annotations[repairStatus])...)
		}
	}
	slices.SortStableFunc(r.Repairs, func(a, b Repair) int { return cmp.Compare(a.Node, b.Node) })
	return r
}

func repairsOf(node, text string) (all []Repair) {
	var s repair.Status
	if len(text) > maxRepairStatus {
		return []Repair{{Node: node, State: repairStateUnknown, Reason: "its Lease is too large"}}
	}
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return []Repair{{Node: node, State: repairStateUnknown, Reason: "its Lease cannot be read: " + err.Error()}}
	}
	for _, step := range s.Steps {
		all = append(all, Repair{node, fmt.Sprint(step.Index), string(step.State), step.Since, step.Reason})
	}
	for _, a := range s.Attempts {
		done := Repair{node, strings.Join(a.GPUs, ","), "failed", a.Began, a.Before + " → " + a.After}
		switch {
		case a.Ended.IsZero():
			continue // a step shows it
		case a.Repaired:
			done.State = "repaired"
		}
		all = append(all, done)
	}
	return all
}
