package health

import (
	"fmt"
	"maps"
	"strconv"
	"strings"
)

// Rule is the operator's treatment of an XID.
type Rule string

// The rules.
const (
	// RuleCatalog: follow the catalog.
	RuleCatalog Rule = ""
	// RuleIgnore: only count the XID.
	RuleIgnore Rule = "ignore"
	// RuleSuspect: let the driver's recovery action decide.
	RuleSuspect Rule = "suspect"
	// RuleFatal: Unhealthy at once, until there is evidence of a reset or an operator clears the
	// fault.
	RuleFatal Rule = "fatal"
)

// Overrides are the operator's rules for XIDs. They take precedence over the catalog, but not over
// readings: a lost GPU is Lost in any case. The zero value has no rules. Overrides are immutable in
// use.
type Overrides struct {
	others Rule
	xids   map[uint64]Rule
}

// Rule returns the rule for an XID.
func (o Overrides) Rule(code uint64) Rule {
	if r, ok := o.xids[code]; ok {
		return r
	}
	return o.others
}

// Off reports whether the operator disabled all health checks: every XID is ignored.
func (o Overrides) Off() bool {
	if o.others != RuleIgnore {
		return false
	}
	for _, r := range o.xids {
		if r != RuleIgnore {
			return false
		}
	}
	return true
}

// With returns a copy with the given rule for code.
func (o Overrides) With(code uint64, r Rule) Overrides {
	xids := maps.Clone(o.xids)
	if xids == nil {
		xids = make(map[uint64]Rule)
	}
	xids[code] = r
	return Overrides{others: o.others, xids: xids}
}

// Equal reports whether two Overrides have the same rules.
func (o Overrides) Equal(other Overrides) bool {
	return o.others == other.others && maps.Equal(o.xids, other.xids)
}

// ParseOverrides parses DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS. Each is a
// comma-separated list of XIDs, or "all" (or "xids"). A disabled XID is ignored. An enabled XID is
// fatal, like every XID in NVIDIA's plugin, the origin of these variables. Enable takes precedence
// over disable, and the catalog decides about all other XIDs. If all XIDs are disabled and none is
// enabled, all health checks are off, as in NVIDIA's plugin. malformed has the skipped entries,
// each as a sentence for a warning.
func ParseOverrides(disable, enable string) (o Overrides, malformed []string) {
	apply := func(variable, list string, r Rule) {
		for entry := range strings.SplitSeq(list, ",") {
			entry = strings.ToLower(strings.TrimSpace(entry))
			switch entry {
			case "":
				continue
			case "all", "xids":
				o = Overrides{others: r}
				continue
			}
			code, err := strconv.ParseUint(entry, 10, 64)
			if err != nil {
				malformed = append(malformed, fmt.Sprintf("%s: %q is neither an XID nor \"all\" and is left out",
					variable, entry))
				continue
			}
			o = o.With(code, r)
		}
	}
	apply("DP_DISABLE_HEALTHCHECKS", disable, RuleIgnore)
	apply("DP_ENABLE_HEALTHCHECKS", enable, RuleFatal)
	return o, malformed
}
