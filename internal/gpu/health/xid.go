package health

import (
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// coveredBy reports whether the recovery action of a driver branch covers the XID. Every branch
// with a recovery action covers the XIDs of class Decode.
func (x XID) coveredBy(branch int) bool {
	if x.Class == Decode {
		return branch >= inventory.RecoveryActionBranch
	}
	return x.CoveredFrom != 0 && branch >= x.CoveredFrom
}

// xidFault returns the fault opened by an XID, and false if there is none.
func (p Policy) xidFault(g GPU, code uint64, facts Facts, now time.Time) (Fault, bool) {
	x := Lookup(code)
	f := Fault{Source: SourceXID, XID: code, State: inventory.Unhealthy, Remedy: x.remedy()}
	if code == remappingFailed && g.Reading.RowRemapFailure.Known {
		f.Remedy = inventory.RemedyReset // later readings show whether the part must be replaced
	}
	class := x.Class
	switch p.Overrides.Rule(code) {
	case RuleCatalog:
	case RuleIgnore:
		return Fault{}, false
	case RuleSuspect:
		class = Decode
	case RuleFatal:
		f.Reason = because(f.Remedy, "%v, fatal by configuration", x)
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
	f.Reason = because(f.Remedy, "%v", x)
	return f, true
}

// suspect returns f as Suspect until the recovery action is read.
func (p Policy) suspect(f Fault, what string, now time.Time) Fault {
	f.State = inventory.Suspect
	f.Reason = what + ": waiting for the recovery action of the driver"
	f.limit = now.Add(p.SuspectLimit)
	return f
}
