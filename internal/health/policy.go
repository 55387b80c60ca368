package health

import (
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// Policy are the rules by which faults open and close. The zero value is of no use; Default has good values.
//
// A fault found by a reading closes when Passes readings in a row, the first and the last at least Settle apart, did
// not find it. An XID or another event closes so if the recovery action speaks for it and is NONE; otherwise it needs
// evidence of a reset, too. A reboot needs a new boot ID, and what asks for hands needs an operator.
type Policy struct {
	Overrides Overrides
	// SuspectLimit is how long a device may be Suspect before it is Unhealthy for want of a verdict.
	SuspectLimit time.Duration
	// UnknownGrace is how long a device may be given to new work after the driver stopped answering.
	UnknownGrace time.Duration
	// Passes is how many readings in a row must find the evidence gone before a fault closes.
	Passes int
	// SuspectSettle and Settle are the least time between the first and the last of the passes, of a Suspect device and
	// of one that is worse: the driver's verdict may trail the event, and a cure must last.
	SuspectSettle, Settle time.Duration
	// FlapLimit is how many recoveries within FlapWindow are believed; one more, and an operator has to look.
	FlapLimit  int
	FlapWindow time.Duration
	// FabricReported has the state of the NVSwitch fabric reported, and not acted on.
	FabricReported bool
	// IMEXGates keeps a GPU from work while the driver asks for the recovery of the IMEX domain. Otherwise that is reported
	// only: it concerns allocations of fabric memory alone, and the domain may be brought up by the next pod.
	IMEXGates bool
	// EnergyEvidence takes a fall of the energy counter for evidence of a reset.
	EnergyEvidence bool
	// Manual leaves every recovery of an Unhealthy or Lost device to an operator.
	Manual bool
}

// Default returns the policy that holds where an operator says nothing else.
func Default() Policy {
	return Policy{
		SuspectLimit:  5 * time.Second,
		UnknownGrace:  10 * time.Second,
		Passes:        2,
		SuspectSettle: time.Second,
		Settle:        4 * time.Second, // two fast polls of 5 s, whatever their jitter
		FlapLimit:     3,
		FlapWindow:    24 * time.Hour,
	}
}

// Verdict returns the verdict on a device that counts: where the operator switched all checks off, it is Healthy whatever
// its faults are.
func (p Policy) Verdict(d Device) inventory.Health {
	if p.Overrides.Off() {
		return inventory.Health{State: inventory.Healthy, Since: d.Health.Since}
	}
	return d.Health
}

// Facts are what a fold has to know beside the event or reading.
type Facts struct {
	// Branch is the driver's branch, such as 580; 0 while no driver was seen.
	Branch int
	// Opened is when the session was opened that the reading came from. Handles from before a GPU was lost or reset say
	// nothing about it.
	Opened time.Time
}

// spokenFor reports whether the recovery action of a driver branch speaks for the XID. It does for every XID whose
// number does not decide, once there is a recovery action at all.
func (x XID) spokenFor(branch int) bool {
	if x.Class == Decode {
		return branch >= inventory.RecoveryActionBranch
	}
	return x.SpokenFrom != 0 && branch >= x.SpokenFrom
}

// verdict returns the fault that an XID opens, and false if it opens none.
func (p Policy) verdict(g GPU, code uint64, facts Facts, now time.Time) (Fault, bool) {
	x := Lookup(code)
	f := Fault{Source: SourceXID, XID: code, State: inventory.Unhealthy, Cure: x.cure()}
	if code == remappingFailed && g.Reading.RowRemapFailure.Known {
		f.Cure = inventory.CureReset // what is read after it says whether the part is used up
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
	case class == Decode && g.verdicts(facts):
		return p.suspect(f, x.String(), now), true
	case code == fellOffTheBus:
		f.State = inventory.Lost
	}
	f.Reason = because(f.Cure, "%v", x)
	return f, true
}

// suspect turns f into a suspicion: what happened, whose verdict the driver has yet to give.
func (p Policy) suspect(f Fault, what string, now time.Time) Fault {
	f.State = inventory.Suspect
	f.Reason = what + ": waiting for the driver's verdict"
	f.limit = now.Add(p.SuspectLimit)
	return f
}
