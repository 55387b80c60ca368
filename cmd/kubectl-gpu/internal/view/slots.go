package view

import (
	"cmp"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/slots"
)

// The label and the annotations of slots; gpu-node-agent writes them.
const (
	SlotLabel        = Domain + "/slot"
	changeAnnotation = Domain + "/change"
	stateAnnotation  = Domain + "/change.state"
	// ReasonAnnotation is why a change failed, or why the cluster is paused.
	ReasonAnnotation = Domain + "/change.reason"
)

// silence is how long a node with a slot has not renewed it when it counts as silent. A node renews
// its slot each minute.
const silence = 5 * time.Minute

// A Rollout is the state of the changes of a cluster.
type Rollout struct {
	Paused bool   `json:"paused"`
	Reason string `json:"reason,omitempty"` // of the pause
	Slots  []Slot `json:"slots"`
	// Waiting are the nodes whose change is still to come.
	Waiting []string `json:"waiting"`
}

// A Slot is a slot that a node has.
type Slot struct {
	Name   string    `json:"name"`
	Node   string    `json:"node"`
	State  SlotState `json:"state"`
	Change string    `json:"change"`
	Reason string    `json:"reason,omitempty"`
	Since  time.Time `json:"since"`
}

// SlotState is what a node with a slot does.
type SlotState string

// The states.
const (
	SlotChanging SlotState = "changing" // it changes
	SlotFailed   SlotState = "failed"   // the change failed; the node tries again by itself
	SlotSilent   SlotState = "silent"   // its agent does not renew the slot
	SlotGone     SlotState = "gone"     // there is no such Node; the API server deletes the slot soon
)

// NewRollout returns the state of the changes by the slots, the UIDs of the Nodes that have slots by
// their names, and the names of the Nodes that are not finished.
func NewRollout(
	leases []coordinationv1.Lease, nodes map[string]types.UID, unfinished []string, now time.Time,
) Rollout {
	r := Rollout{Slots: []Slot{}, Waiting: []string{}}
	has := map[string]bool{}
	for _, l := range leases {
		switch {
		case l.Name == slots.Paused:
			r.Paused, r.Reason = true, l.Annotations[ReasonAnnotation]
			continue
		case !strings.HasPrefix(l.Name, slots.Prefix):
			continue
		}
		s := Slot{
			Name: l.Name, Change: l.Annotations[changeAnnotation], Reason: l.Annotations[ReasonAnnotation],
			State: SlotChanging,
		}
		if l.Spec.HolderIdentity != nil {
			s.Node = *l.Spec.HolderIdentity
		}
		if l.Spec.AcquireTime != nil {
			s.Since = l.Spec.AcquireTime.Time
		}
		switch renewed := l.Spec.RenewTime; {
		case s.Node == "":
			s.State, s.Reason = SlotSilent, "the Lease names no node; delete it if nobody needs it"
		case !isOf(l, nodes):
			s.State = SlotGone
		case slots.State(l.Annotations[stateAnnotation]) == slots.Failed:
			s.State = SlotFailed
		case renewed == nil || now.Sub(renewed.Time) > silence:
			s.State = SlotSilent
		}
		has[s.Node] = true
		r.Slots = append(r.Slots, s)
	}
	for _, name := range unfinished {
		if !has[name] {
			r.Waiting = append(r.Waiting, name)
		}
	}
	slices.Sort(r.Waiting)
	slices.SortFunc(r.Slots, func(a, b Slot) int {
		return cmp.Or(cmp.Compare(len(a.Name), len(b.Name)), strings.Compare(a.Name, b.Name))
	})
	return r
}

// isOf reports whether the node of a slot exists: the Node that owns the Lease, not a later Node of the
// same name.
func isOf(l coordinationv1.Lease, nodes map[string]types.UID) bool {
	uid, exists := nodes[*l.Spec.HolderIdentity]
	return exists && !slices.ContainsFunc(l.OwnerReferences, func(o metav1.OwnerReference) bool {
		return o.Kind == "Node" && o.UID != uid
	})
}

// UnfinishedNodes is the label selector of the nodes whose MIG layout is still to come, or failed.
const UnfinishedNodes = "nvidia.com/mig.config.state in (pending,failed,rebooting)"
