// Package slots decides when a node may change: its driver, its MIG layout or a GPU. At most as many
// nodes change at a time as the cluster has slots. A slot is a Lease with a fixed name. A node takes
// a slot when it creates the Lease, and gives the slot back when it deletes the Lease. The API server
// creates a name only once, so two nodes never have the same slot.
//
// A node keeps the slot of a failed change. A bad change therefore stops after as many nodes as
// there are slots.
package slots

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
)

const (
	// Prefix is the start of the name of each slot; the number of the slot follows, from 0.
	Prefix = "gpu-change-"
	// Paused is the name of the Lease that stops all nodes from taking slots.
	Paused = Prefix + "paused"
	// LastWave is the wave of a node without the label: after all other waves.
	LastWave = math.MaxInt32
)

// Name returns the name of a slot.
func Name(number int) string { return Prefix + strconv.Itoa(number) }

// A State is the state of the change of a node with a slot.
type State string

// The states.
const (
	// Checking means that the node has created the Lease, and has not yet seen whether another node
	// took a slot at the same time that excludes this one.
	Checking State = "checking"
	// Working means that the node changes.
	Working State = "working"
	// Failed means that the change failed. The node keeps the slot.
	Failed State = "failed"
)

// A Slot is a slot that a node has.
type Slot struct {
	Name, Node string
	State      State
	// Wave and Domain are those of the node; Domain is empty without a topology label.
	Wave   int
	Domain string
}

// Rules limit which nodes change at the same time.
type Rules struct {
	// Slots is how many nodes may change at the same time.
	Slots int
	// Soak is how long all nodes of the earlier waves must have been well.
	Soak time.Duration
	// Windows are the times at which a change may begin; none for any time.
	Windows []Window
}

// A Request is a node that is to change.
type Request struct {
	Node   string
	Wave   int
	Domain string
}

// Cluster is what the API server says about the other nodes.
type Cluster struct {
	// Paused is true while no node may take a slot. Reason is the operator's reason.
	Paused bool
	Reason string
	// Slots are all slots that nodes have.
	Slots []Slot
	// Unfinished are the nodes of earlier waves whose change is still to come, or failed.
	Unfinished []string
	// WellSince is the time since which Unfinished has been empty.
	WellSince time.Time
}

// Take returns the name of a free slot for the node, or the reason why the node must wait.
func Take(r Request, rules Rules, c Cluster, now time.Time) (name, reason string) {
	if reason := Refusal(r, rules, c, now); reason != "" {
		return "", reason
	}
	for i := range rules.Slots {
		if !slices.ContainsFunc(c.Slots, func(s Slot) bool { return s.Name == Name(i) }) {
			return Name(i), ""
		}
	}
	return "", "all slots of the cluster are in use; one belongs to an earlier Node of this name: the API server " +
		"deletes it soon, or kubectl gpu rollout retry frees it"
}

// Refusal returns why the node must not change now; empty if it may. The node's own slot does not
// count. A node calls Refusal again after it took a slot, with what the API server says then: of two
// nodes that exclude each other, at least the later one sees the other one's slot.
func Refusal(r Request, rules Rules, c Cluster, now time.Time) string {
	var others []Slot
	for _, s := range c.Slots {
		if s.Node != r.Node {
			others = append(others, s)
		}
	}
	switch {
	case c.Paused && c.Reason != "":
		return fmt.Sprintf("changes of the cluster are paused: %s; continue with kubectl gpu rollout resume", c.Reason)
	case c.Paused:
		return "changes of the cluster are paused; continue with kubectl gpu rollout resume"
	case rules.Slots == 0:
		return "no node may change: rollout.slots is 0"
	case len(others) >= rules.Slots:
		return full(others)
	}
	for _, s := range others {
		if r.Domain != "" && s.Domain == r.Domain {
			return fmt.Sprintf("node %s in the same topology domain %s %s", s.Node, r.Domain, s.State.phrase())
		}
	}
	for _, s := range others {
		if s.Wave < r.Wave {
			return fmt.Sprintf("node %s of an earlier wave %s", s.Node, s.State.phrase())
		}
	}
	switch {
	case len(c.Unfinished) > 0:
		return fmt.Sprintf("nodes of earlier waves are not finished: %s", wording.List(c.Unfinished))
	case r.Wave > 0 && now.Sub(c.WellSince) < rules.Soak:
		return fmt.Sprintf("the nodes of earlier waves must have been well for %v", rules.Soak)
	case len(rules.Windows) > 0 && !slices.ContainsFunc(rules.Windows, func(w Window) bool { return w.Has(now) }):
		return "outside of the maintenance windows: " + windowTexts(rules.Windows)
	}
	return ""
}

// phrase says what a node with the state does.
func (s State) phrase() string {
	if s == Failed {
		return "has failed to change"
	}
	return "is changing"
}

// full says which nodes have the slots.
func full(others []Slot) string {
	var failed, changing []string
	for _, s := range others {
		if s.State == Failed {
			failed = append(failed, s.Node)
		} else {
			changing = append(changing, s.Node)
		}
	}
	var parts []string
	if len(failed) > 0 {
		parts = append(parts, fmt.Sprintf("failed: %s", wording.List(failed)))
	}
	if len(changing) > 0 {
		parts = append(parts, fmt.Sprintf("changing: %s", wording.List(changing)))
	}
	reason := "all slots of the cluster are in use; " + strings.Join(parts, "; ")
	if len(changing) == 0 {
		reason += "; repair the nodes, or try again with kubectl gpu rollout retry NODE"
	}
	return reason
}
