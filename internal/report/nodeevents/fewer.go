package nodeevents

import "time"

const (
	// fewerSettles is how long after the node was seen with the taint the pods of the node are looked
	// at: the scheduler knows of the taint by then, and what it decided before has reached the API
	// server.
	fewerSettles = 2 * time.Second
	// fewerLooks is the pause between two looks at the pods.
	fewerLooks = 500 * time.Millisecond
	// FewerMost is how long the node has the taint at most.
	FewerMost = time.Minute
)

// Fewer is what is known of a change by which a node gets fewer devices.
type Fewer struct {
	// Number is that of the change that waits; 0 if none waits. GivenUp is the one for which the node
	// had the taint for long enough.
	Number, GivenUp uint64
	// Leads says since when this process has had to do with it; zero if such changes are not
	// announced.
	Leads time.Time
	// Tainted says since when the node is known to have the taint; zero if it has not.
	Tainted time.Time
	// Admitted says that kubelet had admitted all pods of the node at some time since then.
	Admitted bool
	// Shown says that the Node's status has no more devices than kubelet is offered.
	Shown bool
}

// A FewerStep is what is to be done for such a change.
type FewerStep struct {
	// Taint says that the node is to have the taint, Proceed that the change is to go on, GiveUp that
	// it is not waited for any more.
	Taint, Proceed, GiveUp bool
	// Look says that the pods of the node are to be looked at.
	Look bool
	// At is when to decide anew, if nothing happens before; zero for never.
	At time.Time
}

// Next decides what is to be done now. The node has the taint from when a change waits until its
// status shows the new number of devices, and for a minute at most. A process that takes the lead
// before the status shows it has the node tainted, too. It never waits for pods that hold GPUs.
func (f Fewer) Next(now time.Time) FewerStep {
	tainted, waits := !f.Tainted.IsZero(), f.Number != 0
	until := f.Tainted.Add(FewerMost)
	switch {
	case waits && f.Number == f.GivenUp:
		return FewerStep{Proceed: true}
	case tainted && !now.Before(until):
		return FewerStep{Proceed: waits, GiveUp: waits}
	case waits && !tainted:
		return FewerStep{Taint: true}
	case waits && !f.Admitted:
		if settled := f.Tainted.Add(fewerSettles); now.Before(settled) {
			return FewerStep{Taint: true, At: settled}
		}
		return FewerStep{Taint: true, Look: true, At: earlier(now.Add(fewerLooks), until)}
	case waits:
		return FewerStep{Taint: true, Proceed: true, At: until}
	case tainted && !f.Shown:
		return FewerStep{Taint: true, At: until}
	case !f.Shown && now.Before(f.Leads.Add(FewerMost)): // a change of the process that led before
		return FewerStep{Taint: true}
	}
	return FewerStep{}
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}
