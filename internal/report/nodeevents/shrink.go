package nodeevents

import (
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
)

const (
	// shrinkSettles is the pause between the taint and the first check of the node's pods. After
	// it, the scheduler knows the taint, and its earlier decisions have reached the API server.
	shrinkSettles = 2 * time.Second
	// shrinkPause is the pause between two checks of the pods.
	shrinkPause = 500 * time.Millisecond
	// ShrinkTimeout is the longest duration of the taint.
	ShrinkTimeout = time.Minute
)

// Shrink is the state of a change after which a node has fewer devices.
type Shrink struct {
	// Number is the number of the pending change; 0 if none is pending. GivenUp is the number of
	// the last change with an expired taint.
	Number, GivenUp uint64
	// Leads is when this process became responsible for such changes; zero if they are not
	// announced.
	Leads time.Time
	// Tainted is when the node was first seen with the taint; zero if it has no taint.
	Tainted time.Time
	// Admitted is true if the kubelet had admitted all pods of the node at some time since then.
	Admitted bool
	// Shown is true if the Node's status has no more devices than the kubelet's new list.
	Shown bool
}

// A ShrinkStep is the next action for such a change.
type ShrinkStep struct {
	// Taint is the wanted state of the taint. Proceed lets the change continue. GiveUp stops
	// waiting for the change.
	Taint, Proceed, GiveUp bool
	// Look requests a check of the node's pods.
	Look bool
	// At is the time of the next decision, if nothing happens before; zero for never.
	At time.Time
}

// Next decides what to do now. The node has the taint from the announcement of a change until the
// Node's status shows the new number of devices, but for at most a minute. A process that takes the
// lead before the status shows the number also taints the node. The decision never waits for pods
// that hold GPUs.
func (f Shrink) Next(now time.Time) ShrinkStep {
	tainted, waits := !f.Tainted.IsZero(), f.Number != 0
	until := f.Tainted.Add(ShrinkTimeout)
	switch {
	case waits && f.Number == f.GivenUp:
		return ShrinkStep{Proceed: true}
	case tainted && !now.Before(until):
		return ShrinkStep{Proceed: waits, GiveUp: waits}
	case waits && !tainted:
		return ShrinkStep{Taint: true}
	case waits && !f.Admitted:
		if settled := f.Tainted.Add(shrinkSettles); now.Before(settled) {
			return ShrinkStep{Taint: true, At: settled}
		}
		return ShrinkStep{Taint: true, Look: true, At: order.Earliest(now.Add(shrinkPause), until)}
	case waits:
		return ShrinkStep{Taint: true, Proceed: true, At: until}
	case tainted && !f.Shown:
		return ShrinkStep{Taint: true, At: until}
	case !f.Shown && now.Before(f.Leads.Add(ShrinkTimeout)): // a change of the previous leader
		return ShrinkStep{Taint: true}
	}
	return ShrinkStep{}
}
