package health

import (
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Policy are the rules by which faults open and close. The zero value cannot be used; Default has
// good values.
//
// A fault that was found by a reading closes when Passes readings in a row, the first and the last
// at least Settle apart, do not find it. A fault of an XID or another event closes in the same way
// if the recovery action covers it and is NONE; otherwise evidence of a reset is needed as well. A
// fault with the cure reboot needs a new boot ID, and one with the cure hardware or human needs an
// operator.
type Policy struct {
	// Interval is the time between two readings of a GPU that looks well.
	Interval  time.Duration
	Overrides Overrides
	// SuspectLimit is how long a device may be Suspect before it becomes Unhealthy.
	SuspectLimit time.Duration
	// UnknownGrace is how long a device may be given new work after the driver stopped answering.
	UnknownGrace time.Duration
	// Passes is how many readings in a row must find the evidence gone before a fault closes.
	Passes int
	// SuspectSettle and Settle are the least time between the first and the last pass, for Suspect
	// devices and for worse ones: the recovery action may change some time after the event, and a cure
	// must last.
	SuspectSettle, Settle time.Duration
	// FlapLimit is how many recoveries within FlapWindow are accepted. After one more an operator has
	// to clear the fault.
	FlapLimit  int
	FlapWindow time.Duration
	// FabricReported means that the state of the NVSwitch fabric is reported only.
	FabricReported bool
	// IMEXGates means that a GPU gets no new work while the driver asks for the recovery of the IMEX
	// domain. Otherwise that is reported only: it concerns fabric memory alone, and the next pod may
	// bring up the domain.
	IMEXGates bool
	// EnergyEvidence means that a fall of the energy counter is evidence of a reset.
	EnergyEvidence bool
	// ReopenAlways means that NVML is opened anew for a GPU that only a new session can find also
	// where another GPU without persistence mode loses settings by it, such as power limits.
	ReopenAlways bool
	// Manual means that an operator has to clear every fault that makes a device Unhealthy or Lost.
	Manual bool
}

// Default returns the policy that counts if the operator sets no other.
func Default() Policy {
	return Policy{
		Interval:      4 * time.Second,
		SuspectLimit:  5 * time.Second,
		UnknownGrace:  10 * time.Second,
		Passes:        2,
		SuspectSettle: time.Second,
		Settle:        3 * time.Second, // two polls of 4 s, whatever their jitter
		FlapLimit:     3,
		FlapWindow:    24 * time.Hour,
	}
}

// Verdict returns the health of a device as it is published. If the operator switched all checks
// off, it is Healthy whatever faults the device has.
func (p Policy) Verdict(d Device) inventory.Health {
	if p.Overrides.Off() {
		return inventory.Health{State: inventory.Healthy, Since: d.Health.Since}
	}
	return d.Health
}

// Facts are what a fold needs besides the event or reading.
type Facts struct {
	// Branch is the driver's branch, such as 580; 0 while no driver was seen.
	Branch int
	// Opened is when the session of the reading was opened. Handles of a session from before a GPU was
	// lost or reset say nothing about that GPU.
	Opened time.Time
	// Unmarked says that the driver does not mark a GPU whose own processor (GSP) hangs as one that
	// needs a reset: it is older than inventory.MarksGSP.
	Unmarked bool
}

// coveredBy reports whether the recovery action of a driver branch covers the XID. Every branch
// that has a recovery action covers the XIDs of class Decode.
func (x XID) coveredBy(branch int) bool {
	if x.Class == Decode {
		return branch >= inventory.RecoveryActionBranch
	}
	return x.CoveredFrom != 0 && branch >= x.CoveredFrom
}

// xidFault returns the fault that an XID opens, and false if it opens none.
func (p Policy) xidFault(g GPU, code uint64, facts Facts, now time.Time) (Fault, bool) {
	x := Lookup(code)
	f := Fault{Source: SourceXID, XID: code, State: inventory.Unhealthy, Cure: x.cure()}
	if code == remappingFailed && g.Reading.RowRemapFailure.Known {
		f.Cure = inventory.CureReset // the readings after it say whether the part has to be replaced
	}
	class := x.Class
	switch p.Overrides.Rule(code) {
	case RuleCatalog:
	case RuleIgnore:
		return Fault{}, false
	case RuleSuspect:
		class = Decode
	case RuleFatal:
		f.Reason = because(f.Cure, "%v, fatal by configuration", x)
		return f, true
	}
	switch {
	case class == Application || class == Informational:
		return Fault{}, false
	case class == Decode && g.actionDecides(facts):
		return p.suspect(f, x.String(), now), true
	case code == fellOffTheBus:
		f.State = inventory.Lost
	}
	f.Reason = because(f.Cure, "%v", x)
	return f, true
}

// suspect returns f with the state Suspect, until the recovery action is read.
func (p Policy) suspect(f Fault, what string, now time.Time) Fault {
	f.State = inventory.Suspect
	f.Reason = what + ": waiting for the recovery action of the driver"
	f.limit = now.Add(p.SuspectLimit)
	return f
}
