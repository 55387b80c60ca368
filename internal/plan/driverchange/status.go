package driverchange

import (
	"fmt"
	"reflect"
	"time"
)

// A State is the progress of a node, for people and programs.
type State string

// The states.
const (
	Off        State = ""          // no driver is wanted
	Done       State = "done"      // the wanted driver is loaded and works
	Waiting    State = "waiting"   // for the reason
	Changing   State = "changing"  // steps are in progress
	AwaitsBoot State = "next-boot" // the next boot changes the driver
	Failed     State = "failed"    // the node keeps its slot
	Blocked    State = "blocked"   // the change cannot begin; the node takes no slot
)

// States are the states of a node with a wanted driver, from the worst to the best.
var States = []State{Failed, Blocked, AwaitsBoot, Waiting, Changing, Done}

// A Status is the progress of a node.
type Status struct {
	// Known is false before the first answer of gpu-driver, and while it does not answer.
	Known bool `json:"-"`
	// Wanted is the configured version or digest; empty for none.
	Wanted string `json:"wanted,omitempty"`
	State  State  `json:"state,omitempty"`
	Reason string `json:"reason,omitempty"` // a sentence without a full stop
	// Digest is the folder of the wanted driver, and Loaded the version of the loaded one; empty if
	// there is none.
	Digest string `json:"digest,omitempty"`
	Loaded string `json:"loaded,omitempty"`
	// Percent is the progress of a change under way, 0 to 100.
	Percent int       `json:"percent,omitempty"`
	Since   time.Time `json:"since"` // start of State
	// Holders are the users of the driver for which the change waits, in words.
	Holders []string `json:"holders,omitempty"`
	// Withholds is true while no GPU is offered, and NeedsSlot while the change has or wants a slot of
	// the cluster.
	Withholds bool `json:"withholds,omitempty"`
	NeedsSlot bool `json:"-"`
	// Reboot is why the node must be restarted; empty if it need not.
	Reboot string `json:"reboot,omitempty"`
}

// Line describes the progress in one line, for people; empty for nil.
func (s *Status) Line() string {
	if s == nil {
		return ""
	}
	line := string(s.State)
	if (s.State == Changing || s.State == Waiting) && s.Percent > 0 {
		line += fmt.Sprintf(", %d %%", s.Percent)
	}
	if s.Wanted != "" {
		line += " to " + s.Wanted
	}
	switch {
	case s.Loaded == "" || s.Loaded == s.Wanted:
	case s.State == Done: // Wanted is a digest
		line += ", version " + s.Loaded
	default:
		line += " from " + s.Loaded
	}
	if !s.Since.IsZero() {
		line += " since " + s.Since.UTC().Format(time.RFC3339)
	}
	if s.Reason != "" {
		line += ": " + s.Reason
	}
	return line
}

// Equal reports whether two Statuses are equal.
func (s Status) Equal(other Status) bool { return reflect.DeepEqual(s, other) }
